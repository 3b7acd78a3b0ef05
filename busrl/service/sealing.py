"""Encryption of files that a client downloads, in the format age, where the client names recipients.

Used by the routes of checkpoints. Talks to the package pyrage, which need not be there. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from busrl.service.bodies import BadBody

SUFFIX, FIELD, NATIVE = ".age", "age_encryption_recipients", "age1"


def require_recipients(texts: Sequence[str]) -> None:
    """BadBody: files cannot be encrypted for one of these."""
    if texts:
        _recipients(texts)


def seal(path: Path, texts: Sequence[str], sealed: Path) -> None:
    """Write the file again, encrypted for these recipients."""
    pyrage, recipients = _recipients(texts)
    pyrage.encrypt_file(str(path), str(sealed), recipients)


def _recipients(texts: Sequence[str]) -> tuple[Any, list[Any]]:
    try:
        pyrage: Any = import_module("pyrage")
    except ImportError:
        raise BadBody(FIELD, "the service has no package pyrage to encrypt with",
                      "have it installed beside busrl, or save external weights without recipients") from None
    recipients = []
    for text in texts:
        kind = pyrage.x25519 if text.startswith(NATIVE) else pyrage.ssh
        try:
            recipients.append(kind.Recipient.from_str(text))
        except Exception as problem:  # the package's own types
            raise BadBody(FIELD, f"{text[:100]!r} is no recipient: {problem}", "send age1... or an SSH key") from None
    return pyrage, recipients
