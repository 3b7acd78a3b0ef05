"""How `python -m benchmarks several` scores players: by every course of the game, with nothing sampled."""

from __future__ import annotations

from benchmarks.several import Chances, positions, wins


def player(of_one: dict[int, float], none: float = 0.0) -> Chances:
    """Takes one stone with that chance where so many are left, else two, but for the share of moves that are none."""
    left = positions()

    def chances(text: str) -> dict[str, float]:
        one = of_one[left[text]] * (1 - none)
        return {"1": one, "2": 1 - none - one}

    return chances


BEST = player({7: 1.0, 5: 0.0, 4: 1.0, 2: 0.0, 1: 1.0, 3: 0.5, 6: 0.5})
EVEN = player(dict.fromkeys(range(1, 8), 0.5))
NEVER = player(dict.fromkeys(range(1, 8), 0.5), none=1.0)


def test_who_plays_well_and_begins_always_wins() -> None:
    assert wins(BEST, BEST) == wins(BEST, EVEN) == wins(BEST, NEVER) == 1.0
    assert wins(NEVER, BEST) == 0.0
    assert 0.3 < wins(EVEN, EVEN) < 0.6 and wins(EVEN, BEST) < wins(EVEN, EVEN)


def test_every_text_of_the_game_is_a_position() -> None:
    assert len(positions()) == 33 and positions()["7=16=24="] == 4 and set(positions().values()) == set(range(1, 8))
