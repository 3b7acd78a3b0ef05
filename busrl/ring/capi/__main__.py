"""`python -m busrl.ring.capi --include | --lib | --flags`: where the C ABI of the ring is, one line on stdout."""

from __future__ import annotations

import argparse
import sys

from busrl.errors import BusrlError
from busrl.ring import capi


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m busrl.ring.capi", description=__doc__.split(": ")[1])
    what = parser.add_mutually_exclusive_group(required=True)
    for option, function, text in (
        ("--include", capi.include_dir, "the folder of busrl_ring.h"),
        ("--lib", capi.library, "the path of libbusrl_ring.so"),
        ("--flags", capi.flags, "both as flags of a compiler: c++ worker.cpp $(python -m busrl.ring.capi --flags)"),
    ):
        what.add_argument(option, dest="what", action="store_const", const=function, help=text)
    try:
        print(parser.parse_args().what())
    except BusrlError as problem:
        print(problem, file=sys.stderr)
        return problem.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
