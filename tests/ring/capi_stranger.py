"""A worker that knows ctypes and libbusrl_ring.so and nothing of busrl: `python -I capi_stranger.py LIBRARY RING`.

Takes one QUEUED slot, writes its task in capitals as the tensor "text" of segment 0, commits it, and says what it saw.
"""

import ctypes as c
import sys

QUEUED, GENERATING, NO_SEGMENT, UINT = 2, 3, 255, 1


class Held(c.Structure):
    _fields_ = [("slot", c.c_uint32), ("zero", c.c_uint32), ("word", c.c_uint64)]


class Tensor(c.Structure):
    _fields_ = [
        ("size", c.c_uint32), ("dtype", c.c_uint8), ("bits", c.c_uint8), ("ndim", c.c_uint8), ("segment", c.c_uint8),
        ("shape", c.c_uint64 * 4), ("nbytes", c.c_uint64), ("data", c.c_void_p), ("flags", c.c_uint32),
        ("zero", c.c_uint32), ("name", c.c_char * 40),
    ]


library = c.CDLL(sys.argv[1])
library.busrl_ring_error.restype = c.c_char_p


def call(name, *arguments):
    """Call busrl_ring_NAME; an error of it is ours."""
    code = getattr(library, f"busrl_ring_{name}")(*arguments)
    if code < 0:
        sys.exit(f"{name}: {library.busrl_ring_error(None, None).decode()} ({code})")
    return code


ring, held, count, seen = c.c_void_p(), Held(), c.c_uint32(), c.c_uint64()
call("attach", library.busrl_ring_abi(), sys.argv[2].encode(), 0, c.byref(ring))
call("register", ring, b"stranger", b"stranger/0", None)
call("ready", ring)
while count.value == 0:
    call("wait", ring, QUEUED, seen, c.c_uint64(50_000_000), c.byref(seen))
    call("take", ring, QUEUED, GENERATING, c.c_int64(-1), 1, c.byref(held), 1, c.byref(count))
slot, word = held.slot, c.c_uint64(held.word)

task = Tensor(size=c.sizeof(Tensor))
call("tensor", ring, slot, b"task", NO_SEGMENT, c.byref(task))
answer = c.string_at(task.data, task.nbytes).upper()
text = Tensor(size=c.sizeof(Tensor), dtype=UINT, bits=8, ndim=1)
text.shape[0] = len(answer)
text.data = c.cast(c.c_char_p(answer), c.c_void_p)
call("put", ring, slot, word, b"text", 0, c.byref(text))
after = c.c_uint64()
call("commit", ring, slot, word, 1, c.byref(after))
call("detach", ring)
print(slot, after.value, "busrl" in sys.modules)
