"""Text that others wrote, made safe to print: no character in it can move a cursor or change a terminal.

Pure. Used wherever a person reads what came from the bus, the ring or a file of a run: display, log of `launch`,
`busrl status`, `ring inspect`, `audit` and the monitor. Knows nothing of who wrote it.
"""

from __future__ import annotations

LIMIT = 400


def printable(text: str) -> str:
    """The text with a space for every control character, escape, line end and mark that turns the reading order."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def safe(text: str, limit: int = LIMIT) -> str:
    """One line of bounded length of it, without spaces around."""
    return printable(text[:limit]).strip()
