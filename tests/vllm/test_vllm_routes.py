"""Routes of answers of vLLM: those of a plain forward pass, however the answer came about."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from moe_models import moe_model
from vllm_scene import EOS_ID, EXACT, LENGTH, VOCABULARY, Scene, request

from busrl.data.routing import first_fault, routing_of
from busrl.engines.base import Finished, PartialAnswer, Request
from busrl.errors import UserError
from busrl.states import Finish
from busrl.weights import factory

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
COMPARED = 10_000  # rows of layers, at least, of which none may differ
ROUNDED = 0.2  # nats, of one token, by the routes that it was drawn over
PIECE = 64  # tokens of a step
LAYERS = (0, 1, 3, 4, 5)
SHAPE: dict[str, Any] = {
    "layers": 6, "experts": 32, "top_k": 4, "hidden": 128, "mlp_only_layers": [2], "vocab_size": len(VOCABULARY),
    "eos_token_id": EOS_ID, "pad_token_id": 0, "max_position_embeddings": 256,
}


def mixture(_: Any, seed: int, dtype: str) -> Any:
    model = moe_model(seed=seed, **SHAPE).to(getattr(torch, dtype)).eval().requires_grad_(False)
    model.get_output_embeddings().weight[EOS_ID] = 0.0  # so that answers end seldom
    return model


def forward(model: Any, ids: list[int], given: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Routes of a plain forward pass over all but the last of `ids`, and log-probabilities of ids[1:]; over the `given`
    routes instead of its own, which its own routers weigh."""
    noted: list[torch.Tensor] = []

    def hook(_: Any, __: Any, made: Any) -> Any:
        logits, weights, chosen = made
        if given is None:
            noted.append(chosen)
            return None
        chosen = torch.from_numpy(given[:, len(noted)].astype(np.int64))
        noted.append(chosen)
        weights = torch.softmax(logits, -1, dtype=torch.float).gather(-1, chosen)
        return logits, (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), chosen

    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    handles = [router.register_forward_hook(hook) for router in routers]
    with torch.inference_mode():
        logits = model(torch.tensor([ids[:-1]])).logits[0].float()
    for handle in handles:
        handle.remove()
    logprobs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    return torch.stack(noted, 1).numpy(), logprobs.numpy()


class Mixture(Scene):
    """An engine that gives routes, and models whose routers can be listened to and told."""

    def __init__(self, folder: Path, dtype: str = "float32", layers: tuple[int, ...] = LAYERS, **more: Any) -> None:
        config = mixture(None, 0, dtype).config
        routing = routing_of(config.to_dict())
        assert routing is not None and routing.layers == LAYERS
        self.routing = replace(routing, layers=layers)
        super().__init__(folder, tied=False, config=config, dtype=dtype, routing=self.routing, make=mixture,
                         check_parameters=0, **more)

    def sound(self, asked: Request, made: Finished) -> np.ndarray:
        """The routes that came with an answer, once they are found to be sound."""
        read = len(asked.prompt_ids) + len(asked.prefix_ids) - 1
        assert made.routes is not None and made.prompt_routes is not None
        assert not first_fault(made.routes, len(made.token_ids), self.routing)
        assert not first_fault(made.prompt_routes, read - asked.routes_from, self.routing)
        return np.concatenate([made.prompt_routes, made.routes])

    def differing(self, asked: Request, made: Finished) -> tuple[int, int]:
        """Rows of layers of other experts than a plain forward pass takes with the weights of the token behind the
        row, and how many there are."""
        ids = ids_of(asked, made)
        read = len(ids) - len(made.token_ids) - 1
        versions = [int(made.versions[0])] * (read - asked.routes_from) + made.versions.tolist()
        rows = self.sound(asked, made)
        other = 0
        for version in set(versions):
            plain, _ = forward(self.model(version), ids)
            mine = np.array(versions) == version
            other += int(unlike(plain[asked.routes_from :], rows)[mine].sum())
        return other, rows.shape[0] * rows.shape[1]


def ids_of(asked: Request, made: Finished) -> list[int]:
    return [*asked.prompt_ids.tolist(), *asked.prefix_ids.tolist(), *made.token_ids.tolist()]


def unlike(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Whether the experts of a row and layer are others, in whatever order."""
    return (np.sort(one, -1) != np.sort(other, -1)).any(-1)


def prompt(first: int, length: int) -> list[int]:
    """Ids that no other prompt begins with."""
    ids: list[int] = np.random.default_rng(first).integers(2, len(VOCABULARY), length).tolist()
    return ids


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixture]:
    """Prompts longer than a step takes come in pieces."""
    made = Mixture(tmp_path_factory.mktemp("moe") / "model", extra={"max_num_batched_tokens": str(PIECE)})
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "moe" in request.fixturenames:
        request.getfixturevalue("moe").clear()


def test_routes_in_float32_are_those_of_a_plain_forward_pass(moe: Mixture) -> None:
    """Prompts of their own, more of them together than a step takes, three times as many as have room at once."""
    asked = [request(key, prompt(key, 50 + key), 80) for key in range(24)]
    made = moe.run(*asked[:8]) | moe.run(*asked[8:16]) | moe.run(*asked[16:])
    counts = [moe.differing(one, made[one.key]) for one in asked]
    assert sum(count for _, count in counts) >= COMPARED
    assert sum(other for other, _ in counts) == 0


def test_a_cached_prefix_has_the_routes_of_who_computed_it(moe: Mixture) -> None:
    asked = request(1, prompt(100, 90), 20)
    first = moe.run(asked)[1]
    again = [request(key, prompt(100, 90), 20) for key in range(2, 6)]
    found = moe.run(*again)
    assert first.computed == 90 and {one.computed for one in found.values()} == {90 - 64}
    for one in again:
        assert moe.differing(one, found[one.key])[0] == 0
        assert (found[one.key].prompt_routes == first.prompt_routes).all()


def test_segments_and_turns_bring_the_rows_that_their_caller_lacks(moe: Mixture) -> None:
    first = request(1, prompt(200, 40), 30)
    one = moe.run(first)[1]
    path = ids_of(first, one)
    segment = request(1, prompt(200, 40), 30, segment=1, prefix_ids=one.token_ids, routes_from=len(path) - 1)
    two = moe.run(segment)[1]
    assert moe.sound(segment, two).shape[0] == len(two.token_ids)
    path = ids_of(segment, two)
    turn = request(1, [*path, 7, 8, 9], 20, segment=2, routes_from=len(path) - 1)  # a tool's answer is read by it
    three = moe.run(turn)[1]
    assert moe.sound(turn, three).shape[0] == 3 + len(three.token_ids)
    joined = np.concatenate([moe.sound(first, one), moe.sound(segment, two), moe.sound(turn, three)])
    plain, _ = forward(moe.model(moe.engine.version), ids_of(turn, three))
    assert joined.shape == plain.shape and not unlike(joined, plain).any()


def test_an_aborted_answer_and_its_rest_have_each_row_once(moe: Mixture) -> None:
    asked = request(1, prompt(300, 70), 80)
    answer = PartialAnswer(asked)
    with moe.slow_steps():
        for tokens in (3, 7):
            moe.engine.submit([answer.rest()])
            moe.wait_for_tokens(tokens)
            piece = moe.engine.abort(1)
            assert piece is not None and piece.finish == Finish.ABORTED and len(piece.token_ids) >= tokens
            answer.add_piece(piece)
    answer.add_piece(moe.run(answer.rest())[1])
    whole = answer.finished(Finish.LENGTH)
    assert whole.routes is not None and len(whole.routes) == len(whole.token_ids)
    assert moe.differing(asked, whole)[0] == 0


def test_requests_aborted_before_their_first_token_leave_nothing(moe: Mixture) -> None:
    with moe.slow_steps():
        moe.engine.submit([request(key, prompt(400 + key, 150), 4) for key in range(8)])
        ended = moe.engine.pause("abort")
        moe.engine.resume()
    assert len(ended) == 8 and all(one.routes is None for one in ended if not len(one.token_ids))
    asked = request(9, prompt(500, 20), 4)
    assert moe.differing(asked, moe.run(asked)[9])[0] == 0
    assert moe.engine.core.rpc("busrl_routes_left") == [0]


def test_answers_over_an_update_keep_the_route_of_the_weights_that_drew(moe: Mixture) -> None:
    """The caches are computed again: an earlier row has another route then, and keeps its first."""
    engine, settings = moe.engine, moe.settings("shm")
    sender, receiver = factory.make_sender(settings), engine.receiver(settings, "rollout-0")
    assert receiver is not None
    old = engine.version
    try:
        asked = [request(key, prompt(600 + key, 40), 90) for key in range(4)]
        with moe.slow_steps():
            engine.submit(asked)
            moe.wait_for_tokens(12)
            moe.pause()
            sender.publish(old + 1, 10, moe.tensors(old + 1))
            receiver.wait_for(old + 1, 60)
            engine.resume()
            assert engine.update_weights(receiver) == (old + 1, 10)
        made = moe.finish(len(asked))
        assert any(set(one.versions.tolist()) == {old, old + 1} for one in made.values())
        assert sum(moe.differing(one, made[one.key])[0] for one in asked) == 0
    finally:
        receiver.close()
        sender.close()


def test_preempted_answers_have_every_row_once(tmp_path: Path) -> None:
    """The cache has room for two and a half of eight answers that all begin."""
    blocks = 12
    scene = Mixture(tmp_path / "model", extra={"num_gpu_blocks_override": str(blocks)})
    try:
        asked = [request(key, prompt(key, 20), LENGTH - 20) for key in range(8)]
        made = scene.run(*asked)
        assert sum(len(one.token_ids) + 20 for one in made.values()) > 2 * 32 * blocks
        assert sum(scene.differing(one, made[one.key])[0] for one in asked) == 0
    finally:
        scene.close()


def test_the_first_of_two_workers_says_what_both_chose(tmp_path: Path) -> None:
    scene = Mixture(tmp_path / "model", tensor_parallel=2)
    try:
        asked = [request(key, prompt(key, 20), 30) for key in range(4)]
        made = scene.run(*asked)
        assert sum(scene.differing(one, made[one.key])[0] for one in asked) == 0
    finally:
        scene.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_new_weights_and_their_routes_explain_every_token(tmp_path: Path, dtype: str) -> None:
    """After each of five updates. In 16 bits a trainer that takes the engine's experts is less far off than one that
    chooses its own: 0.49 times on average, and 0.24 times at the 99th percentile, where this was written."""
    scene = Mixture(tmp_path / "model", dtype)
    settings = scene.settings("shm")
    sender, receiver = factory.make_sender(settings), scene.engine.receiver(settings, "rollout-0")
    assert receiver is not None
    own, replayed = list[float](), list[float]()
    try:
        for version in range(1, 6):
            sender.publish(version, version, scene.tensors(version))
            receiver.wait_for(version, 60)
            assert scene.engine.update_weights(receiver) == (version, version)
            asked = [request(key, prompt(100 * version + key, 60), 150) for key in range(8)]
            made = scene.run(*asked)
            for one in asked:
                answer = made[one.key]
                assert set(answer.versions.tolist()) == {version}
                for kind, given in ((own, None), (replayed, scene.sound(one, answer))):
                    _, logprobs = forward(scene.model(version), ids_of(one, answer), given)
                    kind += np.abs(logprobs[-len(answer.token_ids) :] - answer.logprobs).tolist()
    finally:
        receiver.close()
        sender.close()
        scene.close()
    if dtype == "float32":
        assert max(own) < EXACT and max(replayed) < EXACT
    else:
        assert max(replayed) < ROUNDED
        assert np.mean(replayed) <= 0.6 * np.mean(own)  # machines round otherwise, and the tail is 27 tokens
        assert np.quantile(replayed, 0.99) <= 0.35 * np.quantile(own, 0.99)


def test_a_model_of_other_layers_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'routers in the layers \[0, 1, 3, 4, 5\], .*learner.routes = "own"'):
        Mixture(tmp_path / "model", layers=(0, 1, 2, 3, 4, 5))
