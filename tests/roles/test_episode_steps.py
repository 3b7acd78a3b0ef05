"""A step of episodes of several turns and sequences against a plain loop over them, one sequence at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from busrl.ledger.wal import Record, SampleRecord
from busrl.preflight.load import load
from busrl.roles.learner.samples import StaleTokenMask, to_sample
from busrl.roles.learner.step import TrainingStep
from busrl.topology import Topology
from busrl.training.batch import Worth

ROOT = Path(__file__).resolve().parents[2]
SHIFTED = 1.05  # the weights that are trained, over those of the folder
LOW, HIGH, DUAL = 0.2, 0.28, 3.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        intermediate_size=48, max_position_embeddings=64, eos_token_id=1, tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def topology(folder: Path, **keys: object) -> Topology:
    base = load(ROOT / "configs" / "quickstart.toml")
    learner = dataclasses.replace(base.learner, max_grad_norm=1e6, **keys)  # type: ignore[arg-type]
    return dataclasses.replace(base, model=dataclasses.replace(base.model, path=str(folder)), learner=learner)


def episode(member: int, group: int, turns: Sequence[tuple[int, int, int, int]], seqs: Sequence[int],
            rewards: Sequence[float] = (), final: float | None = None) -> SampleRecord:
    """With ids, log-probabilities and a last reward that are its own; `turns` as in the log."""
    chance = np.random.default_rng(97 * group + member)
    count = sum(end - begin for _, begin, end, _ in turns)
    last = float(chance.normal()) if final is None else final
    return SampleRecord(
        uid=group * 8 + member, group=group, admission=group, member=member, attempt=0, prompt_crc=0,
        reward=last + sum(rewards), temperature=1.0, version=0, step=0, finish=1, prompt_ids=b"",
        token_ids=chance.integers(2, 16, sum(seqs)).astype("<i4").tobytes(),
        logprobs=(-chance.random(count) - 2.3).astype("<f4").tobytes(), versions=np.zeros(count, "<u4").tobytes(),
        seqs=list(seqs), turns=[number for turn in turns for number in turn], turn_rewards=list(rewards),
    )


THREE_IN_TWO = ((0, 3, 6, 1), (0, 9, 11, 5), (1, 7, 12, 3))  # calls 0, 2 and 1: the last sequence was forked


def batch() -> list[SampleRecord]:
    """Two groups: episodes of 3 turns in 2 sequences, of 2 turns in one, an answer, and one with a turn that is not
    trained."""
    made = []
    for group in range(2):
        made += [
            episode(0, group, THREE_IN_TWO, (13, 12), (0.5, 0.25, -1.0)),
            episode(1, group, ((0, 2, 5, 1), (0, 6, 9, 3)), (9,)),
            msgspec.structs.replace(one_answer(2, group), reward=0.75),
            episode(3, group, ((0, 4, 6, 1), (0, 8, 10, 2), (1, 1, 4, 5)), (10, 6), (0.0, 0.5, 0.0)),
        ]
    return made


def one_answer(member: int, group: int) -> SampleRecord:
    found = episode(member, group, ((0, 4, 10, 1),), (10,))
    ids = found.token_ids
    return msgspec.structs.replace(found, prompt_ids=ids[:16], token_ids=ids[16:], seqs=[], turns=[])


# -- the plain loop ---------------------------------------


def plain_turns(model: torch.nn.Module, record: SampleRecord) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each turn that is trained the log-probabilities of its tokens, of these weights and as recorded."""
    ids = [*record.prompt_array().tolist(), *record.token_array().tolist()]
    seqs, turns = record.seqs or [len(ids)], record.turn_array().tolist()
    recorded, at, found = record.logprob_array(), 0, []
    for sequence, begin, end, mark in turns:
        first = sum(seqs[:sequence])
        own = torch.tensor(ids[first : first + seqs[sequence]])
        logits = model(input_ids=own[None]).logits[0]
        logs = torch.stack([torch.log_softmax(logits[t - 1], -1)[own[t]] for t in range(begin, end)])
        if mark % 2:
            found.append((logs, torch.tensor(recorded[at : at + end - begin].astype(np.float64))))
        at += end - begin
    return found


def plain_losses(loss: str, turns: list[tuple[torch.Tensor, torch.Tensor]], worth: list[float],
                 by_turn: bool) -> list[torch.Tensor]:
    """The loss of each token, turn by turn."""
    logs = [now - before for now, before in turns]
    if loss == "gspo":
        whole = torch.cat(logs).mean()
        logs = [(one.mean() if by_turn else whole).expand(len(one)) for one in logs]
    found = []
    for one, advantage in zip(logs, worth, strict=True):
        ratio = one.exp()
        value = torch.maximum(-ratio * advantage, -ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
        if loss == "ppo_clip" and advantage < 0:
            value = torch.minimum(value, torch.tensor(-DUAL * advantage, dtype=value.dtype))
        found.append(value)
    return found


def plain_step(folder: Path, samples: list[SampleRecord], worths: list[list[float]], loss: str, aggregation: str,
               by_turn: bool) -> tuple[float, torch.Tensor]:
    """Loss and gradient; `worths` of the trained turns of each sample."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(SHIFTED)
    total, divisor = torch.zeros((), dtype=torch.float64), 0.0
    for record, worth in zip(samples, worths, strict=True):
        turns = plain_losses(loss, plain_turns(model, record), worth, by_turn)
        units = turns if by_turn else [torch.cat(turns)]
        if aggregation == "token-mean":
            total, divisor = total + torch.cat(turns).sum(), divisor + sum(map(len, turns))
        else:
            total, divisor = total + sum(unit.mean() for unit in units), divisor + len(units)
    value = total / divisor
    value.backward()
    return float(value.detach()), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def group_std(samples: list[SampleRecord]) -> list[float]:
    found = []
    for group in range(2):
        rewards = np.array([one.reward for one in samples if one.group == group])
        found += ((rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)).tolist()
    return found


class Watched(TrainingStep):
    """Keeps the gradient that the optimiser got, of weights moved off those of the folder."""

    def __init__(self, settings: Topology) -> None:
        super().__init__(settings)
        with torch.no_grad():
            for parameter in self.trainer.parameters:
                parameter.mul_(SHIFTED)
        self.gradient = torch.empty(0)
        self.trainer.optimizer.register_step_pre_hook(lambda *_: self._keep())

    def _keep(self) -> None:
        named = self.trainer.trained_tensors()
        order = [name for name, _ in self.trainer.model.named_parameters()]
        self.gradient = torch.cat([named[name].grad.flatten().double() for name in order])


BOUNDS = {"clip_low": LOW, "clip_high": HIGH}


@pytest.mark.parametrize("budget", [10, 1000])
@pytest.mark.parametrize(("loss", "aggregation", "unit"), [
    ("ppo_clip", "token-mean", "episode"), ("ppo_clip", "seq-mean-token-mean", "episode"),
    ("gspo", "seq-mean-token-mean", "episode"), ("gspo", "seq-mean-token-mean", "turn"),
    ("ppo_clip", "seq-mean-token-mean", "turn"), ("gspo", "token-mean", "episode"),
])
def test_episode_loss_and_gradient_match_a_plain_loop_over_sequences(
    folder: Path, loss: str, aggregation: str, unit: str, budget: int
) -> None:
    samples = batch()
    worths = [[one] * int((record.turn_array()[:, 3] % 2).sum()) for one, record in zip(group_std(samples), samples)]
    value, gradient = plain_step(folder, samples, worths, loss, aggregation, unit == "turn")
    step = Watched(topology(folder, loss=loss, aggregation=aggregation, unit=unit, micro_batch_tokens=budget, **BOUNDS))
    stats = step.train(samples, 2, None)
    assert stats.loss == pytest.approx(value, abs=1e-5)
    assert float((step.gradient - gradient).norm() / gradient.norm()) < 1e-5
    assert stats.tokens == sum(int(turn[2] - turn[1]) for one in samples for turn in one.turn_array() if turn[3] % 2)
    assert (stats.context_tokens, stats.sequences) == (4, 8)


def test_turn_credit_compares_each_turn_with_others_at_the_same_turn(folder: Path) -> None:
    samples, gamma = batch(), 0.9
    worths = []
    for group in range(2):
        own = [one for one in samples if one.group == group]
        finals = [one.reward - sum(one.turn_rewards) for one in own]
        # In the order of the calls: the second turn in the log of the first episode is its last call.
        steps = [[0.5, -1.0, 0.25 + finals[0]], [0.0, finals[1]], [finals[2]], [0.0, 0.5, finals[3]]]
        returns = [[sum(r * gamma**k for k, r in enumerate(row[t:])) for t in range(len(row))] for row in steps]
        spread = np.std([sum(row) for row in steps], ddof=1) + 1e-6
        others = [[sum(r[t] for j, r in enumerate(returns) if j != i and t < len(r)) / 3 for t in range(len(row))]
                  for i, row in enumerate(steps)]
        worth = [[(a - b) / spread for a, b in zip(*both)] for both in zip(returns, others)]
        # As the log has the turns; of the last episode the turn in the middle is not trained.
        worths += [[worth[0][0], worth[0][2], worth[0][1]], worth[1], worth[2], [worth[3][0], worth[3][2]]]
    value, gradient = plain_step(folder, samples, worths, "ppo_clip", "token-mean", False)
    step = Watched(topology(folder, credit="turn", gamma=gamma, **BOUNDS))
    assert step.train(samples, 2, None).loss == pytest.approx(value, abs=1e-5)
    assert float((step.gradient - gradient).norm() / gradient.norm()) < 1e-5


def test_a_turn_with_a_key_is_compared_with_others_at_that_key(folder: Path) -> None:
    samples = batch()
    keys = (["plan", "code", ""], ["code", "plan"], [], ["plan", "rare", "code"])  # as the log has the turns
    named = [msgspec.structs.replace(one, keys=keys[one.member]) for one in samples]
    step = Watched(topology(folder, credit="turn", advantage="group_mean"))
    plain, worth = step.advantages.per_sample(samples), step.advantages.per_sample(named)
    for group in range(2):
        finals = [one.reward - sum(one.turn_rewards) for one in samples[4 * group : 4 * group + 4]]
        # What came of each turn with that key, by episode; in the log of the first the third turn was the second call.
        plans = {0: 0.5 - 1.0 + 0.25 + finals[0], 1: finals[1], 3: 0.5 + finals[3]}
        codes = {0: 0.25 + finals[0], 1: finals[1], 3: finals[3]}
        for returns, places in ((plans, {0: 0, 1: 1, 3: 0}), (codes, {0: 1, 1: 0, 3: 2})):
            for member, place in places.items():
                others = [value for other, value in returns.items() if other != member]
                value = np.atleast_1d(worth[4 * group + member])[place]
                assert value == pytest.approx(returns[member] - sum(others) / 2)
        for member, place in ((0, 2), (2, 0), (3, 1)):  # without a key, or with one that no other episode has
            pair = (np.atleast_1d(both[4 * group + member])[place] for both in (worth, plain))
            assert len(set(pair)) == 1


@pytest.mark.parametrize("credit", ["episode", "turn"])
def test_a_step_of_episodes_is_the_same_streamed_and_from_the_log(folder: Path, credit: str) -> None:
    samples = batch()
    settings = topology(folder, credit=credit, unit="turn", loss="gspo", aggregation="seq-mean-token-mean")
    whole, parts, replayed = (Watched(settings) for _ in range(3))
    whole.train(samples, 2, None)
    parts.accumulate(samples[4:], None)
    parts.accumulate(samples[:4], None)
    parts.finish(2)
    logged = Record(step=1, version=0, cause="count", groups=[0, 1], samples=samples)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(logged), type=Record)
    replayed.replay(again)
    for other in (parts, replayed):
        assert float((whole.gradient - other.gradient).norm() / whole.gradient.norm()) < 1e-6


def test_an_episode_of_one_turn_trains_exactly_like_its_answer(folder: Path) -> None:
    answers = [one_answer(member, group) for group in range(2) for member in range(4)]
    episodes = [
        msgspec.structs.replace(one, prompt_ids=b"", token_ids=one.prompt_ids + one.token_ids, seqs=[10],
                                turns=[0, 4, 10, 1])
        for one in answers
    ]
    made = [Watched(topology(folder, deterministic=True)) for _ in range(2)]
    stats = [step.train(samples, 2, 0) for step, samples in zip(made, (answers, episodes), strict=True)]
    assert stats[0].loss == stats[1].loss and torch.equal(made[0].gradient, made[1].gradient)
    assert stats[0].diagnostics == stats[1].diagnostics


def test_what_tools_said_and_what_is_not_trained_has_no_gradient(folder: Path) -> None:
    """Other log-probabilities and versions of a turn that is not trained are the same step; so is no loss of a token
    between turns, whose id is only read."""
    samples = batch()
    recorded = samples[3].logprob_array().copy()
    recorded[2:4] = -20.0
    other = msgspec.structs.replace(samples[3], logprobs=recorded.tobytes())
    one, two = (Watched(topology(folder)) for _ in range(2))
    one.train(samples, 2, None)
    two.train([*samples[:3], other, *samples[4:]], 2, None)
    assert torch.equal(one.gradient, two.gradient)


def test_overly_old_tokens_are_left_out_turn_by_turn() -> None:
    old = StaleTokenMask(2)
    for version in range(8):
        old.at(version, version)
    record = msgspec.structs.replace(
        episode(0, 0, ((0, 3, 6, 1), (0, 7, 9, 2), (1, 2, 5, 5)), (9, 5)),
        versions=np.array([4, 5, 6, 1, 1, 6, 4, 7], "<u4").tobytes(), step=1,
    )
    assert old.leading(record) == [1, 0, 2], "the turn in the middle is not trained anyway"
    assert old.taken() == 3
    made = to_sample(record, skipped=old.count(record))
    assert made.mask().tolist() == [False, True, True, False, False, False, False, True]
    assert (made.generated, made.trained, made.trained_of_turns().tolist()) == (8, 3, [2, 0, 1])


def test_an_episode_of_which_nothing_is_trained_counts_for_its_group_alone(folder: Path) -> None:
    samples = batch()
    record = msgspec.structs.replace(samples[1], turns=[0, 2, 5, 0, 0, 6, 9, 2])
    step = Watched(topology(folder))
    stats = step.train([samples[0], record, *samples[2:]], 2, None)
    assert stats.sequences == 7 and stats.context_tokens == 4 + 6 and not stats.skipped
    worth: list[Worth] = [*step.advantages.per_sample([samples[0], record, *samples[2:]])]
    assert worth == pytest.approx(group_std(samples))
