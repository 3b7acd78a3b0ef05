"""Who was turned away by the broker is told once at once, then with a count: an address can not fill the disk."""

from __future__ import annotations

from busrl.bus import Refusal
from busrl.roles.bus import Refusals


def test_refusals_of_one_address_are_one_line_with_all_of_them_counted() -> None:
    said: list[str] = []
    refusals = Refusals(said.append)
    for number in range(200):
        refusals.add(Refusal("10.0.0.9", f"key{number}", 2))
    refusals.add(Refusal("10.0.0.10", "other", 1))
    refusals.report()
    first, second = said
    assert "10.0.0.9 2 times: key key0" in first and "(2 refused in all)" in first
    assert "10.0.0.10: key other" in second and "(401 refused in all)" in second
