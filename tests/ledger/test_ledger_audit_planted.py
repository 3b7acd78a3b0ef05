"""One lie at a time, planted in an otherwise clean run: the audit finds it, names it, and names nothing else."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from busrl.ledger.audit import render
from busrl.ledger.openbin import OpenSlot, write_open
from busrl.ledger.wal import Wal

VALIDATE = 1 << 62


def examples_of(report, kind: str) -> tuple[int | str, ...]:
    """The examples of the only error there is."""
    assert report.kinds == {kind}, [(f.kind, f.text, f.examples) for f in report.findings]
    assert report.exit_code == 1
    return report.errors[0].examples


def test_a_dispatched_sample_without_an_entry_in_open_bin_is_lost(trained) -> None:
    trained.open(*trained.group(8)[:3], VALIDATE | 2)
    report = trained.audit()
    assert examples_of(report, "lost") == (trained.uid(8, 3),)
    assert report.counts.lost == 1


def test_a_dispatched_sample_that_no_slot_holds_is_lost(run) -> None:
    run.dispatch(*run.group(0))
    run.fates[run.uid(1, 2)] = "D"
    report = run.audit()
    assert examples_of(report, "lost") == (run.uid(1, 2),)
    assert (report.counts.lost, report.counts.in_flight) == (1, 4)


def test_a_free_slot_that_still_names_a_sample_does_not_hold_it(run) -> None:
    run.fates[run.uid(0, 0)] = "D"
    run.slot(0, run.uid(0, 0), "FREE")
    assert examples_of(run.audit(), "lost") == (run.uid(0, 0),)


def test_a_reserved_slot_that_names_an_earlier_sample_does_not_hold_it(run) -> None:
    run.fates[run.uid(0, 0)] = "D"
    run.slot(0, run.uid(0, 0), "RESERVED", owner=1, seq=9, claim=7)
    assert examples_of(run.audit(), "lost") == (run.uid(0, 0),)


def test_a_validation_sample_can_be_lost_too(run) -> None:
    run.validate_fates[3] = "D"
    run.open()
    assert examples_of(run.audit(), "lost") == (VALIDATE | 3,)


def test_every_dispatched_sample_without_ring_or_open_bin_is_reported_lost(run) -> None:
    run.fates[0] = "D"
    report = run.audit()
    assert examples_of(report, "lost") == (0,)
    assert report.state == "gone" and "next start" in report.errors[0].text


def test_a_sample_in_two_records_is_trained_twice(run) -> None:
    run.step(1, run.group(0))
    run.step(2, [*run.group(1), run.uid(0, 1)])
    run.open()
    report = run.audit()
    assert "trained_twice" in report.kinds and "group_split" in report.kinds
    assert report.counts.trained_twice == 1
    assert next(f for f in report.errors if f.kind == "trained_twice").examples == (run.uid(0, 1),)


def test_a_sample_in_the_checkpoint_and_a_later_record_is_trained_twice(run) -> None:
    run.step(1, run.group(0))
    run.checkpoint(1)
    Wal(run.root / "wal", sync=False).drop_before(2)
    run.step(2, run.group(0))
    run.open()
    report = run.audit()
    assert report.counts.trained_twice == 4
    assert "trained_twice" in report.kinds


def test_a_sample_twice_in_one_record_is_trained_twice(run) -> None:
    run.step(1, [*run.group(0), run.uid(0, 2)])
    run.open()
    assert examples_of(run.audit(), "trained_twice") == (run.uid(0, 2),)


def test_a_trained_sample_without_checkpoint_or_record_is_an_error_with_log(trained) -> None:
    trained.fates[trained.uid(5, 0)] = "T"
    assert examples_of(trained.audit(), "trained_unlogged") == (trained.uid(5, 0),)


def test_a_record_whose_sample_did_not_become_trained_is_found(trained) -> None:
    trained.fates[trained.uid(3, 1)] = "o"
    assert examples_of(trained.audit(), "logged_not_trained") == (trained.uid(3, 1),)


def test_a_recorded_sample_dispatched_but_in_no_slot_is_not_lost(trained) -> None:
    trained.fates[trained.uid(3, 1)] = "D"
    report = trained.audit()
    assert examples_of(report, "logged_not_trained") == (trained.uid(3, 1),)
    assert report.counts.lost == 0


def test_a_record_cut_off_by_a_wrong_checksum_leaves_its_samples_unlogged(run) -> None:
    run.step(1, run.group(0))
    run.step(2, run.group(1))
    path = run.root / "wal" / "00000001.wal"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    run.open()
    report = run.audit()
    assert report.kinds == {"trained_unlogged", "train_log_disagrees"}
    assert "torn_tail" in {finding.kind for finding in report.findings}


def test_a_damaged_record_is_found_and_the_ones_behind_it_still_read(run) -> None:
    run.step(1, run.group(0))
    run.step(2, run.group(1))
    path = run.root / "wal" / "00000001.wal"
    data = bytearray(path.read_bytes())
    data[60] ^= 0xFF
    path.write_bytes(data)
    run.open()
    report = run.audit()
    assert report.kinds == {"log_damaged", "trained_unlogged", "train_log_disagrees"}
    assert report.counts.trained == 4


def test_steps_that_go_backward_in_the_log_are_found(run) -> None:
    run.step(2, run.group(0), line=False)
    Wal(run.root / "wal").close()
    first = run.root / "wal" / "00000001.wal"
    first.rename(run.root / "wal" / "00000002.wal")
    (run.root / "kept").mkdir()
    other = Wal(run.root / "kept")
    other.append(run.record(3, run.group(1)))
    other.close()
    (run.root / "kept" / "00000001.wal").rename(first)
    run.fates.update(dict.fromkeys(run.group(1), "T"))
    run.open()
    assert examples_of(run.audit(), "log_order") == (2,)


def test_two_samples_whose_prompts_were_swapped_are_found_in_the_log(run) -> None:
    a, b = run.uid(0, 0), run.uid(1, 0)
    lies = {a: {"prompt_crc": run.crc(b)}, b: {"prompt_crc": run.crc(a)}}
    run.step(1, run.group(0) + run.group(1), lies=lies, line=False)
    run.open()
    assert examples_of(run.audit(), "swapped_prompt") == (a, b)


def test_a_swapped_prompt_is_found_in_the_log_without_its_record(run) -> None:
    a = run.uid(1, 2)
    run.step(1, run.group(0) + run.group(1), lies={a: {"prompt_crc": run.crc(0)}})
    run.checkpoint(1)
    Wal(run.root / "wal", sync=False).drop_before(2)
    run.open()
    assert examples_of(run.audit(), "swapped_prompt") == (a,)


def test_a_swapped_prompt_is_found_in_a_slot(run) -> None:
    run.fates[run.uid(1, 0)] = "D"
    run.slot(3, run.uid(1, 0), "REWARDED", crc=run.crc(0))
    assert examples_of(run.audit(), "swapped_prompt") == (run.uid(1, 0),)


@pytest.mark.parametrize("field", ["group", "member"])
def test_a_group_or_member_that_contradicts_the_uid_is_found(run, field: str) -> None:
    run.step(1, run.group(2), lies={run.uid(2, 1): {field: 3}})
    run.open()
    assert examples_of(run.audit(), "wrong_group") == (run.uid(2, 1),)


def test_a_slot_with_the_group_of_another_sample_is_found(run) -> None:
    run.fates[run.uid(1, 0)] = "D"
    run.slot(0, run.uid(1, 0), member=2)
    assert examples_of(run.audit(), "wrong_group") == (run.uid(1, 0),)


def test_a_second_try_without_an_accident_of_the_first_is_found(trained) -> None:
    trained.fates[trained.uid(4, 3)] = "o"
    assert examples_of(trained.audit(), "reroll_without_accident") == (trained.uid(4, 3, again=1),)


def test_a_group_trained_with_too_few_members_is_found(run) -> None:
    run.step(1, run.group(0) + run.group(1)[:2])
    run.open()
    assert examples_of(run.audit(), "group_too_small") == (1,)


def test_a_group_trained_in_two_steps_is_found(make_run) -> None:
    run = make_run(group_size=8)
    run.step(1, run.group(0)[:6])
    run.step(2, run.group(0)[6:])
    run.open()
    assert examples_of(run.audit(), "group_split") == (0,)


def test_a_slot_that_still_holds_a_sample_that_has_ended_is_found(run) -> None:
    run.fates[run.uid(0, 1)] = "f"
    run.slot(0, run.uid(0, 1), "QUEUED")
    assert examples_of(run.audit(), "terminal_in_slot") == (run.uid(0, 1),)


def test_a_dropped_slot_whose_reason_is_not_the_fate_is_found(run) -> None:
    run.fates[run.uid(0, 1)] = "f"
    run.slot(0, run.uid(0, 1), "DROPPED", owner=ord("P"))
    assert examples_of(run.audit(), "terminal_in_slot") == (run.uid(0, 1),)


def test_a_sample_in_two_slots_is_found(run) -> None:
    run.dispatch(*run.group(0))
    run.slot(9, run.uid(0, 3), "GENERATED")
    assert examples_of(run.audit(), "uid_in_two_slots") == (run.uid(0, 3),)


def test_a_slot_whose_sample_was_never_dispatched_is_found(run) -> None:
    run.slot(0, run.uid(7, 0), "GENERATED")
    assert examples_of(run.audit(), "slot_without_fate") == (run.uid(7, 0),)


def test_a_slot_of_the_wrong_class_is_found(run) -> None:
    run.fates[run.uid(0, 0)] = "D"
    run.slot(0, run.uid(0, 0), cls=1)
    assert examples_of(run.audit(), "wrong_class") == (run.uid(0, 0),)


def test_a_byte_that_is_no_fate_is_found_and_counted(run) -> None:
    run.fates[3] = "V"
    run.validate_fates[4] = "z"
    run.open()
    report = run.audit()
    assert report.kinds == {"wrong_fate_code"}
    assert report.validation == {"unknown code 122": 1}


def test_a_train_log_that_names_other_samples_than_the_log_is_found(run) -> None:
    run.step(1, run.group(0), line=False)
    line = {"step": 1, "version": 1, "cause": "count", "samples": [[uid, 1, run.crc(uid)] for uid in run.group(0)]}
    (run.root / "train.jsonl").write_text(json.dumps(line) + "\n")
    run.open()
    assert examples_of(run.audit(), "train_log_disagrees") == (1,)


def test_a_line_of_the_train_log_that_nobody_trained_is_found(run) -> None:
    run.step(1, run.group(0))
    run.step(2, run.group(1), log=False, fate="o")
    run.open()
    assert examples_of(run.audit(), "train_log_disagrees") == tuple(run.group(1))


def test_a_checkpoint_without_lines_in_the_train_log_is_found(run) -> None:
    run.step(1, run.group(0), line=False)
    run.checkpoint(1)
    run.open()
    assert examples_of(run.audit(), "train_log_disagrees") == tuple(run.group(0))


def test_a_line_of_the_train_log_that_is_no_line_is_found(run) -> None:
    run.step(1, run.group(0))
    with open(run.root / "train.jsonl", "ab") as file:
        file.write(b'{"step": "two"}\n')
    run.open()
    assert examples_of(run.audit(), "train_log_disagrees")


def test_a_checkpoint_that_forgot_an_older_record_is_found(run) -> None:
    run.step(1, run.group(0))
    run.checkpoint(1, run.group(0)[:3])
    run.open()
    assert examples_of(run.audit(), "checkpoint_incomplete") == (run.uid(0, 3),)


def test_a_newer_checkpoint_that_forgot_what_an_older_one_held_is_found(run) -> None:
    run.step(1, run.group(0))
    run.checkpoint(1)
    run.step(2, run.group(1))
    run.checkpoint(2, run.group(1))
    Wal(run.root / "wal", sync=False).drop_before(3)
    run.open()
    report = run.audit()
    assert "checkpoint_incomplete" in report.kinds


@pytest.mark.parametrize("damage", ["trained", "meta", "missing", "count"])
def test_a_damaged_checkpoint_is_found_and_the_older_one_is_used(run, damage: str) -> None:
    run.step(1, run.group(0))
    run.checkpoint(1)
    run.step(2, run.group(1))
    path = run.checkpoint(2, samples=99 if damage == "count" else None)
    if damage == "trained":
        data = bytearray((path / "trained.bin").read_bytes())
        data[-1] ^= 1
        (path / "trained.bin").write_bytes(data)
    elif damage == "meta":
        (path / "meta.json").write_text("{")
    elif damage == "missing":
        (path / "trained.bin").unlink()
    run.open()
    report = run.audit()
    assert examples_of(report, "checkpoint_damaged") == ("global_step_2",)
    assert report.counts.checkpoint_step == (2 if damage == "count" else 1)


def test_a_damaged_open_bin_is_found_and_not_believed(trained) -> None:
    path = trained.root / "open.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    report = trained.audit()
    assert report.kinds == {"open_damaged", "lost"}
    assert report.counts.lost == 5


@pytest.mark.parametrize("damage", ["magic", "layout", "checksum", "unfinished", "short"])
def test_a_ring_that_can_not_be_read_is_found(run, damage: str) -> None:
    run.dispatch(0)
    if damage == "magic":
        run.ring[0] ^= 1
    elif damage == "layout":
        struct.pack_into("<I", run.ring, 8, 9)
    elif damage == "checksum":
        run.ring[0x44] ^= 1
    elif damage == "unfinished":
        run.ring[0x7C] = 0
    else:
        del run.ring[-64:]
    report = run.audit()
    assert report.kinds == {"bad_ring", "lost"} and report.state == "damaged"
    said = render(report)
    assert "the next start refuses until `busrl ring clean RUN_DIR --force`" in said and "still there" not in said


@pytest.mark.parametrize(
    "lie",
    [
        {"logprobs": np.full(2, -1.0, "<f4").tobytes()},
        {"logprobs": np.array([-1, np.nan, -1], "<f4").tobytes()},
        {"logprobs": np.array([-1, 0.5, -1], "<f4").tobytes()},
        {"versions": b""},
        {"token_ids": b"12345", "logprobs": b"12345", "versions": b"12345"},
    ],
)
def test_a_trained_sample_with_a_broken_payload_is_found(run, lie: dict[str, object]) -> None:
    run.step(1, run.group(0), lies={run.uid(0, 2): lie})
    run.open()
    assert examples_of(run.audit(), "bad_payload") == (run.uid(0, 2),)


def test_the_next_start_settles_an_open_bin_with_a_logged_sample(run) -> None:
    run.step(1, run.group(0), fate="D")
    write_open(run.root / "open.bin", [OpenSlot(uid, 6, slot) for slot, uid in enumerate(run.group(0))])
    report = run.audit()
    assert (report.errors, report.counts.unsettled, report.counts.open) == ((), 4, 0)


def aged(run, **terms: object) -> None:
    """Three steps of the same run, in a topology that promises something of ages."""
    path = run.root / "topology.json"
    content = json.loads(path.read_text())
    content["weights"] = {"mode": "batch-async", "max_staleness": 2, "over_age": "wait", **terms}
    path.write_text(json.dumps(content))
    run.step(1, run.group(0))
    run.step(2, run.group(1))


def of(version: int, step: int, tokens: int = 3, **more: object) -> dict[str, object]:
    return {"version": version, "step": step, "versions": np.full(tokens, version, "<u4").tobytes(), **more}


def test_the_age_of_a_group_is_that_of_its_oldest_member(run) -> None:
    aged(run)
    run.step(3, run.group(2), lies={run.uid(2, member): of(2, 2) for member in range(3)})
    run.open()
    report = run.audit()
    assert not report.errors and report.counts.oldest == 2
    assert "age of their groups at most 2 steps" in render(report)


@pytest.mark.parametrize("over_age", ["wait", "drop"])
def test_a_group_one_step_above_the_bound_is_found(run, over_age) -> None:
    aged(run, over_age=over_age)
    run.step(3, run.group(2))
    fresh = np.array([1, 3, 3], "<u4").tobytes()  # admitted with version 0, but no token is of it
    run.step(4, run.group(3), lies={run.uid(3, member): {"versions": fresh} for member in range(4)})
    run.open()
    assert examples_of(run.audit(), "too_old") == (3,)


def test_an_overaged_group_is_a_note_but_an_error_under_drop(run) -> None:
    aged(run)
    run.step(3, run.group(2))
    run.step(4, run.group(3))
    run.open()
    report = run.audit()
    assert not report.errors and [(f.kind, f.examples) for f in report.findings] == [("old_tokens", (3,))]
    content = json.loads((run.root / "topology.json").read_text())
    content["weights"]["over_age"] = "drop"
    (run.root / "topology.json").write_text(json.dumps(content))
    assert examples_of(run.audit(), "too_old") == (3,)


@pytest.mark.parametrize(
    ("terms", "forced"), [({"mode": "fully-async"}, 0), ({}, 4), ({"mode": "sync"}, 1), ({"max_staleness": 3}, 0)]
)
def test_nothing_is_too_old_where_no_bound_is_promised(run, terms, forced) -> None:
    aged(run, **terms)
    content = json.loads((run.root / "topology.json").read_text())
    content.setdefault("experiments", {})["forced_age"] = forced
    (run.root / "topology.json").write_text(json.dumps(content))
    run.step(3, run.group(2))
    run.step(4, run.group(3))
    run.open()
    assert not run.audit().errors


def test_in_rounds_nothing_is_older_than_its_round(run) -> None:
    aged(run, mode="sync")
    run.open()
    assert examples_of(run.audit(), "too_old") == (1,)


@pytest.mark.parametrize(
    "lie",
    [
        of(2, 2, versions=np.array([1, 2, 2], "<u4").tobytes()),  # counts from its last version
        of(0, 1),  # from a later step than any of its tokens
        of(2, 3),  # from a step that is not finished yet
    ],
)
def test_a_sample_that_counts_its_age_from_too_late_is_found(run, lie) -> None:
    aged(run)
    run.step(3, run.group(2), lies={run.uid(2, 1): lie})
    run.open()
    assert examples_of(run.audit(), "wrong_age") == (run.uid(2, 1),)


def test_where_only_the_last_segment_is_trained_it_alone_counts(run) -> None:
    aged(run)
    content = json.loads((run.root / "topology.json").read_text())
    lie = of(2, 2, versions=np.array([1, 2, 2], "<u4").tobytes(), segments=[1, 2])
    run.step(3, run.group(2), lies={run.uid(2, 1): lie})
    run.open()
    assert examples_of(run.audit(), "wrong_age") == (run.uid(2, 1),)
    content["segments"] = {"loss": "last_segment"}
    (run.root / "topology.json").write_text(json.dumps(content))
    assert not run.audit().errors


def test_versions_from_before_the_log_accuse_nobody(run) -> None:
    aged(run)
    run.checkpoint(2)
    with Wal(run.root / "wal", sync=False) as wal:
        wal.drop_before(3)
    run.step(3, run.group(2), lies={run.uid(2, 1): of(1, 2)})
    run.open()
    assert not run.audit().errors
