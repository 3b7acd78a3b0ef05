"""The scheduler of a simulated run: what one look of it opens, by the rules of the live one.

Talks to the simulated ring. Admission, policy, predictor and waves are those of the live scheduler, called in
its order. It takes no time; `world` decides when it looks. Knows nothing of actors, rewards or events.

- No process dies here, so a group has no re-rolls and is never half open, and `adopt` is not needed.
- A finished answer is given to the policy alone, which hands it on to the predictor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from busrl.config import Topology, named_files
from busrl.config.derive import policy_of
from busrl.data.trace import TracedPrompt
from busrl.errors import UserError
from busrl.scheduling.admission import Admission, Waves, not_ahead
from busrl.scheduling.dispatch import Policy
from busrl.scheduling.groups import GroupView
from busrl.scheduling.lengths import Candidate, Guard, Keywords, RulesPredictor, make_predictor
from busrl.simulate.answers import Answers
from busrl.simulate.figures import Counts
from busrl.simulate.learner import Learner, SimulatedGroup
from busrl.simulate.ring import SimRing

# -- policy and predictor ------------------------------------------------------------------------------------

CLOCKS = ("predictor_us_per_prompt", "predictor_us_per_answer")  # there is no clock here to measure them


class Feed:
    """Candidates in, candidates out; open groups, finished answers and learner states in between."""

    def __init__(self, topology: Topology, answers: Answers, oracle: bool) -> None:
        scheduler = topology.scheduler
        self.answers, self.tokens, self.step = answers, topology.generation.max_new_tokens, 0
        words = keywords_of(scheduler.keywords)
        predictor = make_predictor(
            "oracle" if oracle else scheduler.predictor, keywords=words, lengths_of=self._lengths_of
        )
        self.guard = Guard(predictor, RulesPredictor(words))
        self.policy: Policy = policy_of(topology, self.guard)
        self._draws, self._lengths = list[int](), list[int]()

    def _lengths_of(self, draw: int) -> Sequence[int]:
        return self.answers.answer(draw, self.step).lengths

    def finished(self, draw: int, tokens: int) -> None:
        if self.policy.learns:
            self._draws.append(draw)
            self._lengths.append(tokens)

    def look(self, view: GroupView, rows: int) -> None:
        """The scheduler looks: what has finished since the last time, what is open, and how much actors can run."""
        if not self.policy.learns:
            return
        if self._draws:
            self.policy.finished(self._draws, self._lengths)
            self._draws, self._lengths = [], []
        self.policy.look(view.draws.tolist(), (view.running + view.due).tolist(), rows)
        self.policy.take_records()

    def learner(self, step: int, entropy: float) -> None:
        self.step = step
        self.policy.feedback(entropy)

    def metrics(self) -> dict[str, float]:
        """Those of policy and predictor; none under fifo."""
        if not self.policy.learns:
            return {}
        found = {**self.policy.metrics(), **self.guard.metrics()}
        return {name: value for name, value in found.items() if math.isfinite(value) and name not in CLOCKS}


def keywords_of(path: str) -> Keywords | None:
    """The user's table of keywords; None for busrl's own. `UserError` for one that has a fault."""
    if not path:
        return None
    found, problems = named_files.read_keywords(path)
    if problems:
        raise UserError(f"{path}: {problems[0]}")
    return found


# -- looks ---------------------------------------------------------------------------------------------------

CHARACTERS_PER_TOKEN = 4  # of a prompt, for the cost of its prefill


class Scheduler:
    """`rows`: sequences that all actors can run at once."""

    def __init__(
        self, topology: Topology, answers: Answers, ring: SimRing, counts: Counts, rows: int, *, oracle: bool
    ) -> None:
        self.limits, self.answers, self.ring, self.counts = topology.derived.limits, answers, ring, counts
        self.size, self.rows, self.ahead = topology.groups.size, rows, topology.scheduler.ahead
        self.admission = Admission(self.limits, topology.weights.over_age)
        self.feed = Feed(topology, answers, oracle)
        self.waves = Waves.of(self.limits)
        self.groups: dict[int, SimulatedGroup] = {}
        slots = topology.derived.train_slots
        self.of: list[tuple[int, int]] = [(-1, -1)] * slots  # slot -> draw, member
        self.to_make: list[int] = [0] * slots  # slot -> tokens still to be generated
        self.next_admission = self.version_step = 0
        self.end: float = math.inf  # the first draw that does not exist
        self.arrival: float = math.inf  # of the next prompt of a stream, if it was looked for in vain
        self.starved = False  # the last look could have opened more groups than prompts had arrived
        self._reserve = topology.derived.val_reserve

    def look(self, view: GroupView, learner: Learner, now: float) -> int:
        """Dispatch all that may be dispatched now; the number of samples."""
        self.arrival, self.starved = math.inf, False
        self.feed.look(view, self.rows)
        return self._open_new(view, learner, now)

    def wave_over(self, view: GroupView) -> bool | None:
        """In rounds of segments: whether the wave is over, and no member is still to be dispatched."""
        if self.waves is None:
            return None
        return not view.due.any() and self.waves.over(self.ring.lines, self.next_admission)

    def _open_new(self, view: GroupView, learner: Learner, now: float) -> int:
        free = len(self.ring.free) + self._reserve
        room = self.admission.room(
            view, unpublished=learner.unpublished, next_admission=self.next_admission, step=learner.step,
            free=free, reserve=self._reserve, wave_over=bool(self.wave_over(view)),
        )
        room = not_ahead(room, self.ahead, view.queued, self.size)
        if room.groups <= 0:
            return 0
        self._offer(view, room.groups, now)
        opened = list(islice(iter(self.feed.policy.next, None), room.groups))
        self.starved = len(opened) < room.groups and self.arrival < math.inf
        return sum(self._open(one, learner.step, now) for one in opened)

    def _offer(self, view: GroupView, groups: int, now: float) -> None:
        policy, offered = self.feed.policy, []
        for draw in policy.missing(view.unopened(policy.horizon + groups)):
            task = self.answers.prompt(draw)
            if task is None:
                self.end = min(self.end, draw)
                break
            if task.arrival_s is not None and task.arrival_s > now:
                self.arrival = task.arrival_s
                break
            offered.append(Candidate(draw, task.prompt, self.feed.tokens, task.tag))
        policy.offer(offered)

    def _open(self, candidate: Candidate, step: int, now: float) -> int:
        draw = candidate.draw
        answer = self.answers.answer(draw, step)
        task: TracedPrompt | None = self.answers.prompt(draw)
        arrival = now if task is None or task.arrival_s is None else task.arrival_s
        tokens = 1 + len(candidate.prompt) // CHARACTERS_PER_TOKEN
        self.groups[draw] = SimulatedGroup(
            candidate, answer.lengths, answer.rewards, arrival, tokens, self.size, answer.turns
        )
        self.counts.drawn.extend(answer.lengths)
        index, self.next_admission = self.next_admission, self.next_admission + 1
        priority = self.feed.policy.priority(draw, index)
        slots = self.ring.dispatch(draw, self.size, index, self.version_step, priority, self.waves is not None)
        for member, slot in enumerate(slots):
            self.of[slot] = (draw, member)
            self.to_make[slot] = answer.lengths[member]
        return self.size
