"""Sets of uids, as sorted arrays, as bitmaps and as tables of codes: made for millions of samples in little memory.

Pure: talks to nothing. Knows nothing of what the uids stand for.

- What a question takes beside its arguments and its answer is a block, however many uids there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

Uids = npt.NDArray[np.uint64]
Codes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
BLOCK = 1 << 18  # uids
BITMAP_BLOCK = 1 << 17  # bytes


def blocks(size: int, at_once: int = 0) -> Iterator[slice]:
    """The parts of an array, `BLOCK` long where nothing is said."""
    block = at_once or BLOCK
    return (slice(start, start + block) for start in range(0, size, block))


def distinct(values: Uids) -> Uids:
    """Each value once, ascending (sorting beats numpy's hashing of uids several times over)."""
    ordered = np.sort(values)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if ordered.size else ordered


def is_among(values: Uids, ascending: Uids) -> Mask:
    """For each value whether it is among the others."""
    found = np.zeros(values.size, np.bool_)
    for part in blocks(values.size if ascending.size else 0):
        places = np.minimum(np.searchsorted(ascending, values[part]), ascending.size - 1)
        found[part] = ascending[places] == values[part]
    return found


def minus(values: Uids, ascending: Uids) -> Uids:
    """The distinct values that are not among the others."""
    return distinct(values[~is_among(values, ascending)])


def union(ascending: Uids, values: Uids) -> Uids:
    """Both, each value once, ascending; the first itself where the second adds nothing."""
    new = minus(values, ascending)
    return np.insert(ascending, np.searchsorted(ascending, new), new) if new.size else ascending


def codes_at(codes: Codes, uids: Uids) -> Codes:
    """The fate of each uid; 0 beyond the table's end."""
    result = np.zeros(uids.size, np.uint8)
    for part in blocks(uids.size if codes.size else 0):
        inside = uids[part] < np.uint64(codes.size)
        result[part] = np.where(inside, codes[np.where(inside, uids[part], 0).astype(np.int64)], 0)
    return result


def with_code(codes: Codes, code: int) -> Uids:
    """The uids that have this fate, ascending."""
    return np.flatnonzero(codes == code).view(np.uint64)


def is_one_of(codes: Codes, some: Iterable[int]) -> Mask:
    """For each code whether it is one of some."""
    table = np.zeros(256, np.bool_)
    table[list(some)] = True
    found = np.zeros(codes.shape, np.bool_)
    for part in blocks(codes.size):
        found[part] = table[codes[part]]
    return found


def mask_of(uids: Uids, size: int) -> Mask:
    """Which of the first `size` uids are among these: a byte each, where a sorted difference takes many."""
    mask = np.zeros(size, np.bool_)
    for part in blocks(uids.size):
        some = uids[part]
        mask[some[some < np.uint64(size)].astype(np.int64)] = True
    return mask


def in_bitmap(bitmap: Codes) -> Uids:
    """The uids of a bitmap (uid % 8 from the lowest bit of byte uid // 8), ascending."""
    uids, end = np.empty(int.from_bytes(bitmap.tobytes(), "little").bit_count(), np.uint64), 0
    for part in blocks(bitmap.size, BITMAP_BLOCK):
        some = np.flatnonzero(np.unpackbits(bitmap[part], bitorder="little")) + 8 * part.start
        uids[end : end + some.size] = some
        end += some.size
    return uids


def bitmap_minus(bitmap: Codes, other: Codes) -> Uids:
    """The uids of a bitmap that are not in the other one."""
    left = bitmap.copy()
    both = min(left.size, other.size)
    left[:both] &= ~other[:both]
    return in_bitmap(left)
