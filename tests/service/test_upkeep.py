"""What a service drops from its run directory, and that nothing is missed afterwards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from test_deaths import outlives, quick_disk  # noqa: F401  (a fixture of every test)
from test_driver import BYTES, Service, stub

from busrl.service.audit import Audited, audit
from busrl.service.operations import write_folder
from busrl.service.requests import FRAME_BYTES, Answer, LogReader, LogWriter, Request, segment_path, segments

SEGMENT_BYTES = 400


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    stub(monkeypatch)
    made = Service(tmp_path, SEGMENT_BYTES)
    made.restart(state_every_s=0)
    return made


def audited(service: Service) -> Audited:
    result = audit(service.where.root.parent)
    assert result is not None
    return result


def sizes(directory: Path) -> list[int]:
    return [segment_path(directory, number).stat().st_size for number in segments(directory)]


def trained(service: Service, first: int, count: int) -> None:
    """Some steps with data of some size."""
    for seq in range(first, first + 2 * count, 2):
        service.forward(seq, *[1.0] * 50)
        service.step(seq + 1)
    service.run()


def tended(service: Service) -> None:
    for _ in range(40):
        service.driver.tend()


def test_data_of_requests_that_are_in_both_states_is_dropped(service: Service) -> None:
    trained(service, 1, 10)
    before = sizes(service.where.requests)
    tended(service)
    assert sum(sizes(service.where.requests)) < sum(before) - 8 * 190
    result = audited(service)
    assert result.errors == []
    assert result.counts["requests whose data is kept no longer"] in (8, 9)
    service.restart()
    service.train(21, 1)
    service.run()
    assert service.models.values["m"] == 501.0
    assert audited(service).errors == []


def test_data_that_a_state_still_needs_stays(service: Service) -> None:
    service.model("n")
    service.forward(1, 7, model="n")
    trained(service, 1, 10)
    tended(service)
    service.restart()
    service.step(2, "n")
    service.run()
    assert b'"value:mean":7.0' in service.answers("n")[-1].payload


def test_data_of_samples_stays_until_they_are_drawn(service: Service) -> None:
    service.ask(1, "save_weights_for_sampler", sampling_session_seq_id=0)
    for seq in range(4):
        service.log.write(Request("sample", "s:sample:0", seq, "asample", b"q", b"x" * 200))
    service.run()
    before = sizes(service.where.requests)
    for _ in range(5):
        service.driver.tend()
    assert sizes(service.where.requests) == before
    samples = LogWriter(service.where.samples)
    for seq in range(4):
        samples.write(Answer("s:sample:0", seq, b"q", "done", True, b"tokens", weights=1))
    samples.close()
    for _ in range(5):
        service.driver.tend()
    assert sum(sizes(service.where.requests)) < sum(before) - 400
    assert audited(service).errors == []


def test_answers_are_dropped_when_clients_had_their_time(service: Service) -> None:
    service.restart(keep_answers_s=3600)
    samples = LogWriter(service.where.samples, SEGMENT_BYTES)
    service.log.write(Request("sampler", "s:sample:0"))
    for seq in range(6):
        service.log.write(Request("sample", "s:sample:0", seq, "asample", b"q", b"x" * 200))
        samples.write(Answer("s:sample:0", seq, b"q", "done", True, b"t" * 200))
    service.run()
    before = sizes(service.where.samples)
    service.driver.tend()
    assert sizes(service.where.samples) == before
    for number in segments(service.where.samples)[:3]:
        os.utime(segment_path(service.where.samples, number), (0, 0))
    for _ in range(10):
        service.driver.tend()
    after = sizes(service.where.samples)
    assert max(after[:3]) < 200 and after[3:] == before[3:]
    result = audited(service)
    assert result.errors == [] and result.counts["answers that are kept no longer"] == 3


def snapshots_of(service: Service) -> list[int]:
    return service.where.numbers_of_snapshots()


def test_snapshots_without_a_name_go_with_their_session(service: Service) -> None:
    service.ask(1, "save_weights_for_sampler", sampling_session_seq_id=0)
    service.ask(2, "save_weights_for_sampler", path="named")
    service.run()
    service.driver.tend()
    assert snapshots_of(service) == [1, 2]
    service.log.write(Request("finish", "s", about={"reason": "success"}))
    service.restart()
    service.driver.follow()
    service.driver.tend()
    assert snapshots_of(service) == [2]
    assert audited(service).errors == []


def test_the_snapshot_sampled_longest_ago_goes_first(service: Service) -> None:
    service.restart()
    for seq in range(1, 5):
        service.ask(seq, "save_weights_for_sampler", sampling_session_seq_id=seq)
    service.run()
    size = sum(file.stat().st_size for file in service.where.snapshot(1).iterdir())
    service.log.write(Request("sample", "s:sample:1", 0, "asample", b"q"))
    service.restart(snapshot_bytes=2 * size + 20)
    service.driver.follow()
    service.driver.tend()
    assert snapshots_of(service) == [1, 4], "one that was sampled, and the newest"


def test_a_snapshot_that_is_being_sampled_stays(service: Service) -> None:
    for seq in range(1, 4):
        service.ask(seq, "save_weights_for_sampler", sampling_session_seq_id=seq)
    service.log.write(Request("sample", "s:sample:1", 0, "asample", b"q", b"body"))
    service.restart(snapshot_bytes=0)
    service.run()
    service.driver.tend()
    assert snapshots_of(service) == [1, 3]


def test_the_snapshot_that_inflight_samplers_move_on_to_stays(service: Service) -> None:
    for seq, kind in enumerate(("inflight", "inflight", "snapshot", "snapshot"), 1):
        service.ask(seq, "save_weights_for_sampler", sampling_session_seq_id=seq, kind=kind)
    service.restart(snapshot_bytes=0)
    service.run()
    service.driver.tend()
    assert snapshots_of(service) == [2, 4]


# -- deaths meanwhile -----


def test_a_tuner_that_dies_while_it_drops_loses_nothing(tmp_path: Path, service: Service) -> None:
    at, ended = 0, False
    while not ended:
        at += 2
        other = Service(tmp_path / str(at), SEGMENT_BYTES)
        other.restart(state_every_s=0)
        trained(other, 1, 4)
        other.ask(9, "save_weights_for_sampler", sampling_session_seq_id=0)
        other.run()
        other.log.write(Request("finish", "s", about={"reason": "success"}))

        def life(other: Service = other) -> None:
            other.restart(keep_answers_s=0.0)
            other.driver.follow()
            for _ in range(5):
                other.driver.tend()

        ended = outlives(life, at)
        assert not ended or snapshots_of(other) == []
        other.restart()
        other.train(10, 1)
        other.run()
        assert other.models.values["m"] == 201.0 and not other.warned, f"killed at chance {at}"
        assert audited(other).errors == [], f"killed at chance {at}"
        other.close()
    assert at > 40


def test_a_tuner_that_dies_while_it_parks_loses_nothing(tmp_path: Path, service: Service) -> None:
    at, ended = 0, False
    while not ended:
        at += 3
        other = Service(tmp_path / str(at))
        other.model("n")
        for name, value in (("m", 1), ("n", 10)):
            for seq in (1, 4):
                other.forward(seq, value, value, model=name)
                other.train(seq + 1, value, name)

        def life(other: Service = other) -> None:
            other.restart(resident_bytes=BYTES)
            other.run()

        ended = outlives(life, at)
        life()
        for name, value in (("m", 6), ("n", 60)):
            assert f'"value:mean":{value}.0' in other.answers(name)[-1].payload.decode(), f"killed at chance {at}"
        assert audited(other).errors == [] and not other.warned, f"killed at chance {at}"
        other.close()
    assert at > 40


def finished(service: Service) -> None:
    service.log.write(Request("finish", "s", about={"reason": "success"}))
    service.driver.follow()
    tended(service)


def test_a_snapshot_whose_name_another_has_goes_unless_it_is_drawn_with(service: Service) -> None:
    for seq in range(1, 5):
        service.ask(seq, "save_weights_for_sampler", path="latest", overwrite=True)
    service.ask(5, "save_weights_for_sampler", path="latest")  # refused
    service.run()
    service.log.write(Request("sampler", "s:sample:0", about={"model": "m", "seq": 2, "path": "tinker://m/..."}))
    service.driver.follow()
    tended(service)
    assert service.said()[-1] == (5, "user") and service.where.numbers_of_snapshots() == [2, 4]
    service.restart()
    service.run()
    tended(service)
    assert service.where.numbers_of_snapshots() == [2, 4]
    finished(service)
    assert service.where.numbers_of_snapshots() == [4]


def test_a_snapshot_that_no_answer_names_keeps_the_one_before_it(service: Service) -> None:
    service.ask(1, "save_weights_for_sampler", path="latest", overwrite=True)
    service.run()
    about = {"by": "m:2", "sampler": "", "name": "latest"}
    write_folder(service.where.snapshot(2), about, lambda folder: None)  # and its tuner died
    service.restart()
    service.run()
    tended(service)
    assert service.where.numbers_of_snapshots() == [1, 2]


def test_a_snapshot_of_a_sampler_that_a_power_cut_took_may_go(service: Service) -> None:
    for seq in (1, 2):
        service.ask(seq, "save_weights_for_sampler", sampling_session_seq_id=seq)
    service.run()
    *_, (_, newest) = LogReader(service.where.requests).read()
    service.log.close()
    os.truncate(segment_path(service.where.requests, newest.segment), newest.begin - FRAME_BYTES)
    service.log = LogWriter(service.where.requests, SEGMENT_BYTES)
    service.restart(snapshot_bytes=0)
    service.run()
    tended(service)
    assert service.where.numbers_of_snapshots() == [1]
