"""Plain data in one file: numbers, strings, lists, dicts with string keys, and NumPy arrays among them.

Talks to one file, a NumPy archive without pickle: the arrays under numbers, and a JSON text that says where each
belongs. Knows nothing of what the data mean.

- A file is whole or the old one: it is written beside it and renamed.
- `load` gives equal data back, tuples as lists; a damaged file is a ValueError.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ARRAY, TEXT = "$array", "data"


def save(path: Path, data: Mapping[str, Any]) -> None:
    """Write `data`. OSError if the disk refuses."""
    arrays: list[npt.NDArray[Any]] = []
    text = json.dumps(_taken_out(dict(data), arrays)).encode()
    beside = path.with_suffix(".new")
    with open(beside, "wb") as file:
        members = {f"a{number}": array for number, array in enumerate(arrays)}
        np.savez(file, allow_pickle=False, **{TEXT: np.frombuffer(text, np.uint8)}, **members)
    os.replace(beside, path)


def load(path: Path) -> dict[str, Any] | None:
    """The data of a file, None if there is none. ValueError if it can not be read."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            found: dict[str, Any] = _put_back(json.loads(archive[TEXT].tobytes()), archive)
            return found
    except FileNotFoundError:
        return None
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as problem:
        raise ValueError(f"{path}: can not be read ({problem}); it is not used") from None


def _taken_out(value: Any, arrays: list[npt.NDArray[Any]]) -> Any:
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {ARRAY: len(arrays) - 1}
    if isinstance(value, Mapping):
        return {str(name): _taken_out(item, arrays) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_taken_out(item, arrays) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _put_back(value: Any, archive: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {ARRAY}:
            return archive[f"a{value[ARRAY]}"]
        return {name: _put_back(item, archive) for name, item in value.items()}
    return [_put_back(item, archive) for item in value] if isinstance(value, list) else value
