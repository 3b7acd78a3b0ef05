"""What a team of ranks can be asked for beside its defaults, against one rank. A process has one group at a time, so
each test makes its own team."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from teacher_server import serving

from busrl.algorithms import gae
from busrl.errors import FunctionRefused, RankFailed, RankLost, UserError
from busrl.quickstart import maker, task
from busrl.ranks import wire
from busrl.ranks.builder import TrainerBuilder
from busrl.teachers import several
from busrl.training import checkpoint, optimizers
from busrl.training.batch import Sample, flatten, rounds_of
from busrl.training.forward import Forward, choose_forward
from busrl.training.model import Adapter, LoraSettings, load, vocabulary
from busrl.training.scorer import Advantages, Reference
from busrl.training.settings import TrainerSettings
from busrl.training.trainer import QUIET, Trainer
from tests.training.test_team import SETTINGS, TEACHER_K, a_step, assert_same_steps, assert_same_weights, team_of


@pytest.mark.slow
@pytest.mark.parametrize("name, options, tensor", [
    ("torch.optim:SGD", {"momentum": 0.9}, 1), ("adamw8bit", {}, 1), ("adamw8bit", {}, 2), ("adafactor", {}, 1),
    ("adafactor", {}, 2),
])
def test_another_optimiser_over_parts_goes_on_with_other_numbers_of_ranks(
    name: str, options: dict[str, Any], tensor: int, lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight bits are by blocks of a part: those of two ranks are others than those of one, a little."""
    eight = name == "adamw8bit"
    if eight:
        pytest.importorskip("bitsandbytes")
        monkeypatch.setattr(optimizers, "SMALL", 256)
        monkeypatch.setenv("SMALL", "256")
    more, limit = {**SETTINGS, "optimizer": name, "options": options}, {"atol": 1e-2 if eight else 1e-5, "rtol": 1e-4}
    settings = TrainerSettings(**more)
    one = lab.trainer("qwen3", double=False, **more)
    with team_of(tmp_path, tensor=tensor, **more) as team:
        trainer = team.trainer(lab.folder("qwen3"), settings)
        for seed in range(3):
            a_step(trainer, lab, seed)
            a_step(one, lab, seed)
        states = getattr(trainer.optimizer, "inner", trainer.optimizer).state.values()
        kinds = {str(value.dtype) for state in states for value in state.values()
                 if isinstance(value, torch.Tensor) and value.ndim == 2}
        assert kinds == {"torch.uint8" if eight else "torch.float32"}
        for tensor, expected in zip(trainer.named_weights().values(), one.named_weights().values(), strict=True):
            torch.testing.assert_close(tensor, expected, **limit)
        saved = [
            checkpoint.save(tmp_path / f"of{number}", 3, model=each.model, optimizer_state=each.optimizer_state(),
                            meta={}, weights=each.named_weights(), source=lab.folder("qwen3"))
            for number, each in enumerate((one, trainer))
        ]
        a_step(one, lab, 3)
        for found in saved:  # of one rank, and of two
            for again in (team.trainer(found.model, settings), Trainer(load(found.model), settings)):
                assert again.restore(found) == []
                a_step(again, lab, 3)
                for tensor, expected in zip(again.named_weights().values(), one.named_weights().values(), strict=True):
                    torch.testing.assert_close(tensor, expected, **limit)


def test_an_optimiser_of_whole_matrices_is_refused_over_parts(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import torch\n\n\nclass Whole(torch.optim.SGD):\n    def step(self):\n"
        "        for group in self.param_groups:\n"
        "            for one in group['params']:\n                one.grad /= one.grad.norm()\n        super().step()\n"
    )
    with pytest.raises(FunctionRefused, match="updates a part of a matrix in another way than the whole"):
        adam = {"weight_decay": 0.0, "betas": (0.9, 0.99), "eps": 1e-8}
        optimizers.require_elementwise(f"{file}:Whole", adam, {}, ".")
    optimizers.require_elementwise("torch.optim:RMSprop", {}, {"alpha": 0.9}, ".")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch hides it where it compiles
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_compiled_layers_over_ranks_train_as_those_of_one_that_compiles_none(
    checkpointing: str, lab: Any, tmp_path: Path
) -> None:
    import torch._dynamo as dynamo

    more = {**SETTINGS, "activation_checkpointing": checkpointing}
    one = lab.trainer("qwen3", double=False, **more)
    with team_of(tmp_path, collective_s=300, **more, compile=True) as team:
        trainer = team.trainer(lab.folder("qwen3"), TrainerSettings(**more, compile=True))
        graphs = dynamo.utils.counters["stats"]["unique_graphs"]
        for seed in range(4):
            assert_same_steps([a_step(trainer, lab, seed)], [a_step(one, lab, seed)])
        assert graphs and dynamo.utils.counters["stats"]["unique_graphs"] == graphs, "compiled again while it trained"
        for tensor, expected in zip(trainer.named_weights().values(), one.named_weights().values(), strict=True):
            torch.testing.assert_close(tensor, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_a_team_along_the_tensor_axis_works_as_one_rank(
    lab: Any, tmp_path: Path
) -> None:
    with team_of(tmp_path, tensor=2, refers=True, kl="k3", kl_coef=0.1) as team:
        settings = {**SETTINGS, "kl": "k3", "kl_coef": 0.1}
        trainer = team.trainer(lab.folder("qwen3"), TrainerSettings(**settings))
        one = lab.trainer("qwen3", double=False, **SETTINGS)
        probe = lab.samples(seed=9)
        actual = (trainer.score(probe), one.score(probe), trainer.score(probe, "reference"))
        for mine, other, third in zip(*actual, strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-5)
            np.testing.assert_allclose(mine, third, atol=1e-6)
        first = a_step(trainer, lab, 0, 4)
        expected = a_step(one, lab, 0, 4)
        assert (first.tokens, first.sequences) == (expected.tokens, expected.sequences)
        assert first.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5), "the KL to itself has no gradient yet"
        assert_same_weights(trainer.named_weights(), one.named_weights())
        samples = lab.samples()
        worth = lab.advantages(len(samples))
        worth[3] = float("nan")
        trainer.accumulate(samples, worth)
        assert trainer.step(1e-2).culprits == ("sample 3",)
        (process,) = team.processes
        process.kill()
        process.wait()
        with pytest.raises(RankLost, match=rf"rank 1 \(pid {process.pid}\)"):
            a_step(trainer, lab, 1)


# -- an adapter, and a reference -----------------------------------------------------------------------------------

KL = {"kl": "k3", "kl_coef": 0.3}


def adapted(lab: Any, lora: LoraSettings | None, reference: Path | None, more: dict[str, Any]) -> Trainer:
    """What the learner makes of one rank."""
    model = load(lab.folder("qwen3"))
    adapter = Adapter(model, lora) if lora is not None else None
    second = None if reference is None else choose_forward(load(reference))

    def refer(forward: Forward, loss: object) -> Reference | None:
        if adapter is not None and second is None and more.get("kl"):
            return adapter.base_alone(forward.score)
        return None if second is None else lambda samples, flat: second.score(samples, flat)[0]

    return Trainer(model, TrainerSettings(**more), adapter=adapter, refer=refer)


def changed(lab: Any, folder: Path) -> Path:
    """A model of the same architecture with other weights."""
    model = load(lab.folder("qwen3"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.8)
    model.save_pretrained(str(folder))
    return folder


SLOW = ("adapter", "adapter and its base in columns", "reference")


@pytest.mark.long
@pytest.mark.parametrize("kind", [
    "adapter and its base", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW),
])
def test_an_adapter_and_a_reference_over_ranks_are_those_of_one(kind: str, lab: Any, tmp_path: Path) -> None:
    lora = LoraSettings(4, 2.0, ("q_proj", "down_proj"), seed=5) if kind != "reference" else None
    reference = changed(lab, tmp_path / "reference") if kind == "reference" else None
    more = {**SETTINGS, **({} if kind == "adapter" else KL)}
    one = adapted(lab, lora, reference, more)
    tensor = 2 if "columns" in kind else 1
    with team_of(tmp_path, lora=lora, refers=kind != "adapter", reference=reference, tensor=tensor, **more) as team:
        trainer = team.trainer(lab.folder("qwen3"), TrainerSettings(**more))
        assert_same_weights(trainer.named_weights(), dict(one.named_weights()))
        assert_same_steps([a_step(trainer, lab, seed, 4) for seed in range(4)],
                          [a_step(one, lab, seed, 4) for seed in range(4)])
        single = lab.samples(groups=1, members=1)  # one rank has nothing to do
        for each in (trainer, one):
            each.accumulate(single, [1.0])
        assert_same_steps([trainer.step(1e-2)], [one.step(1e-2)])
        assert_same_weights(trainer.named_weights(), dict(one.named_weights()))
        if one.scorer.reference is not None:
            probe = lab.samples(seed=9)
            for row, other in zip(trainer.score(probe, "reference"), one.score(probe, "reference"), strict=True):
                np.testing.assert_allclose(row, other, atol=1e-5)
            assert len(trainer.score(single, "reference")) == 1
        if lora is None:
            return
        own = dict(trainer.adapter_weights())
        assert_same_weights(own, dict(one.adapter.tensors()))
        assert {value.ndim for value in own.values()} == {2} and any(bool(value.ne(0).any()) for value in own.values())
        trainer.adapter.write(tmp_path / "adapter", own)
        state = copy.deepcopy(trainer.optimizer_state())
        after = [a_step(trainer, lab, seed) for seed in (5, 6)]
        again = team.trainer(lab.folder("qwen3"), TrainerSettings(**more))
        again.load_adapter(tmp_path / "adapter")
        assert_same_weights(again.named_weights(), dict(one.named_weights()))
        alone = adapted(lab, lora, reference, more)
        alone.load_adapter(tmp_path / "adapter")
        alone.load_optimizer_state(state)
        assert_same_steps([a_step(alone, lab, seed) for seed in (5, 6)], after)


def test_reference_and_teacher_of_a_rank_have_the_draws_temperature(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rank makes of its second model, which is whole here: as transformers alone gives its logits."""
    folder = changed(lab, tmp_path / "second")
    monkeypatch.setattr(TrainerBuilder, "_other", lambda self, where: choose_forward(load(where)))
    team = SimpleNamespace(refers=True, reference=folder, taught=True, teacher=folder, teacher_k=TEACHER_K,
                           teachers=None)
    builder, model, plain = TrainerBuilder(TrainerSettings(), team, None), lab.model(double=False), load(folder)
    samples = lab.samples(groups=1, members=3, temperatures=(0.7,))
    flat = flatten(samples, torch.float32, torch.device("cpu"))
    every = [np.concatenate([sample.prompt_ids, sample.token_ids])[None].astype(np.int64) for sample in samples]
    rows = [plain(torch.from_numpy(ids)).logits[0, len(sample.prompt_ids) - 1 : -1].detach()
            for ids, sample in zip(every, samples, strict=True)]
    expected = torch.log_softmax(torch.cat(rows) / 0.7, -1)
    referred = builder.reference(None, None, None, model)(samples, flat)
    assert torch.allclose(referred.detach(), expected.gather(-1, flat.targets[:, None])[:, 0], atol=1e-5)
    ids, best = builder.teacher(None, None, model, QUIET)(samples, flat)
    assert torch.allclose(best, expected.gather(-1, ids), atol=1e-5)
    assert torch.allclose(best, expected.topk(TEACHER_K, -1).values, atol=1e-5)


@pytest.mark.slow
def test_a_reference_with_another_vocabulary_is_refused_by_every_rank(lab: Any, tmp_path: Path) -> None:
    model = load(lab.folder("qwen3"))
    model.resize_token_embeddings(31)
    model.save_pretrained(str(tmp_path / "other"))
    said, more = "its vocabulary has 31 tokens, that of the trained model 23", {**SETTINGS, **KL}
    made = team_of(tmp_path, refers=True, reference=tmp_path / "other", **more)
    with made as team, pytest.raises(UserError, match=said):
        team.trainer(lab.folder("qwen3"), TrainerSettings(**more))


def a_step_with_values(trainer: Any, lab: Any, seed: int) -> Any:
    samples = lab.samples(groups=2 + seed % 2, seed=seed)
    before = [row.astype(np.float64) for row in trainer.score(samples, "value")]
    rewards = [np.append(np.zeros(len(row) - 1), float(i % 2)) for i, row in enumerate(before)]
    valued = gae.estimated(rewards, before, 1.0, 0.95, 1.0)
    for part in (slice(0, 3), slice(3, None)):
        trainer.accumulate(samples[part], Advantages([0.0] * len(samples[part]), valued=valued[part]), 4)
    return trainer.step(1e-2)


@pytest.mark.long
@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_value_head_over_ranks_is_that_of_one(tensor: int, lab: Any, tmp_path: Path) -> None:
    more = {**SETTINGS, "loss": "ppo_clip", "value": gae.ValueSettings(coef=0.5)}
    one, settings = lab.trainer("qwen3", double=False, **more), TrainerSettings(**more)
    with team_of(tmp_path, tensor=tensor, **more) as team:
        trainer = team.trainer(lab.folder("qwen3"), settings)
        assert_same_steps([a_step_with_values(trainer, lab, seed) for seed in range(3)],
                          [a_step_with_values(one, lab, seed) for seed in range(3)])
        single = lab.samples(groups=1, members=1)  # one rank has nothing to do
        for samples in (single, lab.samples(seed=9)):
            for row, other in zip(trainer.score(samples, "value"), one.score(samples, "value"), strict=True):
                np.testing.assert_allclose(row, other, atol=1e-5)
        assert_same_weights(trainer.named_weights(), dict(one.named_weights()))
        heads = [dict(each.value_head.line.named_parameters()) for each in (trainer, one)]
        assert_same_weights(*heads)
        assert all(bool(parameter.ne(0).any()) for parameter in heads[0].values())
        written = checkpoint.save(
            tmp_path / "saved", 3, model=trainer.model, optimizer_state=trainer.optimizer_state(), meta={},
            weights=trainer.named_weights(), source=lab.folder("qwen3"),
            extras=lambda folder: trainer.value_head.write(folder / "value"),
        )
        again = team.trainer(written.model, settings)
        assert again.restore(written) == []
        again.value_head.load(written.path / "value")  # the other ranks have theirs from `restore`
        assert_same_steps([a_step_with_values(each, lab, 5) for each in (again,)], [a_step_with_values(one, lab, 5)])
        assert_same_weights(again.named_weights(), dict(one.named_weights()))
        assert_same_weights(dict(again.value_head.line.named_parameters()), heads[1])


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_teacher_over_ranks_is_that_of_one(tensor: int, lab: Any, tmp_path: Path) -> None:
    teacher, more = changed(lab, tmp_path / "teacher"), {**SETTINGS, "loss": "topk_kl"}
    second = choose_forward(load(teacher))
    words = vocabulary(second.model)
    one = lab.trainer("qwen3", double=False, teach=lambda *_: lambda samples, flat: second.best(
        samples, flat, TEACHER_K, words), **more)
    with team_of(tmp_path, tensor=tensor, teacher=teacher, **more) as team:
        trainer = team.trainer(lab.folder("qwen3"), TrainerSettings(**more))
        assert_same_steps([a_step(trainer, lab, seed, 4) for seed in range(3)],
                          [a_step(one, lab, seed, 4) for seed in range(3)])
        single = lab.samples(groups=1, members=1)  # one rank has nothing to do
        for each in (trainer, one):
            each.accumulate(single, [1.0])
        assert_same_steps([trainer.step(1e-2)], [one.step(1e-2)])
        assert_same_weights(trainer.named_weights(), dict(one.named_weights()))


def a_small_model(folder: Path, seed: int) -> Path:
    """With a tokenizer, as a teacher behind an endpoint needs one."""
    recipe = task.Recipe()
    model = maker.new_model(recipe)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    maker.save(folder, recipe, maker.new_tokenizer(recipe), model)
    return folder


def student_and_teacher(folder: Path) -> tuple[Path, Path]:
    return a_small_model(folder / "student", 0), a_small_model(folder / "teacher", 1)


def samples_of_words(lab: Any) -> list[Sample]:
    words = len(task.VOCABULARY)
    return [replace(one, prompt_ids=one.prompt_ids % words, token_ids=one.token_ids % words)
            for one in lab.samples(groups=5)]


@pytest.mark.long
def test_a_rank_asks_a_teacher_ahead_about_few_of_its_micro_batches(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers nothing until it was asked about every sample of the first rounds."""

    class Gate(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if len(server.asked) >= 2 + first:
                self.set()
            assert super().wait(timeout), "too few were asked about"
            return True

    monkeypatch.setattr(several, "AHEAD", 1)
    student, taught_by = student_and_teacher(tmp_path)
    way, samples = choose_forward(load(taught_by)), samples_of_words(lab)
    more = {**SETTINGS, "loss": "topk_kl"}
    with serving(taught_by) as server, team_of(tmp_path, endpoint=(server.url, str(student)), **more) as team:
        trainer = team.trainer(student, TrainerSettings(**more))
        assert len(server.asked) == 2, "each rank proves its teacher at the start"
        rounds = rounds_of([one.length for one in samples], 2, SETTINGS["micro_batch_tokens"], trainer.quadratic)
        first = sum(len(share) for shares in rounds[:2] for share in shares)
        assert len(rounds) > 2
        server.gate, sent, send = Gate(), list[int](), team.send
        monkeypatch.setattr(team, "send", lambda messages: (
            send(messages), sent.extend(len(one.work.samples) for one in messages if isinstance(one, wire.Expect))))
        trainer.accumulate(samples, [1.0] * len(samples))
        found = trainer.step(1e-2)
        assert len(server.asked) == 2 + len(samples)
    of_follower = [len(shares[1]) for shares in rounds]
    assert sent == [sum(of_follower[:2]), *of_follower[2:], 0]

    def best(part: Any, flat: Any) -> Any:
        return way.best(part, flat, TEACHER_K, vocabulary(way.model))

    alone = Trainer(load(student), TrainerSettings(**more), teach=lambda *_: best)
    alone.accumulate(samples, [1.0] * len(samples))
    assert_same_steps([found], [alone.step(1e-2)])


@pytest.mark.long
def test_ranks_outwait_a_slow_teacher_of_another_rank(lab: Any, tmp_path: Path) -> None:
    """It takes longer with one sample than a rank may wait in a collective."""
    student, taught_by = student_and_teacher(tmp_path)
    samples, more = samples_of_words(lab), {**SETTINGS, "loss": "topk_kl"}
    slow, collective_s = samples[3], 8.0

    def late(answer: dict[str, Any]) -> dict[str, Any]:
        if answer["choices"][0]["prompt_token_ids"] == [*slow.prompt_ids.tolist(), *slow.token_ids.tolist()]:
            threading.Event().wait(collective_s + 5)
        return answer

    with serving(taught_by) as server, team_of(
        tmp_path, collective_s=collective_s, endpoint=(server.url, str(student)), **more
    ) as team:
        trainer = team.trainer(student, TrainerSettings(**more))
        server.change = late
        trainer.accumulate(samples, [1.0] * len(samples))
        assert trainer.step(1e-2).tokens == sum(sample.trained for sample in samples)


@pytest.mark.long
def test_a_rank_whose_teacher_fails_is_named_before_any_collective(lab: Any, tmp_path: Path) -> None:
    student, taught_by = student_and_teacher(tmp_path)
    samples, more = samples_of_words(lab), {**SETTINGS, "loss": "topk_kl"}
    with serving(taught_by) as server, team_of(tmp_path, endpoint=(server.url, str(student)), **more) as team:
        trainer = team.trainer(student, TrainerSettings(**more))
        rounds = rounds_of([one.length for one in samples], 2, SETTINGS["micro_batch_tokens"], trainer.quadratic)
        bad = [samples[i] for i in rounds[0][1]]
        wrong = [[*one.prompt_ids.tolist(), *one.token_ids.tolist()] for one in bad]
        server.change = lambda answer: {} if answer["choices"][0]["prompt_token_ids"] in wrong else answer
        with pytest.raises(RankFailed, match=r"rank 1 .* failed: .*the teacher at .*sample \d+") as caught:
            trainer.accumulate(samples, [1.0] * len(samples))
        assert not caught.value.uids, "no sample of it was computed"
