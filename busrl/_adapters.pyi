"""Types of the C++ module; csrc/python/adapters.cpp says what it does, `busrl.service.rows` uses it."""

def add(
    out: int, x: int, place: int, down: int, up: int, places: int, stacked: int, rows: int, each: int, inputs: int,
    width: int, outputs: int, columns: int, /,
) -> None: ...
