"""The logs of a service: what is written is read once, in order, whatever killed a writer."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import pytest

from busrl.errors import FileCorrupt
from busrl.ledger.wal import HEAD
from busrl.service.requests import LogReader, LogWriter, Request, segment_path, strip

decode = msgspec.msgpack.Decoder(Request).decode


def request(number: int, size: int = 10) -> Request:
    return Request("training", "model", number, "optim_step", b"d", b"x" * size)


def numbers(reader: LogReader) -> list[int]:
    return [decode(payload).seq for payload, _ in reader.read()]


def test_a_reader_that_follows_gets_each_record_once(tmp_path: Path) -> None:
    reader, writer = LogReader(tmp_path / "log"), LogWriter(tmp_path / "log")
    assert numbers(reader) == []
    writer.write(request(1))
    writer.write(request(2))
    assert numbers(reader) == [1, 2]
    writer.write(request(3))
    assert numbers(reader) == [3]
    assert numbers(reader) == []


def test_a_log_of_several_segments_is_read_in_order(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, segment_bytes=500)
    reader = LogReader(tmp_path)
    for number in range(20):
        writer.write(request(number, 100))
        assert numbers(reader) == [number]
    assert len(list(tmp_path.glob("*.wal"))) > 3
    assert numbers(LogReader(tmp_path)) == list(range(20))


def test_a_place_finds_its_record_again(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, segment_bytes=500)
    places = [writer.write(request(number, 200)) for number in range(5)]
    reader = LogReader(tmp_path)
    assert [decode(reader.payload(place)).seq for place in places] == list(range(5))
    assert [place for _, place in reader.read()] == places


def test_a_stripped_segment_keeps_its_records_and_none_of_their_data(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, segment_bytes=500)
    reader = LogReader(tmp_path)
    places = [writer.write(request(number, 200)) for number in range(5)]
    assert numbers(reader) == list(range(5))
    strip(tmp_path, 1, Request, lambda request: msgspec.structs.replace(request, body=b""))
    assert [bool(reader.payload(place)) for place in places] == [place.segment > 1 for place in places]
    assert numbers(LogReader(tmp_path)) == list(range(5))
    writer.write(request(5))
    assert numbers(reader) == [5]


def test_a_segment_that_is_synced_by_another_thread_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, closed, faults = threading.Event(), threading.Event(), list[OSError]()
    close, sync = os.close, os.fdatasync

    def slowly(file: int) -> None:
        if threading.current_thread() is other:
            entered.set()
            closed.wait(0.2)  # which comes only where nothing holds the file
        sync(file)

    def told(file: int) -> None:
        close(file)
        closed.set()

    def synced() -> None:
        try:
            writer.sync()
        except OSError as problem:
            faults.append(problem)

    writer, other = LogWriter(tmp_path, segment_bytes=300), threading.Thread(target=synced)
    writer.write(request(1, 200))
    monkeypatch.setattr(os, "fdatasync", slowly)
    monkeypatch.setattr(os, "close", told)
    other.start()
    assert entered.wait(10)
    writer.write(request(2, 200))  # begins a segment
    other.join(10)
    assert not faults and numbers(LogReader(tmp_path)) == [1, 2]


@pytest.mark.parametrize("cut", [1, 5, 11, 30])
def test_half_a_record_at_the_end_is_cut_and_never_read(tmp_path: Path, cut: int) -> None:
    writer = LogWriter(tmp_path)
    writer.write(request(1))
    writer.write(request(2))
    writer.close()
    path = segment_path(tmp_path, 1)
    os.truncate(path, path.stat().st_size - cut)
    reader = LogReader(tmp_path)
    assert numbers(reader) == [1]
    again = LogWriter(tmp_path)
    assert again.cut_bytes > 0
    again.write(request(3))
    assert numbers(reader) == [3]
    assert numbers(LogReader(tmp_path)) == [1, 3]


def test_a_segment_begun_by_a_killed_writer_is_begun_again(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    writer.write(request(1))
    segment_path(tmp_path, 2).write_bytes(b"BUS")
    again = LogWriter(tmp_path)
    again.write(request(2))
    assert numbers(LogReader(tmp_path)) == [1, 2]


def test_damage_before_the_newest_segment_is_refused(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, segment_bytes=100)
    for number in range(3):
        writer.write(request(number, 100))
    path = segment_path(tmp_path, 1)
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    with pytest.raises(FileCorrupt, match="is damaged"):
        numbers(LogReader(tmp_path))


def test_damage_before_whole_records_of_the_newest_segment_is_refused(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    places = [writer.write(request(number, 100)) for number in range(3)]
    writer.close()
    path = segment_path(tmp_path, 1)
    before = path.read_bytes()
    data = bytearray(before)
    data[places[1].begin + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(FileCorrupt, match="is damaged, and whole ones follow it at byte"):
        LogWriter(tmp_path)
    assert path.read_bytes() == data, "nothing was cut"


def test_a_record_inside_half_a_record_is_a_clients_and_is_cut(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    writer.write(request(1))
    inner = segment_path(tmp_path, 1).read_bytes()[len(HEAD):]
    writer.write(Request("training", "m", 2, body=inner + bytes(100)))
    writer.close()
    path = segment_path(tmp_path, 1)
    os.truncate(path, path.stat().st_size - 50)
    again = LogWriter(tmp_path)
    assert again.cut_bytes > 0 and numbers(LogReader(tmp_path)) == [1]


def test_a_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    segment_path(tmp_path, 1).write_bytes(b"something else entirely, and long")
    with pytest.raises(FileCorrupt, match="does not begin"):
        LogWriter(tmp_path)
