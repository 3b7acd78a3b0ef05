"""Tensors in slots: written once, read in place, refused when they do not fit, safe after close."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from busrl.errors import BadTensor, NoSuchTensor, NotOwner, RingError, SlotTooSmall
from busrl.ring import NO_SEGMENT, Ring, State


def claimed(world) -> tuple[int, int]:
    world.dispatch(1)
    [held] = world.take(State.QUEUED, State.GENERATING)
    return held


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "?"])
def test_an_array_comes_back_as_it_was_put(world, dtype):
    slot, word = claimed(world)
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    world.ring.put(slot, word, "x", array)
    back = world.ring.get(slot, "x")
    assert back.dtype == array.dtype and np.array_equal(back, array)
    assert not back.flags.writeable and back.ctypes.data % 64 == 0


def test_scalars_empty_arrays_bytes_and_strided_arrays_can_be_put(world):
    slot, word = claimed(world)
    world.ring.put(slot, word, "scalar", np.float32(2.5))
    world.ring.put(slot, word, "empty", np.zeros((0, 3), np.int64))
    world.ring.put(slot, word, "bytes", b"abc")
    world.ring.put(slot, word, "strided", np.arange(10)[::3])
    assert world.ring.get(slot, "scalar")[()] == 2.5
    assert world.ring.get(slot, "empty").shape == (0, 3)
    assert bytes(world.ring.get(slot, "bytes")) == b"abc"
    assert world.ring.get(slot, "strided").tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize(
    "array", [np.zeros(3, "M8[s]"), np.zeros(3, complex), np.zeros(3, ">i4"), np.array(["a"]), np.array([object()])]
)
def test_a_type_that_not_everybody_can_read_is_refused(world, array):
    slot, word = claimed(world)
    with pytest.raises(RingError, match="native integer, float or bool"):
        world.ring.put(slot, word, "x", array)


def test_torch_reads_the_slot_in_place(world):
    torch = pytest.importorskip("torch")
    slot, word = claimed(world)
    view = world.ring.alloc(slot, word, "x", np.float32, (2, 3))
    tensor = torch.from_numpy(view)
    assert tensor.data_ptr() == world.ring.get(slot, "x").ctypes.data
    tensor.fill_(1.5)
    assert world.ring.get(slot, "x").tolist() == [[1.5] * 3] * 2


def test_bfloat16_travels_as_its_bits(world):
    torch = pytest.importorskip("torch")
    slot, word = claimed(world)
    view = world.ring.alloc(slot, word, "x", "bfloat16", 4)
    torch.from_numpy(view).view(torch.bfloat16).copy_(torch.tensor([1.0, -2.0, 0.5, 3.0]))
    assert torch.from_numpy(world.ring.get(slot, "x").copy()).view(torch.bfloat16).tolist() == [1.0, -2.0, 0.5, 3.0]


def test_a_segment_is_seen_by_others_only_after_its_commit(world):
    slot, word = claimed(world)
    world.ring.put(slot, word, "tokens", np.arange(3), 0)
    monitor = Ring.attach(world.path, read_only=True)
    with pytest.raises(NoSuchTensor, match="GENERATING, 0 segments"):
        monitor.get(slot, "tokens", 0)
    assert world.ring.get(slot, "tokens", 0).tolist() == [0, 1, 2]
    assert set(monitor.tensors(slot)) == {("task", NO_SEGMENT)}
    world.ring.commit_segment(slot, word, True)
    assert monitor.get(slot, "tokens", 0).tolist() == [0, 1, 2]
    assert set(monitor.tensors(slot)) == {("task", NO_SEGMENT), ("tokens", 0)}


def test_segments_pile_up_and_the_second_owner_reads_the_first_ones(world):
    slot, word = claimed(world)
    for segment in range(3):
        world.ring.put(slot, word, "tokens", np.full(4, segment), segment)
        world.ring.commit_segment(slot, word, False)
        [(slot, word)] = world.take(State.QUEUED, State.GENERATING)
    assert [world.ring.get(slot, "tokens", k)[0] for k in range(3)] == [0, 1, 2]
    with pytest.raises(NotOwner, match="committed"):
        world.ring.put(slot, word, "tokens", np.zeros(4), 1)


def test_a_discarded_attempt_gives_its_room_back(world):
    slot, word = claimed(world)
    world.ring.put(slot, word, "tokens", np.zeros(450, np.int64), 0)
    with pytest.raises(SlotTooSmall) as refusal:
        world.ring.put(slot, word, "logprobs", np.zeros(450, np.int64), 0)
    assert refusal.value.needed == 3600 and refusal.value.free < 3600
    world.ring.clear_segments(slot, word, 0)
    world.ring.put(slot, word, "logprobs", np.zeros(450, np.int64), 0)


def test_a_table_of_tensors_has_an_end(world):
    slot, word = claimed(world)
    for k in range(47):
        world.ring.put(slot, word, f"t{k}", b"x")
    with pytest.raises(SlotTooSmall, match="48 tensors"):
        world.ring.put(slot, word, "one too many", b"x")


def test_a_task_that_does_not_fit_is_refused_with_both_sizes(world):
    with pytest.raises(SlotTooSmall, match=r"5000 bytes does not fit a slot of 4096; raise ring\.slot_bytes"):
        world.ring.dispatch(
            uid=1, group=0, admission=0, member=0, group_size=8, cls=0, task=b"x" * 5000, prompt_crc=0,
            max_new_tokens=1, temperature=1.0,
        )
    assert world.states() == {"FREE": 8} and world.fate(1) == ""


def test_a_checksum_finds_bytes_that_changed_afterwards(world):
    slot, word = claimed(world)
    world.ring.put(slot, word, "x", np.arange(16), checksum=True)
    address = world.ring.get(slot, "x").ctypes.data
    raw = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * 8).from_address(address))
    raw[3] ^= 1
    with pytest.raises(BadTensor, match="checksum"):
        world.ring.get(slot, "x")
    with pytest.raises(BadTensor, match="checksum"):
        world.ring.copies([(slot, word)], "x", np.dtype("i8"))


def test_views_outlive_the_handle_and_the_name(world):
    slot, word = claimed(world)
    world.ring.put(slot, word, "x", np.arange(100))
    view = world.ring.get(slot, "x")
    world.ring.close()
    Ring.unlink(world.path)
    gc.collect()
    assert view.sum() == 4950


def test_a_stranger_can_not_write_and_an_old_word_does_not_help(world):
    slot, word = claimed(world)
    other = Ring.attach(world.path)
    other.register("other", "other")
    with pytest.raises(NotOwner, match="is GENERATING of process 1"):
        other.put(slot, word, "x", b"x")
    world.ring.commit_segment(slot, word, True)
    with pytest.raises(NotOwner, match="is GENERATED"):
        world.ring.put(slot, word, "x", b"x")
    with pytest.raises(NotOwner):
        world.ring.set(slot, word, reward=1.0)
    assert world.ring.commit_segment(slot, word, True) == 0
