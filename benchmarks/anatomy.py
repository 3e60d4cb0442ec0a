"""`diptych profile` where nothing of the service is installed (no gRPC): python -m benchmarks.anatomy MODEL …"""

from __future__ import annotations

import argparse
import logging
import sys

from diptych.contract.errors import DiptychError
from diptych.profile.commands import add_commands


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    add_commands(parser.add_subparsers(required=True))
    args = parser.parse_args(["profile", *sys.argv[1:]])
    try:
        code: int = args.run(args)
    except DiptychError as error:
        print(error, file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
