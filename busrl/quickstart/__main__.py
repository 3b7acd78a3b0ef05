"""`python -m busrl.quickstart [--force] [--name tiny:sort]`: make a quickstart model and data now.

Prints the three paths as `key=value` lines; progress goes to stderr. Talks to the maker, which imports torch, only
when something has to be made.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TextIO, cast

from busrl.errors import BusrlError, Unfailing, cause
from busrl.quickstart.cache import Paths, paths
from busrl.quickstart.task import RECIPES


def _make(name: str, force: bool) -> Paths:
    existing = paths(name)
    if existing is not None and not force:
        return existing
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the maker imports transformers
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from busrl.quickstart.maker import make

    return make(name, force=force)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m busrl.quickstart", description="Make a quickstart model and data.")
    parser.add_argument("--name", default=next(iter(RECIPES)), help=f"one of: {', '.join(RECIPES)}")
    parser.add_argument("--force", action="store_true", help="make it again, even if it is there")
    parser.add_argument("--why", type=Path, metavar="FILE", help="write there why it failed")
    chosen = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an ended maker cleans up like one that is interrupted
    try:
        files = _make(chosen.name, chosen.force)
    except BusrlError as error:
        return _failed(chosen.why, str(error), error.exit_code)
    except KeyboardInterrupt:
        return _failed(chosen.why, f"making {chosen.name} was interrupted; nothing is left of it", 130)
    except Exception as problem:
        _failed(chosen.why, cause(problem), 1)
        raise
    print(f"model={files.model}\ntrain={files.train}\nvalidation={files.validation}")
    return 0


def _failed(report: Path | None, why: str, code: int) -> int:
    print(f"busrl quickstart: {why}", file=sys.stderr)
    if report is not None:
        with contextlib.suppress(OSError):
            report.write_text(why)
    return code


if __name__ == "__main__":
    sys.stdout, sys.stderr = (cast(TextIO, Unfailing(stream)) for stream in (sys.stdout, sys.stderr))
    sys.exit(main())  # a closed stdout or stderr does not end the making
