"""The command `busrl`: its verbs, each imported when it is used, and how errors reach a person.

Only argparse and `busrl.errors` are loaded for `busrl --help`; `evaluate` and `export` alone load torch. Knows nothing
of what the verbs do.

- An error that is the user's, another process's or the machine's is one message on stderr and exit code 2.
- A bug of busrl keeps its traceback and ends with 70.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - a Python that finds busrl on its path has not asked pip
    sys.exit(f"busrl: {sys.executable} is Python {sys.version.split()[0]}; busrl needs Python 3.10 or newer: use that")

from busrl.cli.command import main

__all__ = ["main"]
