"""Every term of a step against numbers that a person can work out: no formula and no forward of busrl is asked.

The model draws alike wherever it stands: its last norm has weight 0 and six logits z as its bias, its head is the
identity, so log p(k) = z_k / T - log sum_j exp(z_j / T). Engine (OLD), reference and teacher are other six logits. What
is expected is written out in plain Python, and its slope along each logit is taken by central differences.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from busrl.ledger.wal import Record, SampleRecord
from busrl.preflight.load import load
from busrl.roles.learner.step import TrainingStep
from busrl.states import Finish
from busrl.topology import Topology

ROOT = Path(__file__).resolve().parents[2]
Logits = Sequence[float]
NOW, OLD = (0.3, -0.8, 1.1, 0.2, -0.4, 0.6), (0.1, -0.5, 1.3, 0.1, -0.5, 0.9)
REFERENCE, TEACHER = (0.6, -0.2, 0.4, -0.3, 0.2, 0.5), (-0.2, 0.4, 1.6, 0.9, -1.0, 0.1)
WIDTH = 8
STEP = 5  # finished steps; the weights at hand are version 5


@dataclasses.dataclass(frozen=True)
class Answer:
    """`trained` of each drawn token; `turns`: drawn tokens of each turn of an episode, and whether it is trained."""

    group: int
    reward: float
    tokens: tuple[int, ...]
    trained: tuple[bool, ...]
    temperature: float = 0.7
    cut: bool = False
    old: int = 0  # tokens at its start that version 0 drew
    segments: tuple[int, ...] = ()
    turns: tuple[tuple[int, bool], ...] = ()

    @property
    def ours(self) -> list[bool]:
        """Of each token whether the policy drew it to be trained, be it left out for its age or a cut."""
        return [trained for count, trained in self.turns for _ in range(count)] or [True] * len(self.tokens)

    def logs(self, z: Logits) -> list[float]:
        return [logp(z, token, self.temperature) for token in self.tokens]


def logp(z: Logits, token: int, temperature: float) -> float:
    return z[token] / temperature - math.log(sum(math.exp(logit / temperature) for logit in z))


def entropy(z: Logits, temperature: float) -> float:
    return -sum(math.exp(logp(z, k, temperature)) * logp(z, k, temperature) for k in range(len(z)))


T, F = True, False
PLAIN = (
    Answer(0, 1.0, (2, 5, 1), (T, T, T)), Answer(0, 0.0, (4, 3, 2, 1), (T, T, T, T)), Answer(0, 0.25, (5, 1), (T, T)),
    Answer(1, 0.0, (2, 2, 1), (T, T, T), 1.3), Answer(1, 1.0, (3, 1), (T, T), 1.3),
)
# A first token that is too old; an answer that the limit cut; a turn that an opponent played with the same model.
MASKED = (
    Answer(0, 1.0, (2, 5, 1), (F, T, T), old=1), Answer(0, 0.0, (4, 3, 2, 5), (F, F, F, F), cut=True),
    Answer(0, 0.25, (5, 1, 4, 3, 0), (T, T, F, F, F), turns=((2, T), (3, F))),
    Answer(1, 0.0, (2, 2, 1), (T, T, T), 1.3), Answer(1, 1.0, (3, 1), (T, T), 1.3),
)
WORLDS = {"plain": PLAIN, "masked": MASKED}
world = pytest.mark.parametrize("answers", WORLDS.values(), ids=WORLDS)


# -- the run ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Logits], Path]:
    """A model folder of these logits."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=6, hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=32, tie_word_embeddings=False, eos_token_id=1,
    )
    known: dict[Logits, Path] = {}

    def make(z: Logits) -> Path:
        if z not in known:
            torch.manual_seed(0)
            model = GPTNeoXForCausalLM(config)
            norm = model.gpt_neox.final_layer_norm
            with torch.no_grad():
                norm.weight.zero_()
                norm.bias.copy_(torch.tensor([*z, 0.0, 0.0]))
                model.get_output_embeddings().weight.copy_(torch.eye(6, WIDTH))
            known[tuple(z)] = tmp_path_factory.mktemp("logits")
            model.save_pretrained(known[tuple(z)])
        return known[tuple(z)]

    return make


@pytest.fixture
def topology(folder: Callable[[Logits], Path]) -> Topology:
    base = load(ROOT / "configs" / "quickstart.toml")
    model = dataclasses.replace(
        base.model, path=str(folder(NOW)), reference=str(folder(REFERENCE)), teacher=str(folder(TEACHER)),
    )
    learner = dataclasses.replace(
        base.learner, loss="ppo_clip", clip_low=0.2, clip_high=0.28, dual_clip=3.0, max_grad_norm=1e6, lr=1e-2,
        warmup_groups=0, trigger=dataclasses.replace(base.learner.trigger, n_min=2),
    )
    return dataclasses.replace(
        base, model=model, learner=learner, reward=dataclasses.replace(base.reward, truncated="mask"),
        weights=dataclasses.replace(base.weights, mode="batch-async", over_age="wait", max_staleness=2),
    )


def with_keys(topology: Topology, **keys: Any) -> Topology:
    return dataclasses.replace(topology, learner=dataclasses.replace(topology.learner, **keys))


def records(answers: Sequence[Answer]) -> list[SampleRecord]:
    return [_record(uid, answer) for uid, answer in enumerate(answers)]


def _record(uid: int, answer: Answer) -> SampleRecord:
    count, prompt, ids, turns = len(answer.tokens), [0, 3], list(answer.tokens), []
    if answer.turns:
        ids, prompt, at = [0], [], 0
        for call, (length, trained) in enumerate(answer.turns):
            turns += [0, len(ids), len(ids) + length, 2 * call + trained]
            ids += [*answer.tokens[at : at + length], 5]  # and a word of a tool between two turns
            at += length
        ids.pop()
    versions = np.where(np.arange(count) < answer.old, 0, STEP)
    return SampleRecord(
        uid=uid, group=answer.group, admission=answer.group, member=uid, attempt=0, prompt_crc=0, reward=answer.reward,
        temperature=answer.temperature, version=int(versions.min()), step=int(versions.min()),
        finish=int(Finish.LENGTH if answer.cut else Finish.EOS), prompt_ids=np.array(prompt, "<i4").tobytes(),
        token_ids=np.array(ids, "<i4").tobytes(), logprobs=np.array(answer.logs(OLD), "<f4").tobytes(),
        versions=versions.astype("<u4").tobytes(), segments=list(answer.segments), turns=turns,
        seqs=[len(ids)] if turns else [],
    )


class Watched(TrainingStep):
    """Keeps the logits before each update, and the gradient that the optimiser got for them."""

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        tensors = self.trainer.trained_tensors().items()
        [self.logits] = [tensor for name, tensor in tensors if "final_layer_norm.bias" in name]
        self.seen: list[tuple[list[float], list[float]]] = []
        self.trainer.optimizer.register_step_pre_hook(lambda *_: self._look())
        for version in range(STEP + 1):
            self.stale.at(version, version)

    def _look(self) -> None:
        """Nothing but the logits may move: with another weight of the norm they would depend on what was read."""
        for tensor in self.trainer.parameters:
            if tensor is not self.logits:
                tensor.grad = None
        self.seen.append((self.logits.detach()[:6].tolist(), self.logits.grad[:6].tolist()))  # type: ignore[index]


def slope(value: Callable[[Logits], float], z: Logits) -> list[float]:
    def along(k: int, by: float) -> float:
        return value([logit + by * (i == k) for i, logit in enumerate(z)])

    return [(along(k, 1e-5) - along(k, -1e-5)) / 2e-5 for k in range(len(z))]


def trained(topology: Topology, answers: Sequence[Answer], expected: Callable[[Logits], float], **keys: Any) -> Any:
    """What the step of these answers told; its loss and its gradient are those of `expected`, a mean over its `D`."""
    step = Watched(with_keys(topology, **keys))
    stats = step.train(records(answers), len({answer.group for answer in answers}), STEP)
    [(z, gradient)] = step.seen
    assert z == pytest.approx(NOW, abs=1e-6)
    assert gradient == pytest.approx(slope(expected, NOW), abs=2e-6)
    assert max(map(abs, gradient)) > 1e-3
    assert stats.tokens == sum(sum(answer.trained) for answer in answers)
    return stats


# -- by hand ------------------------------------------------------------------------


def group_std(answers: Sequence[Answer], rewards: Sequence[float] | None = None) -> list[float]:
    worth = [answer.reward for answer in answers] if rewards is None else rewards
    advantages = []
    for answer, reward in zip(answers, worth, strict=True):
        peers = [w for w, other in zip(worth, answers, strict=True) if other.group == answer.group]
        advantages.append((reward - statistics.mean(peers)) / (statistics.stdev(peers) + 1e-6))
    return advantages


def clipped(ratio: float, worth: float) -> float:
    loss = max(-ratio * worth, -min(max(ratio, 0.8), 1.28) * worth)
    return min(loss, -3.0 * worth) if worth < 0 else loss


def tokens(answers: Sequence[Answer], z: Logits) -> Iterator[tuple[int, int, float, float, float, Answer]]:
    """Of each trained token: number of the answer, place in it, log-probabilities now, of engine and reference."""
    for number, answer in enumerate(answers):
        for place, (now, drawn, referred) in enumerate(zip(answer.logs(z), answer.logs(OLD), answer.logs(REFERENCE))):
            if answer.trained[place]:
                yield number, place, now, drawn, referred, answer


def mean(answers: Sequence[Answer], z: Logits, term: Callable[[int, float, float, float, Answer], float]) -> float:
    losses = [
        term(number, now, drawn, referred, answer) for number, _, now, drawn, referred, answer in tokens(answers, z)
    ]
    return sum(losses) / len(losses)


def policy_loss(answers: Sequence[Answer], worth: Sequence[float], z: Logits) -> float:
    return mean(answers, z, lambda i, now, drawn, referred, answer: clipped(math.exp(now - drawn), worth[i]))


KL = {
    "k1": lambda p, q: p - q, "k2": lambda p, q: (p - q) ** 2 / 2, "k3": lambda p, q: math.exp(q - p) - 1 - (q - p),
}


@world
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3_is"])
def test_the_kl_loss_term_adds_to_each_trained_token_at_its_temperature(
    topology: Topology, answers: tuple[Answer, ...], kind: str
) -> None:
    def term(i: int, now: float, drawn: float, referred: float, answer: Answer) -> float:
        far = math.exp(now - drawn) * KL["k3"](now, referred) if kind == "k3_is" else KL[kind](now, referred)
        return clipped(math.exp(now - drawn), worth[i]) + 0.3 * far

    worth = group_std(answers)
    told = trained(topology, answers, lambda z: mean(answers, z, term), kl=kind, kl_coef=0.3)
    assert told.loss == pytest.approx(mean(answers, NOW, term), abs=1e-6)
    assert told.diagnostics.kl == pytest.approx(
        mean(answers, NOW, lambda i, now, drawn, referred, answer: KL["k3"](now, referred)), abs=1e-6)


@world
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_kl_reward_term_uses_log_probabilities_of_the_draw(
    topology: Topology, answers: tuple[Answer, ...], kind: str
) -> None:
    """Of every token that was drawn to be trained: those that are too old or were cut are of the answer too."""
    def paid(answer: Answer) -> float:
        both = zip(answer.logs(OLD), answer.logs(REFERENCE), answer.ours, strict=True)
        return sum(0.3 * KL[kind](drawn, referred) for drawn, referred, ours in both if ours)

    worth = group_std(answers, [answer.reward - paid(answer) for answer in answers])
    assert max(abs(a - b) for a, b in zip(worth, group_std(answers), strict=True)) > 0.05
    trained(topology, answers, lambda z: policy_loss(answers, worth, z), kl=kind, kl_coef=0.3, kl_in="reward")


@world
def test_an_entropy_bonus_reduces_the_loss_at_each_token_temperature(
    topology: Topology, answers: tuple[Answer, ...]
) -> None:
    def whole(z: Logits) -> float:
        return policy_loss(answers, worth, z) - 0.4 * mean(
            answers, z, lambda i, now, drawn, referred, answer: entropy(z, answer.temperature))

    worth = group_std(answers)
    told = trained(topology, answers, whole, entropy_coef=0.4)
    assert told.loss == pytest.approx(whole(NOW), abs=1e-6)
    assert told.diagnostics.entropy == pytest.approx(
        mean(answers, NOW, lambda i, now, drawn, referred, answer: entropy(NOW, answer.temperature)), abs=1e-6)


# Bounds, and the weight of a token by its own log rho and those of its answer.
WEIGHTS: dict[str, tuple[float, float, Callable[[float, list[float]], float]]] = {
    "token_tis": (0.0, 0.9, lambda log, logs: min(math.exp(log), 0.9)),
    "seq_tis": (0.0, 0.7, lambda log, logs: min(math.exp(sum(logs)), 0.7)),
    "icepop": (0.8, 1.2, lambda log, logs: math.exp(log) if 0.8 <= math.exp(log) <= 1.2 else 0.0),
    "seq_mis": (0.6, 0.9, lambda log, logs: math.exp(sum(logs)) if 0.6 <= math.exp(sum(logs)) <= 0.9 else 0.0),
    "geo_rs": (0.8, 1.05, lambda log, logs: float(0.8 <= math.exp(statistics.mean(logs)) <= 1.05)),
    "k3_rs": (0.0, 0.02, lambda log, logs: float(statistics.mean(math.exp(x) - x - 1 for x in logs) <= 0.02)),
}


@world
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_correction_weighs_trained_tokens_by_a_constant_trainer_engine_ratio(
    topology: Topology, answers: tuple[Answer, ...], kind: str
) -> None:
    low, high, weight = WEIGHTS[kind]
    logs = [[now - drawn for i, _, now, drawn, *_ in tokens(answers, NOW) if i == k] for k in range(len(answers))]
    constant = {(i, place): weight(now - drawn, logs[i]) for i, place, now, drawn, *_ in tokens(answers, NOW)}
    worth = group_std(answers)

    def whole(z: Logits) -> float:
        losses = [-worth[i] * now * constant[i, place] for i, place, now, *_ in tokens(answers, z)]
        return sum(losses) / len(losses)

    keys = {"loss": "reinforce", "correction": kind, "correction_low": low, "correction_high": high}
    told = trained(topology, answers, whole, **keys)
    assert told.loss == pytest.approx(whole(NOW), abs=1e-6)
    dropped = [weight == 0.0 for weight in constant.values()]
    assert told.diagnostics.dropped == pytest.approx(sum(dropped) / len(dropped), abs=1e-6)
    assert len({round(weight, 6) for weight in constant.values()}) > 1


@world
@pytest.mark.parametrize("loss", ["decoupled", "ppo_clip", "reinforce"])
def test_a_second_update_is_measured_against_the_weights_before_the_first(
    topology: Topology, answers: tuple[Answer, ...], loss: str
) -> None:
    keys: dict[str, Any] = {
        "decoupled": {"tis_cap": 1.05}, "ppo_clip": {"ratio": "proximal"}, "reinforce": {"correction": "token_tis"},
    }[loss]
    step = Watched(with_keys(topology, loss=loss, updates_per_batch=2, lr=0.1, **keys))
    step.train(records(answers), 2, STEP)
    [_, (moved, gradient)] = step.seen
    assert max(abs(a - b) for a, b in zip(moved, NOW, strict=True)) > 0.05
    worth, second = group_std(answers), [answer for answer in answers if answer.group == 1]

    def whole(z: Logits) -> float:
        losses = []
        for answer, advantage in zip(second, worth[-2:], strict=True):
            for now, drawn, before in zip(answer.logs(z), answer.logs(OLD), answer.logs(NOW), strict=True):
                weight = {"decoupled": min(math.exp(before - drawn), 1.05), "ppo_clip": 1.0,
                          "reinforce": min(math.exp(before - drawn), 2.0)}[loss]
                plain = -advantage * now if loss == "reinforce" else clipped(math.exp(now - before), advantage)
                losses.append(weight * plain)
        return sum(losses) / len(losses)

    assert gradient == pytest.approx(slope(whole, moved), abs=5e-6)


def to_teacher(z: Logits, temperature: float, best: int = 3) -> float:
    """KL of the teacher's three likeliest tokens, and of all others as one more."""
    known = sorted(range(6), key=lambda k: -TEACHER[k])[:best]
    theirs, ours = ([math.exp(logp(logits, k, temperature)) for k in known] for logits in (TEACHER, z))
    pairs = [*zip(theirs, ours, strict=True), (1 - sum(theirs), 1 - sum(ours))]
    return sum(p * math.log(p / q) for p, q in pairs)


@world
@pytest.mark.parametrize("alone", [True, False], ids=["topk_kl", "beside ppo_clip"])
def test_a_teacher_pulls_at_every_trained_token_at_its_temperature(
    topology: Topology, answers: tuple[Answer, ...], alone: bool
) -> None:
    def whole(z: Logits) -> float:
        pull = mean(answers, z, lambda i, now, drawn, referred, answer: to_teacher(z, answer.temperature))
        return pull if alone else policy_loss(answers, worth, z) + 0.5 * pull

    worth = group_std(answers)
    keys: dict[str, Any] = {"loss": "topk_kl", "advantage": "reward"} if alone else {"teacher_coef": 0.5}
    told = trained(topology, answers, whole, teacher_k=3, **keys)
    assert told.loss == pytest.approx(whole(NOW), abs=1e-6)
    assert told.diagnostics.teacher_kl == pytest.approx(
        mean(answers, NOW, lambda i, now, drawn, referred, answer: to_teacher(NOW, answer.temperature)), abs=1e-6)


@world
@pytest.mark.parametrize("kind", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum",
                                  "seq-mean-token-sum-norm", "prompt-mean"])
def test_an_aggregation_counts_trained_tokens_and_answers_that_have_one(
    topology: Topology, answers: tuple[Answer, ...], kind: str
) -> None:
    worth, counts = group_std(answers), [sum(answer.trained) for answer in answers]
    of_group = {
        group: sum(sum(answer.trained) for answer in answers if answer.group == group)
        for group in {answer.group for answer in answers}
    }

    def whole(z: Logits) -> float:
        share = {
            "token-mean": lambda i, answer: 1 / sum(counts),
            "prompt-mean": lambda i, answer: 1 / of_group[answer.group] / 2,
            "seq-mean-token-mean": lambda i, answer: 1 / counts[i] / samples,
            "seq-mean-token-sum": lambda i, answer: 1 / samples,
            "seq-mean-token-sum-norm": lambda i, answer: 1 / 7 / samples,
        }[kind]
        samples = sum(count > 0 for count in counts)
        return sum(clipped(math.exp(now - drawn), worth[i]) * share(i, answer)
                   for i, _, now, drawn, _, answer in tokens(answers, z))

    trained(topology, answers, whole, aggregation=kind, length_norm=7)


# -- advantages ---------------------------------------------------------------------

# Of three segments the last one is trained: two tokens of each, where the answers have two to five.
LAST = (
    Answer(0, 1.0, (2, 5, 3, 2, 1), (F, F, F, T, T), segments=(1, 2, 2)), Answer(0, 0.0, (4, 1), (T, T)),
    Answer(0, 0.25, (5, 4, 3, 1), (F, F, T, T), segments=(2, 2)), Answer(1, 0.5, (3, 1), (T, T), 1.3),
    Answer(1, 1.0, (2, 2, 1), (F, T, T), 1.3, segments=(1, 2)),
)


def whitened(answers: Sequence[Answer]) -> list[float]:
    """(R - m) / sqrt(v + 1e-8), m and v over trained tokens, each with the reward of its answer."""
    every = [answer.reward for answer in answers for trained in answer.trained if trained]
    mean, spread = statistics.mean(every), math.sqrt(statistics.variance(every) + 1e-8)
    return [(answer.reward - mean) / spread for answer in answers]


@pytest.mark.parametrize("name", [*WORLDS, "last segment"])
def test_batch_whiten_has_mean_and_variance_of_trained_tokens_alone(topology: Topology, name: str) -> None:
    answers = WORLDS.get(name, LAST)
    if name == "last segment":
        segments = dataclasses.replace(topology.segments, loss="last_segment")
        topology = dataclasses.replace(topology, segments=segments)
    worth = whitened(answers)
    trained(topology, answers, lambda z: policy_loss(answers, worth, z), advantage="batch_whiten")


def test_batch_whiten_of_an_all_cut_step_is_skipped_without_losing_numbers(topology: Topology) -> None:
    answers = [dataclasses.replace(answer, cut=True, trained=(F,) * len(answer.tokens)) for answer in PLAIN]
    step = Watched(with_keys(topology, advantage="batch_whiten"))
    assert step.train(records(answers), 2, STEP).skipped == "no trained token" and not step.seen
    assert all(math.isfinite(float(answer)) for answer in step.advantages.per_sample(records(answers)))


@pytest.mark.parametrize("kind", ["group_mean", "leave_one_out", "mean_normalised", "batch_std", "reward"])
def test_an_advantage_counts_the_rewards_of_answers_that_are_not_trained(topology: Topology, kind: str) -> None:
    means = {
        group: statistics.mean(answer.reward for answer in MASKED if answer.group == group)
        for group in {answer.group for answer in MASKED}
    }
    sizes = {0: 3, 1: 2}
    centred = [answer.reward - means[answer.group] for answer in MASKED]
    worth = {
        "group_mean": centred, "reward": [answer.reward for answer in MASKED],
        "leave_one_out": [
            value * sizes[answer.group] / (sizes[answer.group] - 1) for value, answer in zip(centred, MASKED)
        ],
        "mean_normalised": [value / means[answer.group] for value, answer in zip(centred, MASKED)],
        "batch_std": [value / (statistics.stdev(centred) + 1e-6) for value in centred],
    }[kind]
    trained(topology, MASKED, lambda z: policy_loss(MASKED, worth, z), advantage=kind)


# -- a value head -------------------------------------------------------------------

HEAD, BIAS = (0.2, -0.1, 0.3, 0.05, -0.2, 0.1), 0.15


class Valued(Watched):
    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        assert self.trainer.value_head is not None
        line = self.trainer.value_head.line
        with torch.no_grad():
            line.weight.copy_(torch.tensor([[*HEAD, 0.0, 0.0]]))
            line.bias.fill_(BIAS)
        self.of_head: list[list[float]] = []
        self.trainer.value_head.optimizer.register_step_pre_hook(
            lambda *_: self.of_head.append([*line.weight.grad[0, :6].tolist(), float(line.bias.grad)]))


def value_of(z: Logits) -> float:
    """Alike before every token, for it reads the last hidden state, which is z."""
    return sum(w * logit for w, logit in zip(HEAD, z, strict=True)) + BIAS


def gae_by_hand(rewards: Sequence[float], value: float, gamma: float, decay: float) -> list[float]:
    errors = [r + gamma * (value if t + 1 < len(rewards) else 0.0) - value for t, r in enumerate(rewards)]
    return [sum((gamma * decay) ** k * error for k, error in enumerate(errors[t:])) for t in range(len(errors))]


@world
@pytest.mark.parametrize(("whiten", "kl", "aggregation"), [
    (True, "none", "token-mean"), (False, "none", "seq-mean-token-mean"), (True, "k3", "seq-mean-token-mean"),
    (False, "k3", "token-mean"),
])
def test_value_head_advantages_and_returns_and_losses_match_hand_values(
    topology: Topology, answers: tuple[Answer, ...], whiten: bool, kl: str, aggregation: str
) -> None:
    value = dataclasses.replace(
        topology.learner.value, gamma=0.9, decay=0.8, decay_of_values=0.95, coef=0.25, clip=0.5, whiten=whiten)
    keys: dict[str, Any] = {"kl": kl, "kl_coef": 0.3, "kl_in": "reward"} if kl != "none" else {}
    step = Valued(with_keys(topology, advantage="gae", value=value, aggregation=aggregation, **keys))
    told = step.train(records(answers), 2, STEP)
    v = value_of(NOW)
    worth, returns = [], []
    for answer in answers:
        paid = [0.3 * KL["k3"](d, r) * trained if keys else 0.0 for d, r, trained in
                zip(answer.logs(OLD), answer.logs(REFERENCE), answer.ours, strict=True)]
        rewards = [answer.reward * (t == len(paid) - 1) - cost for t, cost in enumerate(paid)]
        worth.append(gae_by_hand(rewards, v, 0.9, 0.8))
        returns.append([v + advantage for advantage in gae_by_hand(rewards, v, 0.9, 0.95)])
    if whiten:
        every = [worth[i][place] for i, place, *_ in tokens(answers, NOW)]
        centre, spread = statistics.mean(every), math.sqrt(statistics.variance(every) + 1e-8)
        worth = [[(value - centre) / spread for value in row] for row in worth]

    counts = [sum(answer.trained) for answer in answers]
    samples = sum(count > 0 for count in counts)
    share = [1 / sum(counts) if aggregation == "token-mean" else 1 / max(count, 1) / samples for count in counts]

    def of_policy(z: Logits) -> float:
        return sum(share[i] * clipped(math.exp(now - drawn), worth[i][t])
                   for i, t, now, drawn, *_ in tokens(answers, z))

    def of_value(z: Logits) -> float:  # at the value before the step the clip does not bind
        return sum(share[i] * (value_of(z) - returns[i][t]) ** 2 / 2 for i, t, *_ in tokens(answers, z))

    [(_, gradient)], [of_head] = step.seen, step.of_head
    both = zip(slope(of_policy, NOW), slope(of_value, NOW), strict=True)
    assert gradient == pytest.approx([a + 0.25 * b for a, b in both], abs=3e-6)
    error = sum(share[i] * (v - returns[i][t]) for i, t, *_ in tokens(answers, NOW))
    assert of_head == pytest.approx([error * logit for logit in (*NOW, 1.0)], abs=3e-6)
    known = [returns[i][t] for i, t, *_ in tokens(answers, NOW)]
    value_loss = statistics.mean((v - target) ** 2 / 2 for target in known)
    assert told.diagnostics.value_loss == pytest.approx(value_loss, abs=1e-6)
    # One value for all tokens explains nothing of what they returned.
    assert told.diagnostics.explained_variance == pytest.approx(0.0, abs=1e-5)


def test_beyond_its_clip_a_value_has_no_gradient_in_a_second_pass(topology: Topology) -> None:
    """The first update moves the value by far more than the clip, towards the returns: the clipped error is larger."""
    value = dataclasses.replace(topology.learner.value, coef=0.0, clip=0.01, rate=10.0, whiten=False)
    step = Valued(with_keys(topology, advantage="gae", value=value, passes_per_batch=2, lr=0.005))
    step.train(records([dataclasses.replace(answer, reward=9.0) for answer in PLAIN]), 2, STEP)
    first, second = step.of_head
    assert max(map(abs, first)) > 1.0 and max(map(abs, second)) == 0.0


# -- which ratio --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["recorded", "one"])
def test_tokens_of_the_current_weights_use_the_recorded_ratio_or_exactly_one(
    topology: Topology, kind: str
) -> None:
    weights = dataclasses.replace(topology.weights, max_staleness=2 * STEP)
    answers = [dataclasses.replace(MASKED[0], trained=(T, T, T)), *MASKED[1:]]  # no token is too old
    worth, kept = group_std(answers), dataclasses.replace(topology, weights=weights)
    drawn_by_them = [(i, t) for i, t, *_, answer in tokens(answers, NOW) if t >= answer.old]
    base = {(i, t): now if kind == "one" and (i, t) in drawn_by_them else drawn
            for i, t, now, drawn, *_ in tokens(answers, NOW)}

    def whole(z: Logits) -> float:
        losses = [clipped(math.exp(now - base[i, t]), worth[i]) for i, t, now, *_ in tokens(answers, z)]
        return sum(losses) / len(losses)

    told = trained(kept, answers, whole, newest_ratio=kind)
    gaps = [abs(now - drawn) for i, t, now, drawn, *_ in tokens(answers, NOW) if (i, t) in drawn_by_them]
    assert len(gaps) + 1 == told.tokens
    assert told.diagnostics.mismatch == pytest.approx(statistics.mean(gaps), abs=1e-6), "against what the engine told"


def test_a_step_of_the_log_is_the_step_of_these_numbers(topology: Topology) -> None:
    keys = {"kl": "k2", "kl_coef": 0.3, "kl_in": "reward", "advantage": "batch_whiten", "entropy_coef": 0.1}
    live, again = (Watched(with_keys(topology, **keys)) for _ in range(2))
    live.train(records(MASKED), 2, STEP)
    again.replay(Record(step=STEP + 1, version=STEP, cause="count", groups=[0, 1], samples=records(MASKED)))
    assert live.seen[0][1] == pytest.approx(again.seen[0][1], abs=1e-7)
