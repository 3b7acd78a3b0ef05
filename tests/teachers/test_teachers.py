"""Teachers behind endpoints, by tags, and of the student's choice: the loss is that of the same teachers in the
learner; one that answers late, wrongly or less is named, and nothing is trained of it."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from teacher_server import TeacherServer, serving

from busrl.algorithms.catalog import FEWER
from busrl.algorithms.distill import topk_kl
from busrl.errors import PeerTimeout, UserError
from busrl.ledger.wal import SampleRecord
from busrl.paths import RunPaths
from busrl.preflight.load import load
from busrl.quickstart import maker, task
from busrl.ranks import wire
from busrl.ranks.follower import Follower
from busrl.roles.learner.loop import long_start
from busrl.roles.learner.samples import to_sample
from busrl.roles.learner.step import TrainingStep
from busrl.teachers import several
from busrl.teachers.base import InLearner
from busrl.teachers.of_groups import PostedFiles
from busrl.teachers.posted import Store, posted_rows
from busrl.teachers.several import Teachers
from busrl.topology import Topology
from busrl.topology.learner import TeacherRow
from busrl.training.batch import flatten
from busrl.training.scorer import NOTHING, Advantages
from busrl.training.step_stats import StepStats

ROOT = Path(__file__).resolve().parents[2]
RECIPE = task.Recipe()
WORDS = len(task.VOCABULARY)


def a_model(folder: Path, seed: int) -> Path:
    model = maker.new_model(RECIPE)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    maker.save(folder, RECIPE, maker.new_tokenizer(RECIPE), model)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: a_model(root / name, seed) for seed, name in enumerate(("student", "one", "two"))}


@pytest.fixture
def one(folders: dict[str, Path]) -> Iterator[TeacherServer]:
    with serving(folders["one"]) as server:
        yield server


@pytest.fixture
def topology(folders: dict[str, Path]) -> Topology:
    base = load(ROOT / "configs" / "quickstart.toml")
    return dataclasses.replace(base, model=dataclasses.replace(base.model, path=str(folders["student"])))


def taught(topology: Topology, *rows: TeacherRow, **keys: Any) -> Topology:
    chosen = {"loss": "topk_kl", "advantage": "reward", "teacher": rows, "teacher_k": 4, **keys}
    return dataclasses.replace(topology, learner=dataclasses.replace(topology.learner, **chosen))


def behind(server: TeacherServer, **keys: Any) -> TeacherRow:
    return TeacherRow(base_url=server.url, **{"patience_s": 20.0, "timeout_s": 10.0, **keys})


def records(groups: int = 4, size: int = 3) -> list[SampleRecord]:
    chance, made = np.random.default_rng(5), []
    for group in range(groups):
        prompt = chance.integers(2, WORDS, 5).astype("<i4").tobytes()
        for member in range(size):
            length = int(chance.integers(2, 9))
            made.append(SampleRecord(
                uid=group * 8 + member, group=group, admission=group, member=member, attempt=0, prompt_crc=0,
                reward=float(member == 1), temperature=1.0, version=0, step=0, finish=1, prompt_ids=prompt,
                token_ids=chance.integers(2, WORDS, length).astype("<i4").tobytes(),
                logprobs=(-chance.random(length) - 2).astype("<f4").tobytes(),
                versions=np.zeros(length, "<u4").tobytes()))
    return made


def trained(topology: Topology) -> tuple[StepStats, torch.Tensor]:
    """One step: what it says, and the weights behind it."""
    step = TrainingStep(topology)
    stats = step.train(records(), 4, version=0)
    assert not stats.skipped
    return stats, torch.cat([parameter.detach().ravel() for parameter in step.trainer.model.parameters()])


def same(left: tuple[StepStats, torch.Tensor], right: tuple[StepStats, torch.Tensor]) -> bool:
    assert left[0].loss == pytest.approx(right[0].loss, abs=1e-5) and left[0].loss
    assert left[0].diagnostics.teacher_kl == pytest.approx(right[0].diagnostics.teacher_kl, abs=1e-5)
    assert left[0].grad_norm == pytest.approx(right[0].grad_norm, rel=1e-4)
    return bool((left[1] - right[1]).abs().max() < 1e-5)


@pytest.mark.parametrize("top", ["teacher", "student"])
@pytest.mark.parametrize("keys", [{}, {"loss": "ppo_clip", "advantage": "group_std", "teacher_coef": 0.5}], ids=str)
def test_a_teacher_behind_an_endpoint_teaches_as_in_the_learner(
    topology: Topology, folders: dict[str, Path], one: TeacherServer, top: str, keys: dict[str, Any]
) -> None:
    served = trained(taught(topology, behind(one), teacher_top=top, **keys))
    local = trained(taught(topology, TeacherRow(path=str(folders["one"])), teacher_top=top, **keys))
    assert same(served, local)
    assert len(one.asked) == 1 + len(records())
    plain = taught(topology, **keys)
    if top == "teacher":
        model = dataclasses.replace(plain.model, teacher=str(folders["one"]))
        assert same(served, trained(dataclasses.replace(plain, model=model)))


def test_the_students_own_tokens_are_others_than_the_teachers(topology: Topology, folders: dict[str, Path]) -> None:
    row = TeacherRow(path=str(folders["one"]))
    own, other = (trained(taught(topology, row, teacher_top=top)) for top in ("student", "teacher"))
    assert own[0].loss != pytest.approx(other[0].loss, abs=1e-3)
    itself = TeacherRow(path=str(folders["student"]))
    assert trained(taught(topology, itself, teacher_top="student"))[0].loss == pytest.approx(0, abs=1e-6)


def with_tags(topology: Topology, folder: Path) -> Topology:
    """Prompts of two tags in turn."""
    path = folder / "tagged.jsonl"
    lines = [{"prompt": str(n), "answer": "", "tag": "even" if n % 2 == 0 else "odd"} for n in range(4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return dataclasses.replace(topology, data=dataclasses.replace(topology.data, train=str(path), shuffle=False))


def test_two_teachers_each_teach_the_prompts_of_their_tag(
    topology: Topology, folders: dict[str, Path], one: TeacherServer, tmp_path: Path
) -> None:
    tagged = with_tags(topology, tmp_path)
    both = trained(taught(tagged, behind(one, tag="even"), TeacherRow(path=str(folders["two"]), tag="odd")))
    assert len(one.asked) == 1 + len(records()) // 2
    rest = trained(taught(tagged, TeacherRow(path=str(folders["one"]), tag="even"), TeacherRow(
        path=str(folders["two"]))))
    assert same(both, rest)
    alone = [trained(taught(tagged, TeacherRow(path=str(folders[name]))))[0] for name in ("one", "two")]
    tokens = {tag: sum(len(r.token_array()) for r in records() if r.group % 2 == odd) for odd, tag in enumerate("eo")}
    assert both[0].loss != pytest.approx(alone[0].loss, abs=1e-3) and tokens["e"] and tokens["o"]
    swapped = trained(taught(tagged, TeacherRow(path=str(folders["two"]), tag="even"), TeacherRow(
        path=str(folders["one"]), tag="odd")))
    total = sum(tokens.values())
    assert (both[0].loss + swapped[0].loss) * total == pytest.approx(
        (alone[0].loss + alone[1].loss) * total, rel=1e-5)


def test_a_prompt_whose_tag_no_teacher_has_is_named(
    topology: Topology, folders: dict[str, Path], tmp_path: Path
) -> None:
    chosen = taught(with_tags(topology, tmp_path), TeacherRow(path=str(folders["one"]), tag="even"))
    with pytest.raises(UserError, match=r"group 1 has the tag 'odd', and no teacher has it; there are even"):
        trained(chosen)


@pytest.mark.parametrize("top", ["teacher", "student"])
def test_a_teacher_is_asked_about_few_micro_batches_ahead(
    topology: Topology, one: TeacherServer, top: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """About none ahead where each answer has a number for every token."""
    monkeypatch.setattr(several, "AHEAD", 1)
    chosen, coming = taught(topology, behind(one), teacher_top=top, micro_batch_tokens=30), list[list[int]]()
    step = TrainingStep(chosen)
    monkeypatch.setattr(step.trainer.scorer, "expect", lambda part: coming.append([sample.uid for sample in part]))
    step.train(records(), 4, version=0)
    parts = [uids for uids in coming if uids] if top == "student" else [
        [uid for uid in uids if uid not in behind_it] for uids, behind_it in zip(coming, [*coming[1:], []])]
    assert len(parts) > 2 and sorted(uid for part in parts for uid in part) == [record.uid for record in records()]


def test_requests_under_way_are_those_of_all_ranks_together(folders: dict[str, Path], one: TeacherServer) -> None:
    class Gate(threading.Event):
        under_way, most = 0, 0

        def wait(self, timeout: float | None = None) -> bool:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            threading.Event().wait(0.05)
            self.under_way -= 1
            return True

    base = load(ROOT / "configs" / "quickstart.toml", ["process.learner.ranks=2"])
    two = taught(dataclasses.replace(base, model=dataclasses.replace(base.model, path=str(folders["student"]))),
                 behind(one, concurrency=4))
    step = TrainingStep(two)
    one.gate = gate = Gate()
    step.train(records(), 4, version=0)
    assert gate.most <= 4 // 2


def test_over_ranks_every_model_computes_in_every_micro_batch() -> None:
    calls: list[tuple[str, int]] = []

    def model(name: str, value: float) -> InLearner:
        def best(samples: Any, flat: Any) -> Any:
            calls.append((name, len(samples)))
            return torch.full((len(flat.targets), 2), 7), torch.full((len(flat.targets), 2), value)

        return InLearner(best, lambda samples, flat: flat.targets * 0.0, torch.device("cpu"))

    samples = [to_sample(record) for record in records(groups=2)]
    flat, tags = flatten(samples, torch.float32, torch.device("cpu")), {0: "a", 1: "b"}
    rows = [("a", model("a", -1.0)), ("b", model("b", -2.0))]
    _, logprobs = Teachers(rows, tags.__getitem__, None, together=True)(samples, flat)
    assert logprobs[:, 0].tolist() == [-1.0 - tags[sample.group].count("b") for sample in samples
                                       for _ in range(sample.generated)]
    assert sorted(calls) == [("a", 3), ("b", 3)]
    calls.clear()
    one = flatten(samples[:1], torch.float32, flat.rows.device)
    Teachers(rows, lambda group: "a", None, together=True)(samples[:1], one)
    assert sorted(calls) == [("a", 1), ("b", 1)], "a rank that has nothing for a teacher computes it all the same"
    calls.clear()
    Teachers(rows, lambda group: "a", None, together=False)(samples[:1], one)
    assert calls == [("a", 1)]
    calls.clear()
    idle = Teachers(rows, tags.__getitem__, None, together=True)
    idle([NOTHING], flatten([NOTHING], torch.float32, torch.device("cpu")))
    assert sorted(calls) == [("a", 1), ("b", 1)]


# -- a teacher that cannot be used ---------------------------------------------------------------------------


def positions(change: Callable[[list[Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    def changed(answer: dict[str, Any]) -> Any:
        change_of = answer["choices"][0]
        change_of["prompt_logprobs"] = change(change_of["prompt_logprobs"])
        return answer

    return changed


def thinner(rows: list[Any]) -> list[Any]:
    return [row and dict(list(row.items())[-2:]) for row in rows]


def shifted(rows: list[Any]) -> list[Any]:
    return [None, None, *rows[1:-1]]


def foreign(rows: list[Any]) -> list[Any]:
    return [row and {**row, str(WORDS + 5): {"logprob": -0.1}} for row in rows]


FAULTS = {
    "no log-probabilities": (positions(lambda _: None), "gave no log-probabilities of the prompt"),
    "fewer positions": (positions(lambda rows: rows[:-1]), r"gave log-probabilities of \d+ positions, of \d+"),
    "an empty position": (positions(lambda rows: [*rows[:-1], None]), "no log-probabilities at position"),
    "fewer tokens": (positions(thinner), r"gave [12] log-probabilities at position \d+, of 4 \(learner.teacher_k\)"),
    "a shift": (positions(shifted), "no log-probabilit.* at position|of another sequence"),
    "foreign ids": (positions(foreign), rf"token {WORDS + 5} at position \d+ is none of the {WORDS}"),
    "texts for ids": (positions(lambda rows: [row and {"the": {"logprob": -1}, **row} for row in rows]), "and no id"),
    "no completion": (lambda _: {"error": "no"}, "no answer to a completion"),
    "above 0": (positions(lambda rows: [row and {i: {"logprob": 0.5} for i in row} for row in rows]), "logprob"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_answer_is_named_and_nothing_of_it_is_trained(
    topology: Topology, one: TeacherServer, fault: str
) -> None:
    change, text = FAULTS[fault]
    step = TrainingStep(taught(topology, behind(one)))
    before = torch.cat([parameter.detach().ravel().clone() for parameter in step.trainer.model.parameters()])
    one.change = change
    with pytest.raises(UserError, match=text) as caught:
        step.train(records(), 4, version=0)
    assert one.url in str(caught.value) and "sample " in str(caught.value)
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in step.trainer.model.parameters())
    after = torch.cat([parameter.detach().ravel() for parameter in step.trainer.model.parameters()])
    assert torch.equal(before, after)
    one.change = lambda answer: answer
    assert not step.train(records(), 4, version=0).skipped  # the step as if it had not been tried


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "fewer tokens"])
def test_a_teacher_that_cannot_teach_is_refused_at_the_start(
    topology: Topology, one: TeacherServer, fault: str
) -> None:
    one.change, text = FAULTS[fault]
    with pytest.raises(UserError, match=text):
        TrainingStep(taught(topology, behind(one)))


def test_an_answer_that_was_wrong_once_is_asked_for_again(topology: Topology, one: TeacherServer) -> None:
    good = trained(taught(topology, behind(one)))
    step, wrong = TrainingStep(taught(topology, behind(one))), iter([positions(lambda rows: rows[:-1])])
    one.change = lambda answer: next(wrong, lambda same: same)(answer)
    stats = step.train(records(), 4, version=0)
    weights = torch.cat([parameter.detach().ravel() for parameter in step.trainer.model.parameters()])
    assert same(good, (stats, weights))


def test_a_teacher_that_answers_late_is_named_after_its_patience(topology: Topology, one: TeacherServer) -> None:
    step = TrainingStep(taught(topology, behind(one, timeout_s=0.3, patience_s=1.0)))
    one.gate.clear()
    with pytest.raises(PeerTimeout, match=r"the teacher at .*/v1: sample \d+, .*no usable answer for .*patience_s = 1.*"
                                          r"no answer within 0.3 s"):
        step.train(records(), 4, version=0)


def test_a_teacher_that_is_gone_is_named_after_its_patience(topology: Topology, folders: dict[str, Path]) -> None:
    with serving(folders["one"]) as server:
        step = TrainingStep(taught(topology, behind(server, patience_s=0.5)))
    with pytest.raises(PeerTimeout, match=f"{server.url}.*no usable answer"):
        step.train(records(), 4, version=0)


def test_a_wait_longer_than_the_patience_is_named_and_cut(topology: Topology, one: TeacherServer) -> None:
    step = TrainingStep(taught(topology, behind(one, patience_s=1.0)))
    one.unwell = ["900"]
    assert not step.train(records(), 4, version=0).skipped  # it was asked once more at the end of the patience
    one.unwell = ["900"] * 100
    with pytest.raises(PeerTimeout, match=r"no usable answer for [1-9].* s .*asks for a wait of 900 s"):
        step.train(records(), 4, version=0)


def test_a_learner_that_waits_for_its_teacher_at_the_start_shows_progress(
    topology: Topology, folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with serving(folders["one"]) as server:
        pass
    shown: list[None] = []
    for model in ("", "teacher"):  # the one way asks for a model's name first
        shown.clear()
        chosen = taught(topology, behind(server, patience_s=1.6, model=model))
        with pytest.raises(PeerTimeout, match=f"{server.url}: at the start: no usable answer"):
            TrainingStep(chosen, on_progress=lambda: shown.append(None))
        assert len(shown) >= 2
    assert f"the teacher at {server.url}: at the start" in caplog.text
    name, limit_s = long_start(chosen) or ("", 0.0)
    assert name == f"teacher {server.url[7:-3]}" and limit_s > 1.6
    assert long_start(topology) is None


def test_a_rank_that_waits_in_vain_for_a_teacher_blames_no_sample() -> None:
    sent: list[Any] = []

    class Waiting(Follower):
        def __init__(self) -> None:
            self.stream = SimpleNamespace(send=lambda message, _: sent.append(message))  # type: ignore[assignment]
            self.trainer = SimpleNamespace(micro_batch=self.micro_batch, idle=self.micro_batch)  # type: ignore

        def micro_batch(self, *_: object) -> None:
            raise PeerTimeout("the teacher is gone")

    sample = to_sample(records()[0])
    work = wire.work_of(lambda versions: np.zeros(len(versions), np.int64), [sample], Advantages([1.0]), 0)
    with pytest.raises(PeerTimeout):
        Waiting().act(wire.Micro(work=work))
    assert [(words.text, words.uids) for words in sent] == [("the teacher is gone", [])]


def test_another_tokenizer_is_refused_by_name(topology: Topology, one: TeacherServer) -> None:
    one.tokenize = lambda ids: [ids[0], ids[2], ids[1], *ids[3:]]
    with pytest.raises(UserError, match=r"another tokenizer: of one text it makes .*model.path"):
        TrainingStep(taught(topology, behind(one)))
    one.tokenize = lambda ids: None  # no such route: the texts of its tokens tell
    for one.no_route in (404, 400, 401, 403):  # or it is closed, as by a proxy that lets those of /v1 pass
        TrainingStep(taught(topology, behind(one)))
    one.change = positions(lambda rows: [row and {i: {**row[i], "decoded_token": "zz"} for i in row} for row in rows])
    with pytest.raises(UserError, match=r"another tokenizer: token \d+ is 'zz' there"):
        TrainingStep(taught(topology, behind(one)))
    one.change = positions(lambda rows: [row and {i: {"logprob": row[i]["logprob"]} for i in row} for row in rows])
    with pytest.raises(UserError, match="tells nothing of its tokenizer"):
        TrainingStep(taught(topology, behind(one)))


def test_samples_of_another_temperature_are_refused(topology: Topology, one: TeacherServer) -> None:
    import msgspec

    step = TrainingStep(taught(topology, behind(one)))
    hot = [msgspec.structs.replace(record, temperature=0.7) for record in records()]
    with pytest.raises(UserError, match=r"drawn at temperature 0.7, and an endpoint gives .* at temperature 1"):
        step.train(hot, 4, version=0)


def test_the_students_tokens_need_all_log_probabilities(topology: Topology, one: TeacherServer) -> None:
    def without_the_best(answer: dict[str, Any]) -> Any:
        choice = answer["choices"][0]
        own = zip(choice["prompt_token_ids"], choice["prompt_logprobs"])
        choice["prompt_logprobs"] = [row and {i: row[i] for n, i in enumerate(row) if n > 9 or i == str(token)}
                                     for token, row in own]
        return answer

    step = TrainingStep(taught(topology, behind(one), teacher_top="student"))
    one.change = without_the_best
    with pytest.raises(UserError, match=r"which the student thinks likely.*--max-logprobs -1|tokens at one position"):
        step.train(records(), 4, version=0)


# -- posted with the groups of environments --------------------------------------------------------------------


@pytest.mark.parametrize("named", [4, 2], ids=["all", "fewer than are kept"])
def test_a_posted_teacher_teaches_as_the_same_one_in_the_learner(
    topology: Topology, folders: dict[str, Path], tmp_path: Path, named: int
) -> None:
    local = taught(topology, TeacherRow(path=str(folders["one"])), teacher_k=named)
    teacher = TrainingStep(local).trainer.scorer.teacher
    assert teacher is not None
    samples = [to_sample(record) for record in records()]
    ids, logprobs = teacher(samples, flatten(samples, torch.float32, torch.device("cpu")))
    store, rows = Store(RunPaths.of(tmp_path).taught), iter(zip(ids.numpy(), logprobs.detach().numpy(), strict=True))
    for group in range(4):
        members = []
        for sample in samples[3 * group : 3 * group + 3]:
            own = [next(rows) for _ in range(sample.generated)]
            listed = [[[], *(values[n].tolist() for values in own)] for n in (0, 1)]  # the first is not trained
            members.append(posted_rows(*listed, np.arange(len(own) + 1) > 0, 4, WORDS))
        store.write(group, members)
    chosen = taught(topology, TeacherRow(posted=True))
    step = TrainingStep(chosen, root=tmp_path)
    stats = step.train(records(), 4, version=0)
    weights = torch.cat([parameter.detach().ravel() for parameter in step.trainer.model.parameters()])
    assert same((stats, weights), trained(local))
    store.remove([2])
    with pytest.raises(UserError, match=r"2\.taught: what a teacher said of the samples of draw 2 cannot be read"):
        TrainingStep(chosen, root=tmp_path).train(records(), 4, version=0)


def test_tokens_that_a_teacher_did_not_name_count_nothing() -> None:
    student = torch.tensor([[-0.5, -1.5, -2.0]], requires_grad=True)
    teacher = torch.tensor([[-0.3, -1.8, FEWER]])
    whole = topk_kl(student.masked_fill(teacher <= FEWER, FEWER), teacher)
    few = topk_kl(student[:, :2], teacher[:, :2])
    assert whole.item() == pytest.approx(few.item(), abs=1e-7)
    (slope,) = torch.autograd.grad(whole.sum(), student)
    assert slope[0, 2] == 0 and slope[0, 0] != 0


def test_files_of_groups_that_others_ended_go_when_all_before_have_ended(tmp_path: Path) -> None:
    store = Store(tmp_path / "taught")
    watch = PostedFiles(store)

    def step(trained: int, *still_open: int) -> set[int]:
        record, view = SimpleNamespace(groups=[trained]), SimpleNamespace(draws=np.array([trained, *still_open]))
        watch.before(SimpleNamespace(record=record, view=view))  # type: ignore[arg-type]
        watch.after(SimpleNamespace(record=record), {})  # type: ignore[arg-type]
        return {int(path.stem) for path in store.folder.iterdir()}

    for draw in (1, 2, 3, 5):
        store.write(draw, [])
    assert step(3, 5) == {1, 2, 3, 5}, "1 and 2 may have been written after the view was made"
    store.write(4, [])
    assert step(5, 7) == {3, 4, 5}, "those of steps wait for checkpoints"
    assert step(7) == {3, 5}


def test_files_of_posted_teachers_go_two_checkpoints_after_their_step(tmp_path: Path) -> None:
    store = Store(tmp_path / "taught")
    watch = PostedFiles(store)

    def step(number: int) -> None:
        store.write(number, [])
        watch.after(SimpleNamespace(record=SimpleNamespace(groups=[number])), {})  # type: ignore[arg-type]

    def left() -> set[int]:
        return {int(path.stem) for path in store.folder.iterdir()}

    step(1)
    watch.save(tmp_path)
    step(2)
    assert left() == {1, 2}, "the log still has the first step if the newest checkpoint is damaged"
    meta = json.loads(json.dumps(watch.meta()))
    watch.save(tmp_path)
    assert left() == {2}
    later = PostedFiles(store)  # of a learner that starts again from that checkpoint
    later.load(meta, tmp_path)
    later.save(tmp_path)
    assert left() == set()
