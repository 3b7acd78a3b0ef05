"""The number of the wire protocol, and the rules under which it changes.

Read by the codec alone; knows nothing of sockets. `VERSION` goes into field `v` of every message. A receiver drops
and counts messages whose `v` is not its own, and says so once per sender.

Evolution rules, so that old and new programs can share a bus without a flag day:
- a new field has a default, so that a message without it still decodes;
- a field never changes its type or its meaning, and a removed name is never used again;
- a message type is never renamed, and its topic is always derived from its name;
- whatever can not be done within these rules raises `VERSION`.
"""

from __future__ import annotations

from typing import Final

VERSION: Final = 1
