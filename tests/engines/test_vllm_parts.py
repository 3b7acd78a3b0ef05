"""The parts of the vLLM engine that need no vLLM: the page, a worker's plane of weights, padding, requests."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from busrl.engines.base import PartialAnswer, Request, seed_of
from busrl.engines.vllm import cpu_patches
from busrl.engines.vllm.cpu_patches import pad_heads
from busrl.engines.vllm.engine import Running
from busrl.engines.vllm.process import abilities_of
from busrl.engines.vllm.weights import SIZE, Line, Page
from busrl.engines.vllm.worker import WorkerWeights, plain_logprobs
from busrl.errors import UserError
from busrl.states import Finish
from busrl.weights.shm import ShmReceiver, ShmSender

NAMES = ("a.weight", "b.weight")


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((3, 4), value) for name in NAMES}


class Model(torch.nn.Module):
    """Takes weights as vLLM's models do: by name, into its own parameters; `broken` after the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(4, 3, bias=False)
        self.broken = False

    def load_weights(self, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        parameters, names = dict(self.named_parameters()), set()
        for name, tensor in named_tensors:
            if self.broken and names:
                raise RuntimeError("broken on purpose")
            parameters[name].copy_(tensor)
            names.add(name)
        return names

    @property
    def values(self) -> list[float]:
        return [float(p.detach().flatten()[0]) for p in self.parameters()]


class Scene:
    def __init__(self, folder: Path) -> None:
        self.model, self.sender = Model(), ShmSender(folder / "weights")
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        writing = Page(folder / "page", create=True)
        self.page = Page(folder / "page")
        self.plane = WorkerWeights(self.model, ShmReceiver(folder / "weights"), tensors(0.0), writing)

    def wait(self, condition: Any) -> Line:
        end = time.monotonic() + 20
        while not condition(line := self.page.read()):
            assert time.monotonic() < end, line
            time.sleep(0.002)  # another thread's page can not be waited on
        return line


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    worker = Scene(tmp_path)
    yield worker
    worker.plane.close()
    worker.sender.close()


def test_a_page_shows_the_last_whole_line_and_nothing_before_the_first(tmp_path: Path) -> None:
    writing = Page(tmp_path / "p", create=True)
    reading = Page(tmp_path / "p")
    assert reading.read() == Line()
    writing.write(Line((3, 30), (2, 20), "x" * 2 * SIZE))
    seen = reading.read()
    assert (seen.staged, seen.loaded, seen.newest) == ((3, 30), (2, 20), (3, 30)) and set(seen.trouble) == {"x"}
    with open(tmp_path / "p", "r+b") as file:
        file.write(b"\x03")  # a writer that died in the middle of its next line
    assert reading.read() == seen
    writing.write(Line((4, 40), (3, 30)))
    assert reading.read() == Line((4, 40), (3, 30))
    assert (tmp_path / "p").stat().st_mode & 0o777 == 0o600
    (tmp_path / "p").unlink()
    assert reading.read() == Line((4, 40), (3, 30))


def test_a_page_that_is_not_there_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere.*should have made it"):
        Page(tmp_path / "nowhere")


def test_a_version_is_staged_beside_the_model_and_loaded_only_when_told(scene: Scene) -> None:
    scene.sender.publish(1, 10, tensors(1.0))
    scene.wait(lambda line: line.staged == (1, 10))
    assert scene.model.values == [0.0, 0.0]
    assert scene.plane.prepare(True) == (1, 10) and scene.plane.commit(False) == (1, 10)
    assert scene.model.values == [1.0, 1.0] and scene.page.read().loaded == (1, 10)
    with pytest.raises(UserError, match="no version is staged"):
        scene.plane.commit(False)


def test_a_held_version_stays_and_an_unused_one_yields_to_newer(scene: Scene) -> None:
    scene.sender.publish(1, 10, tensors(1.0))
    scene.wait(lambda line: line.staged == (1, 10))
    assert scene.plane.prepare(True) == (1, 10)
    scene.sender.publish(2, 20, tensors(2.0))
    time.sleep(0.5)  # longer than a version waits for being loaded
    assert scene.page.read().staged == (1, 10)
    assert scene.plane.commit(True) == (1, 10) and float(scene.plane.tensors()["a.weight"][0, 0]) == 1.0
    assert scene.plane.release() == ""
    scene.wait(lambda line: line.staged == (2, 20))
    scene.sender.publish(3, 30, tensors(3.0))
    scene.wait(lambda line: line.staged == (3, 30))
    with pytest.raises(UserError, match="not held"):
        scene.plane.tensors()


def test_unfitting_tensors_are_named_on_the_page_and_never_reach_the_model(scene: Scene) -> None:
    scene.sender.publish(1, 10, {**tensors(1.0), "b.weight": torch.ones(3, 5)})
    line = scene.wait(lambda line: line.trouble)
    assert "b.weight" in line.trouble and line.newest == (-1, -1)
    assert scene.model.values == [0.0, 0.0]
    scene.sender.publish(2, 20, tensors(2.0))
    assert scene.wait(lambda line: line.staged == (2, 20)).trouble == ""


def test_a_half_failed_load_leaves_the_model_dirty_until_a_whole_one(scene: Scene) -> None:
    scene.model.broken = True
    scene.sender.publish(1, 10, tensors(1.0))
    scene.wait(lambda line: line.staged == (1, 10))
    with pytest.raises(RuntimeError, match="broken on purpose"):
        scene.plane.commit(False)
    assert scene.model.values == [1.0, 0.0] and "version 1 was not loaded to its end" in scene.plane.release()
    scene.model.broken = False
    assert scene.plane.commit(False) == (1, 10)
    assert scene.model.values == [1.0, 1.0] and scene.plane.release() == ""


def test_a_model_that_leaves_a_tensor_as_it_was_is_dirty(scene: Scene) -> None:
    scene.model.c = torch.nn.Linear(2, 2, bias=False)
    scene.sender.publish(1, 10, tensors(1.0))
    scene.wait(lambda line: line.staged == (1, 10))
    with pytest.raises(UserError, match=r"got no new value, first 'c\.weight'"):
        scene.plane.commit(False)
    assert scene.plane.release()


class Attention(torch.nn.Module):
    """Causal attention over one sequence, its arguments those of vLLM's layer; only heads of 32 and 64."""

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size, self.scale = head_size, scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        many = self.num_heads // self.num_kv_heads
        q = query.view(-1, self.num_heads, self.head_size).transpose(0, 1)
        k, v = (
            t.view(-1, self.num_kv_heads, self.head_size).repeat_interleave(many, 1).transpose(0, 1)
            for t in (key, value)
        )
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.transpose(0, 1).reshape(-1, self.num_heads * self.head_size)


@pytest.mark.parametrize(("head", "wide"), [(16, 32), (32, 32), (40, 64), (128, 128)])
def test_padded_heads_give_what_unpadded_ones_give(head: int, wide: int) -> None:
    class Padded(Attention):
        pass

    pad_heads(Padded, [32, 64])
    plain, padded = Attention(4, head, head**-0.5, 2), Padded(4, head, head**-0.5, num_kv_heads=2)
    assert padded.head_size == wide
    torch.manual_seed(0)
    query, key, value = torch.randn(5, 4 * head), torch.randn(5, 2 * head), torch.randn(5, 2 * head)
    torch.testing.assert_close(padded(query, key, value), plain(query, key, value), atol=1e-6, rtol=1e-5)


def request_of(**more: Any) -> Request:
    ids = np.array([5, 6, 7], np.int32)
    fields: dict[str, Any] = {"segment": 0, "prefix_ids": ids[:1], "temperature": 1.0, "top_p": 1.0, "seed": 3}
    return Request(key=1, uid=2, prompt_ids=ids, max_new_tokens=9, **(fields | more))


def output(ids: list[int], finish: str | None = None, spans: Any = None) -> Any:
    places = [{i: SimpleNamespace(logprob=-0.5)} for i in ids]
    completion = SimpleNamespace(token_ids=ids, logprobs=places, finish_reason=finish, weight_versions=spans)
    return SimpleNamespace(outputs=[completion])


def span(version: str, start: int, end: int) -> Any:
    return SimpleNamespace(version=version, start=start, end=end)


class Experts(torch.nn.Module):
    """The experts of a layer, whose kernel reads them packed if it has an `isa`."""

    def __init__(self, isa: str | None, zentorch: bool = False) -> None:
        super().__init__()
        kernel = SimpleNamespace(isa=isa, _use_zentorch=zentorch)
        self.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=kernel))
        self.w13_weight, self.w2_weight = (torch.nn.Parameter(torch.full((2, 4), 9.0)) for _ in range(2))


class Mixture(torch.nn.Module):
    """A model whose new weights do not cover the last column of its experts: padding of the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.packed, self.plain, self.zentorch = Experts("amx"), Experts(None), Experts("amx", zentorch=True)
        self.gate = torch.nn.Linear(3, 2, bias=False)

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        given, parameters = dict(named_tensors), dict(self.named_parameters())
        for name, tensor in given.items():
            parameters[name][:, :3] = tensor
        return set(given)


@pytest.mark.parametrize("cpu", [True, False])
def test_new_weights_of_experts_are_packed_again_on_a_cpu_alone(monkeypatch: pytest.MonkeyPatch, cpu: bool) -> None:
    asked: list[str] = []

    def pack(weight: torch.Tensor, isa: str) -> torch.Tensor:
        asked.append(isa)
        return weight.flip(-1).flatten()  # of the same size, and another shape

    stubs: dict[str, Any] = {
        "vllm": ModuleType("vllm"), "vllm._custom_ops": SimpleNamespace(cpu_prepack_moe_weight=pack),
        "vllm.platforms": SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: cpu)),
    }
    for name, module in stubs.items():
        monkeypatch.setitem(sys.modules, name, module)
    model, rows = Mixture(), torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    names = {name for name, _ in model.named_parameters()}
    assert cpu_patches.load(model, ((name, rows) for name in names)) == names
    assert torch.equal(model.gate.weight, rows)
    beside = torch.tensor([[1.0, 2.0, 3.0, 9.0], [4.0, 5.0, 6.0, 9.0]])
    packed = torch.tensor([[0.0, 3.0, 2.0, 1.0], [0.0, 6.0, 5.0, 4.0]]) if cpu else beside
    assert asked == ["amx", "amx"] * cpu
    for name in ("w13_weight", "w2_weight"):
        assert torch.equal(getattr(model.packed, name), packed)
        assert torch.equal(getattr(model.plain, name), beside) and torch.equal(getattr(model.zentorch, name), beside)


def test_versions_are_counted_and_those_that_vllm_notes_itself_are_believed() -> None:
    running = Running(request_of())
    running.take(output([8, 9]), 4)
    running.take(output([10, 11], "stop", [span("4", 0, 1), span("5", 1, 4)]), 5)
    finished = running.finished(running.finish)
    assert finished.versions.tolist() == [4, 5, 5, 5] and finished.finish == Finish.EOS
    assert finished.token_ids.tolist() == [8, 9, 10, 11]
    without = Running(request_of())
    without.take(output([8, 9]), 4)
    without.take(output([10], "length", [span("default", 0, 3)]), 5)
    assert without.finished(without.finish).versions.tolist() == [4, 4, 5]


def test_a_greedy_answer_has_probability_one_and_an_empty_one_no_token() -> None:
    running = Running(request_of(temperature=0.0))
    running.take(output([8], "length"), 4)
    assert running.finished(running.finish).logprobs.tolist() == [0.0]
    assert len(PartialAnswer(request_of()).finished(Finish.LENGTH).token_ids) == 0


def test_seeds_are_the_samples_own() -> None:
    seeds = {seed_of(request_of(seed=s, segment=g), n) for s in range(4) for g in range(4) for n in range(4)}
    assert len(seeds) == 64 and all(0 <= seed < 1 << 63 for seed in seeds)
    assert seed_of(request_of(), 0) == seed_of(request_of(temperature=0.5), 0)


class Whole:
    """As much of AsyncLLM as is looked at."""

    engine_core = SimpleNamespace()

    def generate(self) -> None: ...
    def abort(self) -> None: ...
    def collective_rpc(self) -> None: ...
    def pause_generation(self, *, mode: str, clear_cache: bool) -> None: ...
    def resume_generation(self) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def shutdown(self) -> None: ...


def test_what_a_version_can_do_is_found_by_looking_at_it() -> None:
    old = abilities_of(Whole(), "0.24.0")
    assert not (old.weight_version or old.bare_pause)

    class Newer(Whole):
        engine_core = SimpleNamespace(pause_scheduler_async=lambda mode, clear_cache: None)

        def update_weight_version(self, version: str) -> None: ...

    new = abilities_of(Newer(), "0.32.0")
    assert new.weight_version and new.bare_pause


def test_a_version_that_lacks_what_nothing_replaces_is_refused_by_name() -> None:
    class Without(Whole):
        pause_generation = None

    with pytest.raises(UserError, match=r"vLLM 0.24.0 has no AsyncLLM.pause_generation"):
        abilities_of(Without(), "0.24.0")

    class Other(Whole):
        def pause_generation(self) -> None: ...

    with pytest.raises(UserError, match="has no clear_cache"):
        abilities_of(Other(), "0.24.0")


def test_the_plain_forward_pass_is_that_of_the_tensors_given(model_folder: Any) -> None:
    from transformers import AutoModelForCausalLM

    for kind in ("qwen3", "llama"):  # tied and not
        folder = str(model_folder(kind))
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        ids = [5, 6, 7, 8, 9, 10]
        logprobs = plain_logprobs(folder, {name: p.data for name, p in model.named_parameters()}, ids, 0.7)
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, :-1] / 0.7
        expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-6)
