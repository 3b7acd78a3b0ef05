"""A connection that the broker refused is reported at once, then with a count: an address cannot fill the disk."""

from __future__ import annotations

import json
from pathlib import Path

from busrl.bus.broker import Refusal
from busrl.roles.bus import Bus


def test_refusals_of_one_address_are_one_line_with_all_of_them_counted(tmp_path: Path) -> None:
    (tmp_path / "topology.json").write_text('{"bus": {}}')
    bus = Bus(str(tmp_path), "bus")
    for number in range(200):
        bus.refused(Refusal("10.0.0.9", f"key{number}", 2))
    bus.refused(Refusal("10.0.0.10", "other", 1))
    bus.report_refusals()
    first, second = (json.loads(line)["text"] for line in bus.paths.errors.read_text().splitlines())
    assert "10.0.0.9 2 times: key key0" in first and "(2 refused in all)" in first
    assert "10.0.0.10: key other" in second and "(401 refused in all)" in second
