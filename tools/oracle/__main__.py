"""`python tools/oracle RUN_DIR`: recompute every step of a run and compare; exit code 1 if a number is wrong."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.oracle.check import check


def main() -> int:
    parser = argparse.ArgumentParser(prog="oracle", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--tolerance", type=float, default=1e-5, help="relative, and absolute below 1 (default 1e-5)")
    parser.add_argument("--float32", action="store_true", help="load models as float32: quicker, less exact")
    given = parser.parse_args()
    try:
        found = check(given.run_dir, tolerance=given.tolerance, dtype="float32" if given.float32 else "float64")
    except ValueError as problem:
        print(f"oracle: {problem}", file=sys.stderr)
        return 2
    print(found.text())
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
