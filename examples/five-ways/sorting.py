"""The task of all five ways: continue `50213=` by anything, a bar, and the digits in order.

`questions` takes it from reasoning-gym; `Sort` is an environment for gymnasium, registered as Sort-v0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

LONGEST = 128  # characters of an answer


def reward(prompt: str, answer: str) -> float:
    """1 if the text behind the last bar is the prompt's digits in order."""
    return float(answer.rpartition("|")[2] == "".join(sorted(prompt.removesuffix("="))))


def questions() -> Iterator[dict[str, str]]:
    """Rows of reasoning-gym's `number_sorting`, written as the model reads them."""
    import reasoning_gym

    rows = reasoning_gym.create_dataset(
        "number_sorting", size=2000, seed=0, min_numbers=3, max_numbers=10, min_decimals=0, max_decimals=0,
        min_value=0, max_value=9,
    )
    for entry in rows:
        digits = "".join(str(int(float(number))) for number in entry["metadata"]["original_numbers"])
        yield {"prompt": f"{digits}=", "answer": "".join(sorted(digits))}


try:
    import gymnasium
except ImportError:  # the other ways do without
    pass
else:

    class Sort(gymnasium.Env[str, str]):
        """One step: the row of digits is shown, the answer is the action."""

        observation_space = gymnasium.spaces.Text(11, charset="0123456789=")
        action_space = gymnasium.spaces.Text(LONGEST, min_length=0, charset="0123456789=.|")

        def reset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[str, dict[str, Any]]:
            super().reset(seed=seed)
            length = int(self.np_random.integers(3, 11))
            self._prompt = "".join(map(str, self.np_random.integers(0, 10, length))) + "="
            return self._prompt, {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return self._prompt, reward(self._prompt, action), True, False, {}

    gymnasium.register("Sort-v0", Sort)
