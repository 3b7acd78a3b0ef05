"""One copy of the weights for two real processes: the learner trains the engine's own tensors, in shared memory.

On a CPU the handles are files in shared memory instead of CUDA allocations; all the rest is the same code.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.process
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import one_copy_engine

from busrl.errors import UserError, WeightsOwnerLost, WeightsTimeout
from busrl.system import files
from busrl.training.model import copied_weights
from busrl.weights import one_copy
from busrl.weights.one_copy import Fence, FenceState, OneCopyReceiver, OneCopySender, ProcessIdentity

FORK = multiprocessing.get_context("fork")  # the children need not load torch again
CPU = torch.device("cpu")
IDS = [3, 7, 1, 19, 4, 4, 11, 2, 8]
SIZES = {"vocab_size": 30, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
         "eos_token_id": 29}


class Engine:
    """The child. `ask` sends an order and returns the answer."""

    def __init__(self, kind: str, folder: Path, at: Path, timeout_s: float = 20.0) -> None:
        self.here, there = FORK.Pipe()
        arguments = (there, kind, str(folder), str(at / "weights.bridge"), str(at / "fence"), timeout_s)
        self.child = FORK.Process(target=one_copy_engine.main, args=arguments)
        self.child.start()
        there.close()
        assert self.read() == "loaded"

    @property
    def pid(self) -> int:
        assert self.child.pid is not None
        return self.child.pid

    def read(self) -> Any:
        assert self.here.poll(60), "the engine did not answer"
        return self.here.recv()

    def tell(self, **order: Any) -> None:
        self.here.send(order)

    def ask(self, **order: Any) -> Any:
        self.tell(**order)
        return self.read()

    def kill(self) -> None:
        self.child.kill()
        self.child.join(20)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A random model with a tokenizer, by kind."""
    import transformers as hf
    from tokenizers import Tokenizer, models

    root = tmp_path_factory.mktemp("models")

    def make(kind: str) -> Path:
        folder = root / kind
        if not folder.exists():
            torch.manual_seed(5)
            config = hf.Qwen3Config(**SIZES, tie_word_embeddings=True) if kind == "qwen3" else hf.LlamaConfig(
                **SIZES, tie_word_embeddings=False)
            model = hf.AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
            model.save_pretrained(str(folder))
            words = Tokenizer(models.WordLevel({str(n): n for n in range(30)}, unk_token="0"))
            hf.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="29").save_pretrained(str(folder))
        return folder

    return make


@pytest.fixture
def engines(tmp_path: Path, folders: Callable[[str], Path]) -> Iterator[Callable[..., Engine]]:
    started: list[Engine] = []

    def start(kind: str, model: str = "qwen3", **settings: Any) -> Engine:
        started.append(Engine(kind, folders(model), tmp_path, **settings))
        return started[-1]

    yield start
    for engine in started:
        engine.kill()


def load(folder: Path) -> Any:
    from busrl.training.model import load as load_model

    return load_model(folder)


def sender_at(path: Path, timeout_s: float = 20.0) -> OneCopySender:
    return OneCopySender(path / "weights.bridge", path / "fence", timeout_s=timeout_s)


def named(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def adopt(model: Any, sender: OneCopySender) -> dict[str, torch.Tensor]:
    views = sender.connect(named(model), CPU, 20.0)
    assert views is not None
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, views[name]), name
        parameter.data = views[name]
    return views


def plain(model: Any, ids: list[int]) -> list[float]:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return [float(row[token]) for row, token in zip(logits, ids[1:])]


def optimiser_step(model: Any) -> Callable[[], None]:
    """Forward and backward now, the update when called."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    model(input_ids=torch.tensor([IDS]), labels=torch.tensor([IDS])).loss.backward()
    return lambda: (optimiser.step(), optimiser.zero_grad(set_to_none=True))[0]


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_an_optimiser_step_on_views_updates_the_fused_engine(
    engines: Callable[..., Engine], folders: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    engine, model = engines("fused", kind), load(folders(kind))
    assert engine.ask(do="share") == "done"
    sender = sender_at(tmp_path)
    adopt(model, sender)
    before = plain(model, IDS)
    assert engine.ask(do="logprobs", ids=IDS) == pytest.approx(before, abs=1e-5)
    update = optimiser_step(model)
    engine.tell(do="fetch", above=0)
    sender.pause_engines(1, 10)
    update()
    assert sender.write(named(model)) == 0  # nothing to copy: they are the engine's
    sender.publish(1, 10, named(model))
    assert engine.read() == (1, 10) == sender.newest()
    after = plain(model, IDS)
    assert max(abs(a - b) for a, b in zip(before, after)) > 0.05
    assert engine.ask(do="logprobs", ids=IDS) == pytest.approx(after, abs=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_saved_model_has_the_checkpoints_names_and_each_tensor_alone(
    engines: Callable[..., Engine], folders: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    from busrl.training import checkpoint

    engine, model = engines("fused", kind), load(folders(kind))
    engine.ask(do="share")
    sender = sender_at(tmp_path)
    adopt(model, sender)
    copies = copied_weights(model)
    saved = checkpoint.save(tmp_path / "saved", 1, model=model, optimizer_state={}, meta={}, weights=copies)
    again = load(saved.model)
    assert plain(again, IDS) == pytest.approx(plain(model, IDS), abs=1e-6)
    assert named(again).keys() == named(load(folders(kind))).keys() == copied_weights(model).keys()
    weights = (saved.model / "model.safetensors").stat().st_size
    assert weights < 1.1 * sum(tensor.nbytes for tensor in copied_weights(model).values())


def test_torch_engine_tokens_carry_their_version_across_an_in_place_step(
    engines: Callable[..., Engine], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    engine, model = engines("torch"), load(folders("qwen3"))
    engine.ask(do="share")
    sender = sender_at(tmp_path)
    adopt(model, sender)
    old = {name: tensor.clone() for name, tensor in named(model).items()}
    update = optimiser_step(model)
    engine.tell(do="generate", prompt=IDS[:3], tokens=24, tell=9)
    assert engine.read() == "in the middle"
    sender.pause_engines(1, 1)
    update()
    sender.publish(1, 1, named(model))
    answers = engine.read()
    assert len(answers) == 4 and any(1 in versions for _, _, versions in answers)
    _check_logprobs(folders("qwen3"), model, old, answers)
    for tokens, logprobs, versions in engine.ask(do="generate", prompt=IDS[:5], tokens=16, tell=-1):
        assert set(versions) == {1}
        assert logprobs == pytest.approx(plain(model, [*IDS[:5], *tokens])[4:], abs=1e-4)


def _check_logprobs(folder: Path, model: Any, old: dict[str, torch.Tensor], answers: list[Any]) -> None:
    """Tokens of version 0 against the old weights. Those of version 1 were made over keys and values of both."""
    first = load(folder)
    with torch.no_grad():
        for name, parameter in first.named_parameters():
            parameter.copy_(old[name])
    for tokens, logprobs, versions in answers:
        assert versions == sorted(versions)
        loaded = versions.count(0)
        wanted = plain(first, [*IDS[:3], *tokens])[2:]
        assert logprobs[:loaded] == pytest.approx(wanted[:loaded], abs=1e-4)
        if loaded < len(tokens):  # the first of version 1 is not what the old weights would have given
            assert abs(logprobs[loaded] - wanted[loaded]) > 1e-4
    assert plain(model, IDS) != pytest.approx(plain(first, IDS), abs=1e-3)


def test_hundreds_of_versions_leak_nothing_and_never_go_back(
    engines: Callable[..., Engine], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    engine, model = engines("fused"), load(folders("qwen3"))
    engine.ask(do="share")
    sender = sender_at(tmp_path)
    adopt(model, sender)
    parameters = named(model)
    seen, descriptors = [], []
    for version in range(1, 301):
        engine.tell(do="fetch", above=version - 1)
        sender.pause_engines(version, version)
        sender.publish(version, version, parameters)
        seen.append(engine.read()[0])
        descriptors.append((len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{engine.pid}/fd"))))
    assert seen == list(range(1, 301))
    assert len(set(descriptors)) == 1, set(descriptors)


def test_other_parameters_than_the_engines_are_copied_inside_the_fence(
    engines: Callable[..., Engine], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    engine, model = engines("fused"), load(folders("qwen3"))
    engine.ask(do="share")
    sender = sender_at(tmp_path)
    views = sender.connect(named(model), CPU, 20.0)
    assert views is not None
    optimiser_step(model)()
    engine.tell(do="fetch", above=0)
    sender.pause_engines(4, 2)
    assert sender.write(named(model)) == sum(view.nbytes for view in views.values())
    sender.publish(4, 2, named(model))
    assert engine.read() == (4, 2)
    assert engine.ask(do="logprobs", ids=IDS) == pytest.approx(plain(model, IDS), abs=1e-5)


def test_a_dead_engine_stops_the_learner_by_name_until_its_successor_appears(
    engines: Callable[..., Engine], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    engine, model = engines("fused"), load(folders("qwen3"))
    engine.ask(do="share")
    sender = sender_at(tmp_path)
    adopt(model, sender)
    sender.check()
    engine.kill()
    with pytest.raises(WeightsOwnerLost, match=rf"rollout-0 \(pid {engine.pid}, dead\) held the weights"):
        sender.check()
    with pytest.raises(WeightsOwnerLost, match="rollout-0"):
        sender.pause_engines(1, 1)
    sender.close()
    with pytest.raises(WeightsTimeout, match=r"rollout-0 is pid \d+, dead after 0.2 s"):
        sender_at(tmp_path).connect(named(model), CPU, 0.2)
    successor = engines("fused")
    successor.ask(do="share")
    again = sender_at(tmp_path)
    fresh = load(folders("qwen3"))
    adopt(fresh, again)
    successor.tell(do="fetch", above=0)
    again.pause_engines(2, 2)
    again.publish(2, 2, named(fresh))
    assert successor.read() == (2, 2)


def test_an_engine_that_does_not_pause_is_named_and_nothing_has_changed(
    engines: Callable[..., Engine], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    engine, model = engines("fused"), load(folders("qwen3"))
    engine.ask(do="share")
    sender = sender_at(tmp_path, timeout_s=0.3)
    adopt(model, sender)
    with pytest.raises(WeightsTimeout, match=r"rollout-0 \(pid \d+, alive\) did not pause for version 1 within 0.3 s"):
        sender.pause_engines(1, 1)
    assert not sender.engines_paused and Fence.attach(tmp_path / "fence").state == FenceState(0, 0, False)
    os.kill(engine.pid, signal.SIGSTOP)
    with pytest.raises(WeightsTimeout, match="did not pause for version 1"):
        sender.pause_engines(1, 1)
    os.kill(engine.pid, signal.SIGCONT)
    assert engine.ask(do="fetch") == (0, 0)


def dying_learner(at: Path, folder: Path) -> multiprocessing.process.BaseProcess:
    """A learner that is killed when it has changed one tensor; returns when the fence says that it is at it."""
    learner = FORK.Process(target=_die_in_a_step, args=(at, folder))
    learner.start()
    fence = Fence.attach(at / "fence")
    while not fence.state.changing:
        assert learner.is_alive()
    return learner


def _die_in_a_step(at: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    sender = sender_at(at)
    views = sender.connect(named(load(folder)), CPU, 20.0)
    assert views is not None
    sender.pause_engines(1, 1)
    next(iter(views.values())).add_(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_learner_dying_within_a_step_stops_the_engine_by_name(
    engines: Callable[..., Engine], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    engine = engines("fused", timeout_s=1.5)
    engine.ask(do="share")
    learner = dying_learner(tmp_path, folders("qwen3"))
    answer = engine.ask(do="fetch")
    learner.join(20)
    assert learner.exitcode == -signal.SIGKILL
    assert answer.startswith("WeightsTimeout: rollout-0: paused for 1.5 s: the learner (pid ")
    assert f"{learner.pid}, dead) changes the weights to version 1 (step 1); the weights are half of two ver" in answer


def test_the_successor_of_a_dead_learner_ends_its_step_during_the_pause(
    engines: Callable[..., Engine], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    engine, model = engines("fused", timeout_s=60.0), load(folders("qwen3"))
    engine.ask(do="share")
    learner = dying_learner(tmp_path, folders("qwen3"))
    engine.tell(do="fetch")
    learner.join(20)
    sender = sender_at(tmp_path)
    assert sender.connect(named(model), CPU, 20.0) is not None
    sender.pause_engines(1, 1)
    sender.write(named(model))
    sender.publish(1, 1, named(model))
    assert engine.read() == (1, 1)
    assert engine.ask(do="logprobs", ids=IDS) == pytest.approx(plain(model, IDS), abs=1e-5)


def test_an_engine_that_ends_waits_for_the_learner_to_let_go(
    engines: Callable[..., Engine], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    engine, model = engines("fused"), load(folders("qwen3"))
    engine.ask(do="share")
    sender = sender_at(tmp_path)
    adopt(model, sender)
    engine.tell(do="close")
    answered = threading.Thread(target=engine.read)
    answered.start()
    answered.join(0.3)
    assert answered.is_alive() and (tmp_path / "weights.bridge").exists()
    sender.close()
    answered.join(10)
    assert not answered.is_alive()
    assert not (tmp_path / "weights.bridge").exists() and not (tmp_path / "fence").exists()


def test_a_cuda_memory_handle_passes_through_the_file_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: the calls and values that torch's own sharing between processes uses, in its order."""
    arguments = (0, bytes(range(64)), 4096, 512, b"/torch_12_34", 3, bytes(range(64, 128)), True)
    storage: Any = SimpleNamespace(
        device=torch.device("cuda", 0), nbytes=lambda: 4096, _share_cuda_=lambda: arguments
    )
    handle = json.loads(json.dumps(one_copy.export_handle(storage)))
    mapped: list[Any] = []
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", lambda *values: mapped.extend(values))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    one_copy.map_handle(handle, torch.device("cuda", 0), ProcessIdentity.mine())
    assert tuple(mapped) == arguments
    with pytest.raises(UserError, match="the weights are on a cuda device, this process works on cpu"):
        one_copy.map_handle(handle, CPU, ProcessIdentity.mine())
    del handle["event"]
    with pytest.raises(UserError, match="event is missing"):
        one_copy.map_handle(handle, torch.device("cuda", 0), ProcessIdentity.mine())


def share_here(path: Path, tensors: dict[str, torch.Tensor]) -> OneCopyReceiver:
    receiver = OneCopyReceiver(path / "weights.bridge", path / "fence", "rollout-0", timeout_s=1.0)
    receiver.share(tensors)
    return receiver


def test_the_bridge_is_private_and_keeps_views_of_one_storage_together(tmp_path: Path) -> None:
    tensor = torch.arange(24.0).view(6, 4)
    tensors = {"a": tensor[:2], "b": tensor[2:], "c": torch.ones(3, 3).t(), "d": torch.tensor(5.0)}
    _kept = share_here(tmp_path, tensors)
    file = tmp_path / "weights.bridge"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    bridge = one_copy.read_bridge(file)
    assert bridge is not None and len(bridge.storages) == 3 and bridge.owner == ProcessIdentity.mine()
    views = one_copy.map_parts(bridge, CPU)
    tensor[2, 0] = -1.0
    assert views["b"][0, 0] == -1.0 and all(torch.equal(views[name], tensors[name]) for name in tensors)
    views["a"][1, 3] = -2.0
    assert tensor[1, 3] == -2.0 and views["c"].stride() == tensors["c"].stride()


def test_a_bridge_that_is_damaged_or_writable_by_others_is_refused(tmp_path: Path) -> None:
    _kept = share_here(tmp_path, {"a": torch.ones(4)})
    file = tmp_path / "weights.bridge"
    good = file.read_text()
    file.chmod(0o644)
    with pytest.raises(UserError, match="mode is 0644"):
        one_copy.read_bridge(file)
    for text, problem in ((good[:50], "not a bridge"), ("[]", "not a bridge"),
                       (good.replace('"layout":1', '"layout":9'), "Invalid enum value 9"),
                       (good.replace('"tensors"', '"tensor"'), "missing required field `tensors`")):
        files.replace(file, text.encode())
        with pytest.raises(UserError, match=problem):
            one_copy.read_bridge(file)
    files.replace(file, good.replace('"shape":[4]', '"shape":[5]').encode())
    beyond = one_copy.read_bridge(file)
    assert beyond is not None
    with pytest.raises(UserError, match="a does not fit into its memory"):
        one_copy.map_parts(beyond, CPU)
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(UserError, match="no file of this run"):
        one_copy.read_bridge(tmp_path / "link")


def test_another_model_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    _kept = share_here(tmp_path, {"a": torch.ones(4), "b": torch.ones(2)})
    a, b = torch.ones(4), torch.ones(2)
    for ours, problem in (({"a": a}, "'b' is in the engine, and not in this model"),
                      ({"a": a, "b": b, "c": a}, "'c' is not among"),
                      ({"a": a, "b": a}, r"'b' is torch.float32\[2\] in the engine")):
        with pytest.raises(UserError, match=problem):
            sender_at(tmp_path).connect(ours, CPU, 1.0)


def test_an_invalid_fence_is_refused_and_a_missing_one_awaited(tmp_path: Path) -> None:
    _kept = share_here(tmp_path, {"a": torch.ones(4)})
    (tmp_path / "fence").unlink()
    with pytest.raises(WeightsTimeout, match=r"rollout-0 is pid \d+, alive after 0.1 s"):
        sender_at(tmp_path).connect({"a": torch.ones(4)}, CPU, 0.1)
    (tmp_path / "fence").write_bytes(b"x" * 4096)
    with pytest.raises(UserError, match="no fence of shared weights, or one of another version"):
        sender_at(tmp_path).connect({"a": torch.ones(4)}, CPU, 0.1)
    with pytest.raises(UserError, match="the fence counts to"):
        _ = FenceState(1 << 31, 0, False).word


def test_a_version_is_never_below_one_that_was_published(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(3)}
    receiver, sender = share_here(tmp_path, tensors), sender_at(tmp_path)
    assert sender.connect({"a": torch.zeros(3)}, CPU, 1.0) is not None
    done = threading.Thread(target=lambda: receiver.wait_for(3, 10.0))
    done.start()
    sender.publish(3, 7, {"a": torch.full((3,), 2.0)})
    done.join(10)
    assert receiver.newest() == (3, 7) == receiver.fetch({})
    assert torch.equal(tensors["a"], torch.full((3,), 2.0))
    with pytest.raises(UserError, match="version 3 is not above 3"):
        sender.publish(3, 8, {"a": torch.zeros(3)})
    with pytest.raises(WeightsTimeout, match=r"no version 4 after 0.05 s: the learner .* has published nothing beyond"):
        receiver.wait_for(4, 0.05)
    with pytest.raises(UserError, match="another learner"):
        _other_learner(tmp_path)


def _other_learner(path: Path) -> None:
    fence = Fence.attach(path / "fence")
    fence.learner = ProcessIdentity.of(os.getppid())
    sender_at(path).connect({"a": torch.zeros(3)}, CPU, 1.0)
