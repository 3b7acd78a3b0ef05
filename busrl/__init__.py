"""busrl: a message-bus actor runtime for asynchronous reinforcement-learning post-training of language models.

Plain OS processes meet on a ZeroMQ bus (small messages), in a shared-memory slot ring (tensors, and the ledger of
every sample) and in the weight plane. `busrl.check`, `busrl.launch` and `busrl.attach` are the command line's from
Python (docs/python.md).

- Importing this package imports nothing: `busrl.api` is loaded by the first use of one of its names.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers know it by its name; to import typing takes ten times as long as this module
if TYPE_CHECKING:
    from typing import Any

    from busrl.api import Checked, Run, attach, check, launch

__all__ = ["Checked", "Run", "__version__", "attach", "check", "launch"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from busrl import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
