"""Routes joined to the answers of vLLM, as it gives them itself or as its workers noted them; without vLLM."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np
import pytest

from busrl.data.routing import Routing
from busrl.engines.base import Request
from busrl.engines.vllm.engine import Running
from busrl.engines.vllm.routes import Routes
from busrl.engines.vllm_versions import routes_fault
from busrl.errors import UserError
from busrl.states import Finish

ROUTING = Routing(layers=(1, 3), experts=8, top_k=2)


def rows_of(count: int) -> np.ndarray:
    """Routes of all layers of a model, as vLLM gives them, its dense layers zeros."""
    rows = np.zeros((count, 4, 2), np.uint8)
    for layer in ROUTING.layers:
        rows[:, layer, 0] = np.arange(count) % 8
        rows[:, layer, 1] = (np.arange(count) + layer) % 8
    return rows


def answer(tokens: int, finish: int = Finish.EOS, routes_from: int = 0, key: int = 1) -> Running:
    """An answer behind a prompt of five tokens and a prefix of two."""
    ids = np.arange(5, dtype=np.int32)
    running = Running(Request(key, key, 0, ids, ids[:2], 9, 1.0, 1.0, 3, routes_from=routes_from))
    running.add(range(tokens), [-0.5] * tokens, [4] * tokens)
    running.finish = finish
    return running


class Workers:
    """As much of a core as is called: its workers have noted the routes of these requests."""

    version = "0.32.0"

    def __init__(self, fault: str = "") -> None:
        self.fault, self.noted, self.calls, self.engine = fault, dict[str, np.ndarray](), list[int](), self
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    def rpc(self, method: str, layers: list[int], top_k: int, dtype: str) -> list[str]:
        assert (method, layers, top_k, dtype) == ("busrl_note_routes", [1, 3], 2, "uint8")
        return [self.fault, ""]

    async def collective_rpc(self, method: str, args: Any) -> list[list[bytes]]:
        assert method == "busrl_take_routes"
        self.calls.append(len(args[0]))
        await self.may_answer.wait()
        return [[self._take(*one) for one in args[0]], []]

    def _take(self, name: str, begin: int, end: int) -> bytes:
        rows = self.noted.pop(name, np.zeros((0, 4, 2), np.uint8))
        return rows[begin:end, [1, 3]].tobytes() if len(rows) >= end else b""


def joined(routes: Routes, *ended: Running) -> list[Running]:
    found: list[Running] = []
    asyncio.run(routes.join(list(ended), found.extend))
    return found


@pytest.mark.parametrize("skips", [True, False])
def test_rows_of_vllm_are_cut_to_what_was_asked(skips: bool) -> None:
    routes, running = Routes(Workers(), ROUTING, native=True, skips=skips), answer(3, routes_from=4)
    assert routes.settings(running) == ({"routed_experts_prompt_start": 4} if skips else {})
    whole = rows_of(5 + 2 + 3 - 1)
    running.routed = whole[4:] if skips else whole
    assert joined(routes, running) == [running]
    made = running.finished(Finish.EOS)
    assert made.prompt_routes.tolist() == whole[4:6, [1, 3]].tolist() and len(made.prompt_routes) == 2
    assert made.routes.tolist() == whole[6:9, [1, 3]].tolist() and made.routes.dtype == np.uint8


@pytest.mark.parametrize("rows", [None, rows_of(8), rows_of(9)[:, :3], rows_of(9)[..., :1]])
def test_an_aborted_answer_without_its_routes_is_drawn_again(rows: Any, caplog: pytest.LogCaptureFixture) -> None:
    routes = Routes(Workers(), ROUTING, native=True, skips=True)
    cut, whole = answer(3, Finish.ABORTED, key=1), answer(3, key=2)
    cut.routed = whole.routed = rows
    assert joined(routes, cut, whole) == [cut, whole]
    made = cut.finished(Finish.ABORTED)
    assert len(made.token_ids) == len(made.logprobs) == len(made.versions) == 0 and made.routes is None
    assert len(whole.token_ids) == 3 and whole.finished(Finish.EOS).routes is None
    assert "no routes for request 2.2.0" in caplog.text


def test_many_ends_are_one_call_and_an_answer_ends_once() -> None:
    """A call is under way when others end; one of these is cut, too, which waits for the same routes."""
    workers = Workers()
    routes = Routes(workers, ROUTING, native=False, skips=True)
    answers = [answer(3, key=key) for key in range(6)]
    for running in answers:
        routes.begin(running)
        workers.noted[running.id] = rows_of(9)
    found: list[Running] = []

    def end(ended: list[Running]) -> None:
        found.extend(ended)
        for running in ended:
            running.over = True

    async def together() -> None:
        workers.may_answer.clear()
        joins = [asyncio.ensure_future(routes.join([running], end)) for running in answers]
        cut = asyncio.ensure_future(routes.join(answers[:2], end))
        while not workers.calls:
            await asyncio.sleep(0)
        workers.may_answer.set()
        await cut
        assert all(running.over for running in answers[:2])
        await asyncio.gather(*joins)

    asyncio.run(together())
    assert sorted(found, key=id) == sorted(answers, key=id) and not workers.noted
    assert len(workers.calls) <= 2 and sum(workers.calls) == len(answers)
    assert all(len(running.finished(Finish.EOS).routes) == 3 for running in answers)


def test_two_requests_of_one_sample_have_names_of_their_own() -> None:
    routes = Routes(Workers(), ROUTING, native=False, skips=True)
    first, second = answer(0), answer(0)
    routes.begin(first)
    routes.begin(second)
    assert first.id != second.id and first.id.endswith("1.1.0")


def test_a_vllm_that_cannot_say_is_refused_with_a_remedy() -> None:
    with pytest.raises(UserError, match=r'vLLM 0.32.0 cannot say .*: no router; set learner.routes = "own"'):
        Routes(Workers("no router"), ROUTING, native=False, skips=True)
    routes = Routes(Workers(), ROUTING, native=True, skips=True)
    with pytest.raises(UserError, match="without any"):
        asyncio.run(routes.prove(answer(1)))
    wrong = answer(1)
    wrong.routed = np.zeros_like(rows_of(7))
    with pytest.raises(UserError, match=r"wrong ones: row 0, layer 1: expert 0 twice"):
        asyncio.run(routes.prove(wrong))
    sound = answer(1)
    sound.routed = rows_of(7)
    asyncio.run(routes.prove(sound))


@pytest.fixture
def files(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A vLLM of files alone, which is found and never imported."""
    root = tmp_path / "vllm"
    texts = {
        "__init__.py": "raise ImportError", "engine/arg_utils.py": "enable_return_routed_experts: bool",
        "outputs.py": "routed_experts", "v1/worker/gpu_model_runner.py": "def _model_forward(",
        "model_executor/layers/fused_moe/router/base_router.py": "def set_capture_fn(",
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr("busrl.engines.vllm_versions.vllm_installed", lambda: ("vllm", "0.30.0"))
    return root


def test_the_files_of_a_vllm_say_whether_it_can_give_routes(files: Any) -> None:
    assert routes_fault("cuda", "auto", {}) == routes_fault("cpu", "auto", {}) == ("", "")
    (files / "outputs.py").write_text("class CompletionOutput")
    assert "vllm 0.30.0 does not say which experts it chose: its outputs.py has no routed_experts" in routes_fault(
        "cuda", "auto", {})[0]
    assert routes_fault("cpu", "auto", {}) == ("", "")
    (files / "model_executor/layers/fused_moe/router/base_router.py").unlink()
    assert "base_router.py has no set_capture_fn" in routes_fault("cpu", "auto", {})[0]


@pytest.mark.parametrize(("device", "eager", "extra", "said"), [
    ("cuda", "off", {}, ""), ("cpu", "on", {}, ""), ("cpu", "off", {}, "enforce_eager"),
    ("cpu", "auto", {"speculative_config": "{}"}, "speculative_config"),
    ("cuda", "auto", {"pipeline_parallel_size": "2"}, "pipeline_parallel_size"),
    ("cuda", "auto", {"pipeline_parallel_size": "1", "speculative_config": "{}"}, ""),
    ("cuda", "auto", {"decode_context_parallel_size": "2"}, "decode_context_parallel_size"),
    ("cuda", "auto", {"prefill_context_parallel_size": "2"}, "prefill_context_parallel_size"),
    ("cuda", "auto", {"speculative_config": '{"enable_adaptive_verification": true}'}, "enable_adaptive_verification"),
    ("cuda", "auto", {"speculative_config": '{"enable_adaptive_verification": "On"}'}, "enable_adaptive_verification"),
    ("cuda", "auto", {"speculative_config": '{"enable_adaptive_verification": false}'}, ""),
    ("cuda", "auto", {"speculative_config": '{"method": "dspark"}'}, ""),
    ("cuda", "auto", {"speculative_config": "no JSON"}, ""),
    ("cuda", "auto", {"kv_transfer_config": '{"kv_connector": "NixlConnector"}'}, "kv_transfer_config"),
    ("cuda", "auto", {"kv_transfer_config": '{"kv_connector": "MooncakeConnector"}'}, "kv_transfer_config"),
    ("cuda", "auto", {"kv_transfer_config": '{"kv_connector": "MoRIIOConnector"}'}, "kv_transfer_config"),
    ("cuda", "auto", {"kv_transfer_config": '{"kv_connector": "OffloadingConnector"}'}, ""),
])
def test_arguments_with_which_no_routes_come_are_named(
    files: Any, device: str, eager: str, extra: dict[str, str], said: str
) -> None:
    why, argument = routes_fault(device, eager, extra)
    assert said in why and bool(why) == bool(said) and (argument in extra) == bool(said and extra)


@pytest.mark.parametrize("wrong", [256, -256])
def test_ids_that_no_byte_holds_give_no_rows(wrong: int, caplog: pytest.LogCaptureFixture) -> None:
    """As a byte they would be other experts, which nobody could tell."""
    routes, running = Routes(Workers(), ROUTING, native=True, skips=True), answer(3)
    running.routed = rows_of(9).astype(np.int32)
    running.routed[-1, 1, 0] += wrong
    joined(routes, running)
    assert running.finished(Finish.EOS).routes is None
    assert f"vLLM named expert {wrong}, and the model has 8" in caplog.text
    sound = answer(3, key=2)
    sound.routed = rows_of(9).astype(np.int32)
    joined(routes, sound)
    assert sound.finished(Finish.EOS).routes.dtype == np.uint8


def test_another_python_answers_for_its_own_vllm(files: Any) -> None:
    assert routes_fault("cpu", "off", {}, sys.executable) == routes_fault("cpu", "off", {})
    assert routes_fault("cpu", "off", {}, "/nowhere/python") == ("", "")
