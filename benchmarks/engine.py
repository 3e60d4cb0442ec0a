"""`diptych bench engine` with the defaults of a large GPU.

python -m benchmarks.engine [--model Llama-3-8B] [--rows 1x1024x128,…] [--out FILE.json]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from diptych.bench.engine import run_engine
from diptych.bench.shapes import SHAPES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="Llama-3-8B", choices=SHAPES)
    parser.add_argument("--rows", default="1x1024x128,32x1024x128,128x1024x128,32x8000x64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--layers", type=int, help="fewer layers, to try it on a CPU")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--out", type=Path)
    run_engine(parser.parse_args(namespace=argparse.Namespace(cache_bytes=0, threads=2)))


if __name__ == "__main__":
    main()
