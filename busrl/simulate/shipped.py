"""What is known of the quickstart without a run of one's own: times, lengths and rewards that are shipped with busrl.

Reads one file of the package, `tiny_sort.jsonl`, which `tools/bench/ship_quickstart.py` makes from a finished run.
Knows nothing of other models, of events or of tables.

- First line: {"source": text, "times": {name: seconds}}. Every further line is a group: [step of its weights, prompt,
  [length, ...], "0110..." (rewards)].
- A draw is one of the shipped prompts by chance. Its answers are those of a prompt of the same kind (first digit and
  size, which is all that the lengths of this task depend on) at about the same step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from busrl.data.trace import Task
from busrl.simulate.answers import Recorded, RecordedAnswers, chance
from busrl.topology import Topology

NAME = "tiny:sort"
FILE = Path(__file__).with_name("tiny_sort.jsonl")


@dataclass(frozen=True)
class Shipped:
    """Times by name, and groups with their prompts."""

    source: str
    times: dict[str, float]
    prompts: tuple[str, ...]
    groups: tuple[Recorded, ...]

    def answers(self, topology: Topology, seed: int) -> RecordedAnswers:
        """The shipped groups for the draws of `topology`."""

        def prompt_of(draw: int) -> str:
            return self.prompts[int(chance(topology.run.seed, draw) * len(self.prompts))]

        return RecordedAnswers(
            self.groups,
            topology.groups.size,
            topology.generation.max_new_tokens,
            line_of=lambda draw: kind_of(prompt_of(draw)),
            text_of=lambda draw: Task(prompt_of(draw), (1,)),
            seed=seed,
        )


def find(topology: Topology) -> Shipped | None:
    """What is shipped for model and data of a topology, if anything is; scripted answers are of other lengths."""
    return _read() if topology.model.path == topology.data.train == NAME and not topology.scripted else None


def kind_of(prompt: str) -> int:
    """Prompts of one kind have answers of one kind; a prompt of this task is a row of digits and a sign."""
    return 100 * int(prompt[0]) + len(prompt)


@cache
def _read() -> Shipped:
    first, *rest = (msgspec.json.decode(line) for line in FILE.read_bytes().splitlines())
    groups = tuple(
        Recorded(step, kind_of(prompt), tuple(lengths), tuple(float(one) for one in rewards))
        for step, prompt, lengths, rewards in rest
    )
    return Shipped(first["source"], first["times"], tuple(dict.fromkeys(prompt for _, prompt, _, _ in rest)), groups)
