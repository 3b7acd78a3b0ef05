"""Routes in the write-ahead log: they come back as they were, or are left out and said to be; others keep bytes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from busrl.ledger.wal import HEAD, Record, SampleRecord, Wal, frames
from busrl.roles.learner.samples import to_sample


def sample(uid: int, tokens: int = 5, prompt: int = 4, experts: int = 8) -> SampleRecord:
    """A sample with routes [rows, 2, 3]; none for its prompt where that is 0."""
    dtype = np.uint8 if experts <= 256 else np.uint16
    rng = np.random.default_rng(uid)
    routes, of_prompt = (rng.integers(0, experts, (rows, 2, 3)).astype(dtype) for rows in (tokens, prompt))
    return SampleRecord(
        uid=uid, group=0, admission=0, member=uid % 4, attempt=0, prompt_crc=7, reward=0.5, temperature=1.0, version=2,
        step=1, finish=1, prompt_ids=np.arange(prompt + 1, dtype="<i4").tobytes(),
        token_ids=np.arange(tokens, dtype="<i4").tobytes(), logprobs=np.full(tokens, -1.5, "<f4").tobytes(),
        versions=np.full(tokens, 2, "<u4").tobytes(), routes=routes.tobytes(), prompt_routes=of_prompt.tobytes(),
        routes_shape=[2, 3, experts],
    )


def plain(uid: int) -> SampleRecord:
    return msgspec.structs.replace(sample(uid), routes=b"", prompt_routes=b"", routes_shape=[])


def record(step: int, *samples: SampleRecord) -> Record:
    return Record(step=step, version=step, cause="count", groups=[0], samples=[*samples])


def layouts(directory: Path) -> list[int]:
    return [path.read_bytes()[8] for path in sorted(directory.glob("*.wal"))]


def test_routes_come_back_as_they_were(tmp_path: Path) -> None:
    step = record(1, sample(0), sample(1, prompt=0), sample(2, experts=300), plain(3))
    before = msgspec.msgpack.encode(step)
    with Wal(tmp_path / "wal") as wal:
        wal.append(step)
    assert msgspec.msgpack.encode(step) == before, "the learner goes on with what it had"
    with Wal(tmp_path / "wal") as wal:
        (again,) = wal.records()
    assert again == step
    routes, of_prompt = again.samples[2].route_arrays()
    assert routes is not None and (routes.shape, routes.dtype) == ((5, 2, 3), np.uint16)
    assert of_prompt is not None and of_prompt.shape == (4, 2, 3)
    assert again.samples[1].route_arrays()[1] is None and again.samples[3].route_arrays() == (None, None)


@given(st.lists(st.integers(0, 255), min_size=6, max_size=600))
def test_any_ids_survive_the_compression(ids: list[int]) -> None:
    from tempfile import TemporaryDirectory

    data = bytes(ids[: len(ids) // 6 * 6])
    with TemporaryDirectory() as folder:
        with Wal(Path(folder) / "wal", sync=False) as wal:
            wal.append(record(1, msgspec.structs.replace(sample(0), routes=data, prompt_routes=data[::-1])))
        with Wal(Path(folder) / "wal") as wal:
            ((again,),) = (step.samples for step in wal.records())
    assert (again.routes, again.prompt_routes) == (data, data[::-1])


def test_records_with_routes_stand_in_segments_of_layout_5(tmp_path: Path) -> None:
    with Wal(tmp_path / "wal") as wal:
        for step, samples in enumerate([[plain(0)], [sample(1)], [plain(2)]], 1):
            wal.append(record(step, *samples))
    assert layouts(tmp_path / "wal") == [3, 5]
    with Wal(tmp_path / "wal") as wal:
        assert [bool(step.samples[0].routes) for step in wal.records()] == [False, True, False]


def test_a_log_without_routes_keeps_their_shape(tmp_path: Path) -> None:
    step = record(1, sample(0), sample(1))
    with Wal(tmp_path / "wal", routes=False) as wal:
        wal.append(step)
    with Wal(tmp_path / "wal") as wal:
        ((first, second),) = (again.samples for again in wal.records())
    assert first.routes_shape == second.routes_shape == [2, 3, 8]
    assert first.routes == first.prompt_routes == b"" and to_sample(first).routes is None


def test_a_sample_without_routes_is_written_without_their_fields(tmp_path: Path) -> None:
    with Wal(tmp_path / "wal") as wal:
        wal.append(record(1, plain(0)))
    data = (tmp_path / "wal" / "00000001.wal").read_bytes()
    ((payload, _),) = frames(data)
    assert data.startswith(HEAD) and b"routes" not in bytes(payload)
