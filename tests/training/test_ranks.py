"""Several ranks against one: the same losses, gradient norms and weights, whoever computed which micro-batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from busrl.algorithms import diagnostics
from busrl.preflight.memory import Work, learner_sum
from busrl.ranks import mesh
from busrl.ranks.mesh import Layout, Meshes, ShardedForward
from busrl.training import optimizers, packing, sharded
from busrl.training.batch import flatten
from busrl.training.forward import JoinedRows, PackedRows, PaddedRows
from busrl.training.step_stats import added_up
from tests.training import rank_program

PROGRAM = Path(rank_program.__file__)
LIMIT_S = 900
COUNTS = [diagnostics.FIELDS.index(name) for name in ("clip_low", "clip_high", "dual")]  # of tokens beyond a bound


def run_ranks(folder: Path, world: int, steps: int, families: Sequence[str]) -> None:
    """All ranks as processes of their own, to their end."""
    for family in {family.partition(":")[0] for family in families}:
        rank_program.build(family).save_pretrained(str(folder / family), max_shard_size="40KB")
    store, _listening = mesh.open_store(world, 60)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    parts = [str(world), str(store.port), str(folder), str(steps), *families]
    processes = [
        subprocess.Popen([sys.executable, str(PROGRAM), str(rank), *parts], env=environment, stderr=subprocess.PIPE)
        for rank in range(world)
    ]
    try:
        for rank, process in enumerate(processes):
            _, words = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, f"rank {rank}: {words.decode()[-3000:]}"
    finally:
        for process in processes:
            process.kill()
            process.wait()


def of_all(folder: Path, family: str, world: int) -> dict[str, Any]:
    """What all ranks computed together."""
    actual = [json.loads((folder / f"{family}.{rank}.json").read_text()) for rank in range(world)]
    assert len({json.dumps(one["norms"]) for one in actual}) == 1, "the ranks disagree about the norm"
    for one in actual:
        if again := one.get("again"):
            limit = 1e-2 if ":lora16" in family else 1e-5  # sums over a cut layer are rounded
            assert again[0] == pytest.approx(again[1], rel=limit), "ranks of one axis continue what others saved"
    counted = [one for one in actual if one["counts"]]
    sums = np.sum([one["losses"] for one in counted], axis=0)
    tokens = np.sum([one["tokens"] for one in counted], axis=0)
    return {
        "way": actual[0]["way"], "losses": sums, "norms": actual[0]["norms"], "tokens": tokens,
        "weights": dict(np.load(folder / f"{family}.npz")), "bytes": [one["bytes"] for one in actual],
        **{name: [added_up(of_ranks) for of_ranks in zip(*(one[name] for one in counted), strict=True)]
           for name in ("routes", "compared")},
    }


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found["tokens"]) == expected["tokens"]
    np.testing.assert_allclose(found["losses"], np.array(expected["losses"]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=1e-5)
    np.testing.assert_array_equal(found["routes"], expected["routes"])
    for ours, theirs in zip(found["compared"], expected["compared"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():  # Adam makes a step of what rounding left of a gradient near 0
        np.testing.assert_allclose(found["weights"][name], weight, atol=5e-5, err_msg=name)


def assert_rounded(found: np.ndarray, expected: np.ndarray, rtol: float, cut: bool) -> None:
    """Sums of a step. Where layers are `cut`, a token at a bound of the clip may fall to its other side."""
    near = np.isclose(found, expected, rtol=rtol, atol=1e-3)
    if cut:
        near[:, COUNTS] |= abs(found - expected)[:, COUNTS] <= 1
    assert near.all(), (found[~near], expected[~near])


def assert_nearly_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Eight bits are by blocks of a part: those of several ranks are others than those of one, a little."""
    np.testing.assert_allclose(found["losses"], np.array(expected["losses"]), rtol=1e-2, atol=1e-2)
    for name, weight in expected["weights"].items():
        np.testing.assert_allclose(found["weights"][name], weight, atol=1e-2, err_msg=name)


def assert_in_parts(ranks: Sequence[dict[str, int]]) -> None:
    """Every rank read and holds its own rows of each tensor; of what it reads at once none is whole but small ones."""
    whole = ranks[0]["whole"]
    assert sum(one["held"] for one in ranks) == whole
    assert sum(one["read"] for one in ranks) == whole
    for one in ranks:
        assert one["read"] == one["held"] <= whole / len(ranks) * 1.1
        assert one["largest"] < whole / 4


def assert_as_check_says(folder: Path, family: str, layout: Layout, ranks: Sequence[dict[str, int]]) -> None:
    """What each rank holds is within 10 % of the sum per device that `busrl check` prints."""
    config = json.loads((folder / family.partition(":")[0] / "config.json").read_text())
    work = Work(60, ranks=layout.ranks, replicate=layout.replicate, tensor=layout.tensor, expert=layout.expert)
    said = learner_sum(config, work, ranks[0]["whole"] // 4)
    for one in ranks:
        for name, key in (("weights", "held"), ("gradient", "gradient"), ("optimiser (adamw)", "states")):
            assert said[name] == pytest.approx(one[key], rel=0.1), f"{family}: {name}"


def as_one_rank(folder: Path, world: int, steps: int, families: Sequence[str]) -> None:
    """Trains each family, perhaps of a kind (`qwen3:lora`), on so many ranks and on one."""
    run_ranks(folder, world, steps, families)
    for family in families:
        name, _, kind = family.partition(":")
        actual = of_all(folder, family, world)
        assert actual["way"] == "sharded packed", family
        kind, layout, _ = rank_program.axes_of(kind, world)
        expected = rank_program.alone(name, steps, "" if kind == "again" else kind, layout.shares)  # not again
        if kind in ("bfloat16", "lora16"):
            losses, norms = (5e-3, 1e-2) if layout.tensor > 1 else (1e-3, 1e-4)  # sums over a cut layer are rounded
            assert all(one.dtype == np.float32 for one in actual["weights"].values()), "trained in float32"
            assert_rounded(np.array(actual["losses"]), np.array(expected["losses"]), losses, layout.tensor > 1)
            # A token on the other side of a bound gives or takes its whole gradient.
            same = (np.array(actual["losses"]) == np.array(expected["losses"]))[:, COUNTS].all(1)
            assert same.sum() >= 0.9 * len(same) and (same.all() or layout.tensor > 1)
            for begun, limit in ((slice(steps // 2), norms), (slice(steps), 1e-2)):  # a weight may be rounded otherwise
                norms_here, there = (np.array(side["norms"])[begun][same[begun]] for side in (actual, expected))
                np.testing.assert_allclose(norms_here, there, rtol=limit)
        elif kind == "adamw8bit":
            assert_nearly_equal(actual, expected)
        else:
            assert_equal(actual, expected)
        assert any(expected["compared"]) == (kind == "routes"), "what ranks and one rank compare is not empty"
        if kind in ("", "again", "bfloat16"):
            assert_as_check_says(folder, family, layout, actual["bytes"])
        if not kind.startswith("lora") and layout == Layout(world):
            assert_in_parts(actual["bytes"])


SOME = [
    "qwen2:layers", "qwen3moe:again", "qwen3:lora16",
    "qwen2:@tensor=2", "qwen3moe:@expert=2", "llama:@replicate=2,offload=1",
    "qwen3:lora@tensor=2", "qwen2:adafactor@tensor=2", "qwen2:rows@tensor=2",
    "qwen3moe:routes", "qwen3moe:routes@expert=2", "qwen3moe:routesagain@tensor=2",
]
AXES = [
    "llama:@tensor=2", "qwen2:again@tensor=2", "qwen3:@tensor=2,offload=1", "qwen3:@replicate=2,tensor=2",
    "qwen3moe:@tensor=2", "qwen3moe:again@expert=4", "qwen3moe:@tensor=2,expert=2", "qwen3moe:@replicate=2,expert=2",
    "llama:lora@tensor=2", "qwen3moe:lora@expert=2", "qwen3moe:lora@tensor=2,expert=2",
    "qwen2:adafactor@tensor=2", "qwen3moe:adafactor@expert=4", "llama:adafactor@replicate=2",
    "qwen3moe:routes@expert=4", "qwen3moe:routesagain@tensor=2,expert=2",
]
KINDS = {
    "": list(rank_program.FAMILIES), "again": [f"{family}:again" for family in rank_program.FAMILIES],
    "lora": [f"{family}:lora" for family in rank_program.FAMILIES],
    "others": ["qwen3:bfloat16", "qwen3:lora16", "qwen2:layers", "qwen2:adafactor", "qwen3:lora@tensor=2",
               "qwen3:lora16@tensor=2"],
}


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Meshes]:
    """The mesh of one rank, which is this process."""
    store, _listening = mesh.open_store(1, 60)
    yield mesh.join(store, "views", 0, 1, torch.device("cpu"), 60)
    mesh.leave()


@pytest.mark.parametrize("way", [PackedRows, PaddedRows, JoinedRows])
def test_what_leaves_a_wrapped_module_may_be_changed_in_place(way: type[PaddedRows], alone: Meshes) -> None:
    """FSDP2 hooks backward to the tensors that a module returns, and an operation in place on a view drops the hook."""
    gradients = []
    for spread in (False, True):
        model = rank_program.build("qwen3")
        if way is PackedRows:
            packing.adopt(model)
        forward: Any = way(model)
        if spread:
            mesh.shard(model, alone)
            forward = ShardedForward(forward)
        samples = [rank_program.sample(np.random.default_rng(uid), uid) for uid in range(3)]
        flat = flatten(samples, torch.float32, torch.device("cpu"))
        (logprobs, entropy), hidden = forward.with_states(samples, flat)
        states = forward.states(samples)
        scored, _ = forward.score(samples, flat)
        if spread:
            assert [logprob._base for logprob in (logprobs, entropy, hidden, states, scored)] == [None] * 5
        for logprob in (logprobs, states, scored):  # backward reads the others again
            logprob *= 3
        (logprobs.sum() + entropy.sum() + 0.1 * hidden.square().sum() + states.sum() + scored.sum()).backward()
        gradients.append({name: sharded.gathered(parameter.grad) for name, parameter in model.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.long
def test_two_ranks_train_as_one_does(tmp_path: Path) -> None:
    as_one_rank(tmp_path, 2, 3, SOME)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_ranks_along_two_axes_train_as_one_does(tmp_path: Path) -> None:
    """And ranks of one axis go on from what they saved."""
    as_one_rank(tmp_path, 4, 5, AXES)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_train_as_one_does_for_every_family(tmp_path: Path, world: int, kind: str) -> None:
    """Tied and untied, with what a backward needs kept and computed again, adapters, in bfloat16; steps of one to five
    micro-batches of uneven lengths, in some of which a rank has nothing to do."""
    as_one_rank(tmp_path, world, 20, KINDS[kind])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_states_of_eight_bits_over_ranks_train_nearly_as_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(optimizers, "SMALL", 256)
    monkeypatch.setenv("SMALL", "256")
    as_one_rank(tmp_path, 4, 3, [f"qwen3moe:adamw8bit@{axes}" for axes in ("expert=4", "tensor=2,expert=2")])
