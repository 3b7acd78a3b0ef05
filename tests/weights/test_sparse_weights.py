"""Sparse updates: bit-identical to full ones or refused, whatever the order of versions, joins and losses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from busrl import _blocks
from busrl.errors import WeightsTimeout
from busrl.weights import shm as layout
from busrl.weights import sparse
from busrl.weights.broadcast.receiver import ReceivedVersion
from busrl.weights.broadcast.sender import SendBuffer
from busrl.weights.shm import ShmReceiver, ShmSender
from busrl.weights.sparse import FrameError, Shadow, apply, pack, split, unpack
from busrl.weights.tensors import Manifest

MANY = 1 << 30  # versions between two full ones
KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.complex128]
SHAPES = [(40, 7), (), (0, 3), (130,), (64,)]
Named = dict[str, torch.Tensor]


def model(kinds: list[torch.dtype] = KINDS) -> Named:
    generator = torch.Generator().manual_seed(1)
    return {
        f"{kind}.{k}": torch.randint(-9, 9, shape, generator=generator).to(kind)
        for k, (kind, shape) in enumerate(zip(kinds, SHAPES * 2))
    }


def copy_of(tensors: Named) -> Named:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same_bits(ours: Named, theirs: Named) -> bool:
    """Also where NaNs differ in their payload, or zeros in their sign."""
    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1).view(torch.uint8)

    return all(torch.equal(bits(ours[name]), bits(theirs[name])) for name in ours)


def raw(tensor: torch.Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


@pytest.fixture
def path() -> Iterator[Path]:
    name = Path("/dev/shm") / f"busrl.test.{os.getpid()}.{os.urandom(4).hex()}.weights"
    yield name
    name.unlink(missing_ok=True)


# -- the frame ----------------------------------------------------------------------------------------------------

edits = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 10**6), st.binary(min_size=16, max_size=16)), max_size=12)


def edit(tensors: Named, changes: list[tuple[int, int, bytes]]) -> None:
    """Overwrite single values with arbitrary bits: NaNs with payloads, -0.0, subnormals."""
    names = list(tensors)
    for which, place, bits in changes:
        tensor = tensors[names[which % len(names)]]
        if tensor.numel() and tensor.dtype != torch.bool:
            size, at = tensor.element_size(), place % tensor.numel()
            raw(tensor)[at * size : (at + 1) * size] = np.frombuffer(bits[:size], np.uint8)
        elif tensor.numel():
            tensor.view(-1)[place % tensor.numel()] = bits[0] & 1 == 1


@settings(max_examples=60)
@given(st.lists(edits, min_size=1, max_size=5))
def test_frames_lead_to_the_very_bits(rounds: list[list[tuple[int, int, bytes]]]) -> None:
    sent = model()
    manifest = Manifest.of(sent)
    block = torch.zeros(manifest.nbytes, dtype=torch.uint8)
    manifest.gather(sent, block)
    shadow, here, sums = Shadow(manifest, block, 1.0, MANY, checksum=True), copy_of(sent), [0] * len(sent)
    for version, changes in enumerate(rounds, 1):
        edit(sent, changes)
        data = shadow.frame(sent, version - 1, version, version, 1 << 30)
        assert data is not None
        frame = unpack(np.frombuffer(data, np.uint8))
        apply(frame, manifest, here, sums)
        assert same_bits(here, sent) and same_bits(manifest.views(block), sent)
        assert manifest.digest(here, version, version) == frame.digest


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.integers(0, 7))
def test_a_frame_with_any_flipped_bit_is_refused_before_anything_is_written(place: int, bit: int) -> None:
    sent = model()
    manifest = Manifest.of(sent)
    block = torch.zeros(manifest.nbytes, dtype=torch.uint8)
    manifest.gather(sent, block)
    shadow, here = Shadow(manifest, block, 1.0, MANY), copy_of(sent)
    edit(sent, [(k, 3, bytes(range(16))) for k in range(7)])
    data = bytearray(shadow.frame(sent, 1, 2, 20, 1 << 30) or b"")
    data[place % len(data)] ^= 1 << bit
    before = copy_of(here)
    with pytest.raises(FrameError):
        apply(unpack(np.frombuffer(bytes(data), np.uint8)), manifest, here, [0] * len(sent))
    assert same_bits(here, before)


def test_a_frame_on_another_base_is_found_out() -> None:
    sent = {"w": torch.zeros(100), "v": torch.zeros(4)}
    manifest = Manifest.of(sent)
    shadow = Shadow(manifest, torch.zeros(manifest.nbytes, dtype=torch.uint8), 1.0, MANY)
    sent["w"][5] = 1.0
    data = shadow.frame(sent, 1, 2, 20, 1 << 30)
    assert data is not None
    here = {"w": torch.full((100,), 7.0), "v": torch.zeros(4)}
    with pytest.raises(FrameError, match="'w' differs from the learner's"):
        apply(unpack(np.frombuffer(data, np.uint8)), manifest, here, [0, 0])


def test_an_index_beyond_the_tensor_or_a_part_beyond_manifest_is_refused() -> None:
    manifest = Manifest.of({"w": torch.zeros(4)})
    far = sparse.TensorChange(0, 4, np.array([4], np.uint32).view(np.uint8), np.zeros(4, np.uint8), 0)
    other = sparse.TensorChange(7, 4, np.array([1], np.uint32).view(np.uint8), np.zeros(4, np.uint8), 0)
    wide = sparse.TensorChange(0, 8, np.array([1], np.uint32).view(np.uint8), np.zeros(8, np.uint8), 0)
    for part, text in ((far, "beyond the tensor"), (other, "tensor 7 of 1"), (wide, "values of another size")):
        data = np.frombuffer(pack(sparse.Frame(1, 2, 2, 0, (part,))), np.uint8)
        with pytest.raises(FrameError, match=text):
            apply(unpack(data), manifest, {"w": torch.zeros(4)}, [0])


def test_changes_above_the_threshold_are_sent_in_full_keeping_the_shadow() -> None:
    sent = {"w": torch.zeros(1000)}
    manifest = Manifest.of(sent)
    shadow = Shadow(manifest, torch.zeros(manifest.nbytes, dtype=torch.uint8), 0.1, MANY)
    sent["w"][:100] = 1.0
    assert shadow.frame(sent, 1, 2, 2, 1 << 30) is None
    assert not shadow.block.any() and shadow.sums == [0]
    sent["w"][30:] = 0.0
    assert shadow.frame(sent, 1, 2, 2, 1 << 30) is not None
    assert shadow.frame({"w": torch.ones(1000)}, 2, 3, 3, 64) is None


def test_frames_in_a_row_come_apart_again_and_cut_ones_are_refused() -> None:
    frames = [pack(sparse.Frame(k, k + 1, k, 0, ())) for k in range(3)]
    data = np.frombuffer(b"".join(frames), np.uint8)
    assert [unpack(frame).version for frame in split(data)] == [1, 2, 3]
    for end in (1, 40, len(data) - 1):
        with pytest.raises(FrameError):
            [unpack(frame) for frame in split(data[:end])]


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_unusual_memory_get_the_same_bits_and_sums(kind: torch.dtype) -> None:
    sent = {"w": torch.arange(24).reshape(4, 6).to(kind)}
    manifest = Manifest.of(sent)
    block = torch.zeros(manifest.nbytes, dtype=torch.uint8)
    manifest.gather(sent, block)
    shadow = Shadow(manifest, block, 4.0, MANY)
    turned, elsewhere = {"w": sent["w"].t().contiguous().t()}, copy_of(sent)
    edit(sent, [(0, place, bytes(range(240, 256))) for place in (1, 7, 22)])
    frame = unpack(np.frombuffer(shadow.frame(sent, 1, 2, 2, 1 << 30) or b"", np.uint8))
    apply(frame, manifest, turned, [0])
    assert same_bits({"w": turned["w"].contiguous()}, sent)
    if kind not in (torch.bool, torch.complex128):  # as on an accelerator, in torch's own arithmetic
        (part,) = frame.parts
        count = sent["w"].nbytes // part.width
        assert sparse.put_on_device(elsewhere["w"], count, part) == part.sum
        assert same_bits(elsewhere, sent)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_both_ways_of_finding_changes_agree(width: int) -> None:
    generator = np.random.default_rng(width)
    before = generator.integers(0, 256, 1000 * width, np.uint8)
    for changes in (0, 1, 7, 400, 1000):
        now = before.copy()
        places = generator.choice(1000, changes, replace=False)
        now.reshape(1000, width)[places, generator.integers(0, width)] ^= 0x80
        for wide in (True, False):
            indices, values = np.zeros(1000, np.uint32), np.zeros(1000 * width, np.uint8)
            count = _blocks.changed(before.ctypes.data, now.ctypes.data, 1000, width, indices, values, wide)
            assert count == changes and indices[:count].tolist() == sorted(places.tolist())
            expected = now.reshape(1000, width)[np.sort(places)].tobytes()
            assert values[: count * width].tobytes() == expected
            few = indices[: max(0, changes - 1)]
            if changes:
                assert _blocks.changed(before.ctypes.data, now.ctypes.data, 1000, width, few, values, wide) == -1


# -- shared memory ------------------------------------------------------------------------------------------------

deeds = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), edits),
        st.tuples(st.just("fetch"), st.integers(0, 2)),
        st.tuples(st.just("join"), st.integers(0, 2)),
        st.tuples(st.just("spoil"), st.integers(0, 2)),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=60)
@given(deeds, st.integers(1, 5), st.booleans())
def test_shared_memory_ends_bit_identical_after_any_sequence(
    path: Path, todo: list[tuple[str, Any]], key_every: int, checksums: bool
) -> None:
    """Engines join, skip versions, or have values overwritten by others; the learner restarts."""
    path.unlink(missing_ok=True)
    kinds = [torch.float32, torch.bfloat16, torch.int8]
    sent = model(kinds)
    sender = ShmSender(path, checksums=checksums, threshold=0.3, key_every=key_every)
    engines = {k: (ShmReceiver(path), model(kinds)) for k in range(3)}
    version = 1
    sender.publish(version, 10, sent)
    for deed, value in [*todo, ("fetch", 0), ("fetch", 1), ("fetch", 2)]:
        if deed == "publish":
            edit(sent, value)
            version += 1
            sender.publish(version, version * 10, sent)
        elif deed == "restart":
            sender.close()
            sender = ShmSender(path, checksums=checksums, threshold=0.3, key_every=key_every)
        elif deed == "join":
            engines[value][0].close()
            engines[value] = (ShmReceiver(path), model(kinds))
        elif deed == "spoil":  # the tensors are other ones now: nothing may be put on top of them
            engines[value] = (engines[value][0], model(kinds))
        else:
            receiver, here = engines[value]
            got, step = receiver.fetch(here)
            assert got == version and step == (10 if version == 1 else version * 10)
            assert same_bits(here, sent)
    sender.close()


def test_frames_are_used_where_possible_with_key_frames_every_k_versions(path: Path) -> None:
    sender, receiver = ShmSender(path, threshold=0.2, key_every=4), ShmReceiver(path)
    sent, here = {"w": torch.zeros(1000)}, {"w": torch.zeros(1000)}
    logged = []
    for version in range(1, 10):
        sent["w"][version] = version
        sender.publish(version, version, sent)
        assert receiver.fetch(here) == (version, version) and torch.equal(here["w"], sent["w"])
        segment = layout.attach_segment(path)
        assert segment is not None
        logged.append(int(segment.buffer[segment.newest() or 0][layout.LOGGED]))
        segment.close()
    assert [used > 0 for used in logged] == [False, True, True, True, False, True, True, True, False]


def test_a_frame_damaged_in_shared_memory_is_never_applied(path: Path) -> None:
    sender, receiver = ShmSender(path, threshold=0.2), ShmReceiver(path, timeout_s=0.1)
    sent, here = {"w": torch.zeros(1000)}, {"w": torch.zeros(1000)}
    sender.publish(1, 1, sent)
    receiver.fetch(here)
    sent["w"][3] = 1.0
    sender.publish(2, 2, sent)
    segment = layout.attach_segment(path, writable=True)
    assert segment is not None
    segment.log[segment.newest() or 0][60] ^= 1
    with pytest.raises(WeightsTimeout, match=r"does not match its digest.*must not be used"):
        receiver.fetch(here)
    assert not here["w"].any()
    sender.publish(3, 3, {"w": torch.ones(1000)})  # all values: past the damage
    assert receiver.fetch(here) == (3, 3) and bool((here["w"] == 1).all())


# -- broadcast ----------------------------------------------------------------------------------------------------

casts = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), edits),
        st.tuples(st.just("send"), st.just(0)),
        st.tuples(st.just("lose"), st.integers(0, 1)),
        st.tuples(st.just("fetch"), st.integers(0, 1)),
        st.tuples(st.just("join"), st.integers(0, 1)),
    ),
    max_size=25,
)


@settings(max_examples=80)
@given(casts, st.integers(1, 5))
def test_a_broadcast_ends_bit_identical_or_is_refused(todo: list[tuple[str, Any]], key_every: int) -> None:
    """Send buffer and received versions without sockets between: every transfer may be lost for one of two."""
    kinds = [torch.float32, torch.bfloat16, torch.int8]
    sent = model(kinds)
    box = SendBuffer(lambda: None, bucket_bytes=512, threshold=0.3, key_every=key_every, checksum=True)
    received, tensors = [ReceivedVersion(), ReceivedVersion()], [model(kinds), model(kinds)]
    manifest, version, history = Manifest.of(sent), 1, {1: copy_of(sent)}
    box.put(version, version, sent)

    def send(skip: int) -> None:
        haves = {engine.stamp[0] if engine.usable else -1 for engine in received}
        transfer = box.take(haves.pop() if len(haves) == 1 else None)
        for k, engine in enumerate(received):
            if k == skip:
                continue
            if transfer.base < 0:
                engine.replace(manifest, transfer.data.clone(), (transfer.version, transfer.step), transfer.sums)
            elif engine.usable:
                engine.follow([unpack(frame) for frame in split(transfer.data.numpy())])
        box.sent()

    for deed, value in [*todo, ("send", 0), ("fetch", 0), ("fetch", 1)]:
        if deed == "publish":
            edit(sent, value)
            version += 1
            history[version] = copy_of(sent)
            box.put(version, version, sent)
        elif deed in ("send", "lose"):
            send(value if deed == "lose" else -1)
        elif deed == "join":
            received[value], tensors[value] = ReceivedVersion(), model(kinds)
        elif received[value].usable:
            received[value].fetch(tensors[value])
            assert same_bits(tensors[value], history[received[value].stamp[0]])
    assert all(engine.stamp[0] == version and engine.usable for engine in received)
    assert all(same_bits(here, sent) for here in tensors)
