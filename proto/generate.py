"""Generates `diptych/v1/` from `proto/diptych/v1/`: messages, stubs and type files.

Knows only this folder, so that it also runs in an isolated build environment, where Diptych is not installed.
Made with grpcio-tools of at most 1.84: code from a newer one refuses the older grpcio of GPU hosts.
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = "diptych/v1/inference.proto"


def generate(destination: Path) -> list[Path]:
    """Writes the package `diptych/v1` below `destination` (it holds `diptych/`); returns the files written."""
    from grpc_tools import protoc

    package = destination / "diptych" / "v1"
    package.mkdir(parents=True, exist_ok=True)
    outputs = [f"--{kind}_out={destination}" for kind in ("python", "pyi", "grpc_python")]
    well_known = str(resources.files("grpc_tools") / "_proto")
    status = protoc.main(["protoc", f"-I{HERE}", f"-I{well_known}", *outputs, SOURCE])
    if status != 0:
        raise SystemExit(f"protoc failed on {SOURCE} with status {status}.")
    return sorted(package.glob("*_pb2*"))


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parent)
