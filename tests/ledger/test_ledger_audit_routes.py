"""Routes in the log of a mixture of experts: sound ones pass, and each kind of fault is found in its sample."""

from __future__ import annotations

import json
import zlib
from typing import Any

import msgspec
import numpy as np
import pytest

from busrl.ledger.wal import Wal

SHAPE = [2, 3, 8]


def ids(rows: int, last: int = 2) -> bytes:
    """Routes of so many rows, with this expert at their very end."""
    routes = np.tile(np.arange(3, dtype=np.uint8), (rows, 2, 1))
    routes[-1, -1, -1] = last
    return routes.tobytes()


SOUND: dict[str, Any] = {"routes": ids(3), "prompt_routes": ids(3), "routes_shape": SHAPE}


def with_routing(run: Any, shape: tuple[int, int, int] = (2, 3, 8)) -> None:
    path, (layers, top_k, experts) = run.root / "topology.json", shape
    routing = {"layers": list(range(layers)), "top_k": top_k, "experts": experts}
    path.write_text(json.dumps({**json.loads(path.read_text()), "derived": {"routing": routing}}))


def stepped(run: Any, **lies: Any) -> Any:
    """The report of a run of one step, whose third sample has other fields."""
    group = run.group(0)
    run.step(1, group, lies={uid: {**SOUND, **(lies if uid == group[2] else {})} for uid in group})
    run.open()
    return run.audit()


def test_sound_routes_pass_with_or_without_a_prompt(run: Any) -> None:
    with_routing(run)
    assert stepped(run, prompt_routes=b"").errors == ()


def test_a_log_that_keeps_no_routes_passes(run: Any) -> None:
    with_routing(run)
    record = run.record(1, run.group(0), dict.fromkeys(run.group(0), SOUND))
    with Wal(run.root / "wal", routes=False) as wal:
        wal.append(record)
    run.step(1, run.group(0), log=False)
    run.open()
    assert run.audit().errors == ()


@pytest.mark.parametrize(("lies", "said"), [
    ({"routes": ids(2)}, "routes: 12 bytes for 3 positions"),
    ({"routes": ids(4)}, "routes: 24 bytes for 3 positions"),
    ({"routes": b""}, "routes: 0 bytes for 3 positions"),
    ({"prompt_routes": ids(4)}, "prompt_routes: 24 bytes for 3 positions"),
    ({"routes": ids(3, last=8)}, "routes: expert 8 of 8"),
    ({"routes": ids(3, last=1)}, "routes: an expert twice in one layer"),
    ({"routes_shape": [1, 6, 8], "routes": bytes(range(6)) * 3}, "shape [1, 6, 8], the model has [2, 3, 8]"),
    ({"routes_shape": []}, "routes of the shape []"),
])
def test_each_fault_of_routes_is_found_in_its_sample(run: Any, lies: dict[str, Any], said: str) -> None:
    with_routing(run)
    report = stepped(run, **lies)
    assert report.kinds == {"bad_routes"}
    (finding,) = report.errors
    assert finding.examples == (run.uid(0, 2),) and said in finding.text


def test_bytes_that_are_no_compression_are_found(run: Any) -> None:
    with_routing(run)
    stepped(run)
    path = run.root / "wal" / "00000001.wal"
    with Wal(run.root / "wal") as wal:
        (record,) = wal.records()
    content = msgspec.to_builtins(record, builtin_types=(bytes,))
    for sample in content["samples"]:
        sample["routes"] = b"not this"
    payload = msgspec.msgpack.encode(content)
    length = len(payload).to_bytes(4, "little")
    crc = zlib.crc32(length + payload).to_bytes(4, "little")
    path.write_bytes(path.read_bytes()[:16] + b"WREC" + length + crc + payload)
    report = run.audit()
    assert report.kinds == {"bad_routes"} and report.errors[0].count == 4
    assert "cannot be decompressed" in report.errors[0].text


def test_rows_of_an_episode_are_those_of_its_sequences(run: Any) -> None:
    with_routing(run)
    turns = {
        "prompt_ids": b"", "token_ids": np.arange(9, dtype="<i4").tobytes(), "seqs": [5, 4], "prompt_routes": b"",
        "turns": [0, 1, 2, 1, 0, 4, 5, 3, 1, 2, 3, 5], "logprobs": np.full(3, -1, "<f4").tobytes(),
        "versions": np.zeros(3, "<u4").tobytes(),
    }
    assert stepped(run, **turns, routes=ids(6)).errors == ()


def test_an_episode_with_too_many_rows_is_found(run: Any) -> None:
    turns = {
        "prompt_ids": b"", "token_ids": np.arange(9, dtype="<i4").tobytes(), "seqs": [5, 4], "prompt_routes": b"",
        "turns": [0, 1, 2, 1, 0, 4, 5, 3, 1, 2, 3, 5], "logprobs": np.full(3, -1, "<f4").tobytes(),
        "versions": np.zeros(3, "<u4").tobytes(),
    }
    assert stepped(run, **turns, routes=ids(7)).kinds == {"bad_routes"}
