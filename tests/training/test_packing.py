"""Packed rows give every token what its sample gives alone: with windows, caps, sinks, experts and shared prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from busrl.training import packing
from busrl.training.batch import Sample, Turns, flatten, pieces_of
from busrl.training.forward import choose_forward

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0}
WINDOW = 16


def configuration(kind: str) -> Any:
    import transformers as hf

    heads, window = {"head_dim": 8}, {"sliding_window": WINDOW}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    makers: dict[str, Any] = {
        "qwen2": lambda: hf.Qwen2Config(**SIZES, tie_word_embeddings=True),
        "qwen3": lambda: hf.Qwen3Config(**SIZES, **heads),
        "llama": lambda: hf.LlamaConfig(**SIZES, **heads),
        "gemma2": lambda: hf.Gemma2Config(**SIZES, **heads, **window, query_pre_attn_scalar=8),
        "gemma3": lambda: hf.Gemma3TextConfig(**SIZES, **heads, **window, query_pre_attn_scalar=8),
        "mistral": lambda: hf.MistralConfig(**SIZES, **heads, **window),
        "qwen3 experts": lambda: hf.Qwen3MoeConfig(**SIZES, **heads, **experts, decoder_sparse_step=1),
        "gpt-oss": lambda: hf.GptOssConfig(
            **SIZES, **heads, **window, num_local_experts=4, num_experts_per_tok=2, eos_token_id=1),
    }
    return makers[kind]()


KINDS = ["qwen2", "qwen3", "llama", "gemma2", "gemma3", "mistral", "qwen3 experts", "gpt-oss"]


def build(kind: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(configuration(kind)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def samples(longest: int) -> list[Sample]:
    """Three groups of three, two with a prompt of several tokens."""
    random, made = np.random.default_rng(5), []
    for group, prompt in enumerate((random.integers(0, 64, 7), random.integers(0, 64, 1), random.integers(0, 64, 11))):
        for member in range(3):
            count = int(random.integers(1, longest))
            zeros = np.zeros(count, np.float32)
            tokens = random.integers(0, 64, count).astype(np.int32)
            made.append(
                Sample(3 * group + member, group, member, prompt.astype(np.int32), tokens, zeros,
                       zeros.astype(np.uint32), temperature=0.8)
            )
    return made


def alone(model: Any, own: list[Sample]) -> torch.Tensor:
    """Every sample in a row of its own, by the model's own forward."""
    found = []
    for sample in own:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.token_ids])).long()
        logs = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0, :-1].float() / 0.8, -1)
        found.append(logs.gather(-1, ids[1:, None])[len(sample.prompt_ids) - 1 :, 0])
    return torch.cat(found)


def gradients(model: Any, total: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    total.backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("longest", [256, 20, 0], ids=["rectangles", "rectangles and alone", "alone"])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_and_gradients_are_those_of_each_sample_alone(
    kind: str, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, own = build(kind), samples(40)
    expected = alone(model, own)
    slopes = gradients(model, (expected * torch.arange(len(expected))).sum())
    monkeypatch.setattr(packing, "LONGEST_TOGETHER", longest)
    way = choose_forward(model)
    assert way.name == "packed"
    actual, _ = way.score(own, flatten(own, torch.float32, model.device))
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)
    for name, slope in gradients(model, (actual * torch.arange(len(actual))).sum()).items():
        assert float((slope - slopes[name]).abs().max()) < 1e-4 * (1 + float(slopes[name].abs().max())), name


def kernel_on_a_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, of_queries: torch.Tensor, of_keys: torch.Tensor,
    longest_query: int, longest_key: int, *, scale: float, window_size: tuple[int, int], enable_gqa: bool,
) -> torch.Tensor:
    """What torch's kernel computes on a GPU, sequence by sequence: a query sees up to its place from the end."""
    found, (window, ahead) = [], window_size
    assert ahead == 0 and enable_gqa
    for begin, end, first, last in zip(of_queries[:-1], of_queries[1:], of_keys[:-1], of_keys[1:], strict=True):
        asked, known = query[begin:end].transpose(0, 1), key[first:last].transpose(0, 1)
        assert 0 < asked.shape[1] <= longest_query and asked.shape[1] <= known.shape[1] <= longest_key
        back = torch.arange(asked.shape[1])[:, None] - torch.arange(known.shape[1]) + known.shape[1] - asked.shape[1]
        seen = (back >= 0) & ((window < 0) | (back <= window))
        mixed = torch.nn.functional.scaled_dot_product_attention(
            asked, known, value[first:last].transpose(0, 1), seen, scale=scale, enable_gqa=True)
        found.append(mixed.transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral", "gemma3"])
def test_one_kernel_call_gives_each_token_what_its_sample_gives_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, own = build(kind), samples(40)
    expected = alone(model, own)
    slopes = gradients(model, (expected * torch.arange(len(expected))).sum())
    monkeypatch.setattr(packing, "_flash", lambda: (kernel_on_a_cpu, True))
    monkeypatch.setattr(packing, "_flash_knows", lambda query, key, rule: True)
    way = choose_forward(model)
    assert way.name == "packed"
    actual, _ = way.score(own, flatten(own, torch.float32, model.device))
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)
    for name, slope in gradients(model, (actual * torch.arange(len(actual))).sum()).items():
        assert float((slope - slopes[name]).abs().max()) < 1e-4 * (1 + float(slopes[name].abs().max())), name


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("ahead", [0, 1], ids=["right", "sees one key too many"])
def test_a_kernel_is_used_only_if_it_equals_the_slow_way(
    windowed: bool, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(*tensors: Any, window_size: tuple[int, int], enable_gqa: bool, **rest: Any) -> torch.Tensor:
        query, key, value, of_queries, of_keys, *longest = tensors
        if ahead:
            key = key.roll(-1, 0)
        return kernel_on_a_cpu(query, key, value, of_queries, of_keys, *longest, window_size=window_size,
                               enable_gqa=enable_gqa, **rest)

    monkeypatch.setattr(packing, "_flash", lambda: (kernel, True))
    actual = packing.flash_is_right.__wrapped__(torch.device("cpu"), torch.bfloat16, 3, 16, windowed)
    assert actual == (not ahead)


def test_a_leak_across_a_border_is_seen() -> None:
    """Positions that go on behind a border, as a forward would have them that does not know of borders."""
    model, own = build("qwen3"), samples(20)
    expected = alone(model, own).detach()
    packing.adopt(model)
    plan = packing.plan_of(own)
    rows = np.array([len(plan.ids)])
    none = np.zeros(1, np.int64)
    leaking = packing.Plan(plan.ids, plan.positions, plan.shared, packing.Sequences(none, none, none, rows))
    with torch.no_grad():
        hidden = model.base_model(input_ids=plan.ids[None], position_ids=plan.positions[None], plan=leaking)[0]
        logs = torch.log_softmax(model.lm_head(hidden[0, plan.shared :]) / 0.8, -1)
    actual = logs.gather(-1, flatten(own, torch.float32, model.device).targets[:, None])[:, 0]
    assert float((actual - expected).abs().max()) > 0.05


def test_a_call_without_a_plan_is_the_model_as_it_was() -> None:
    model = build("gemma2")
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        packing.adopt(model)
        torch.testing.assert_close(model(input_ids=ids).logits, before, atol=1e-5, rtol=1e-5)


lengths = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=70)


@settings(max_examples=40)
@given(shapes=lengths)
def test_a_plan_holds_every_token_once_and_every_prompt_once(shapes: list[tuple[int, int]]) -> None:
    prompts = [np.array(ids, np.int32) for ids in ([9], [1, 2], [1, 2, 3, 4])]
    own = []
    for member, (which, count) in enumerate(shapes):
        zeros = np.zeros(count, np.float32)
        tokens = np.arange(count, dtype=np.int32) + 10
        own.append(Sample(member, which, member, prompts[which], tokens, zeros, zeros.astype(np.uint32)))
    plan = packing.plan_of(own)
    used = {which for which, _ in shapes}
    assert plan.shared == sum(len(prompts[which]) - 1 for which in used)
    assert len(plan.ids) == plan.shared + sum(count for _, count in shapes)
    covered = np.concatenate([np.arange(first, first + count) for _, _, first, count in plan.sequences.rows()])
    assert covered.tolist() == list(range(len(plan.ids)))
    rows = list(plan.sequences.rows())[len(used) :]
    for sample, (start, count, first, length) in zip(own, rows, strict=True):
        places = [*range(start, start + count), *range(first, first + length)]
        assert plan.ids[places].tolist() == [*sample.prompt_ids.tolist(), *sample.token_ids.tolist()[:-1]]
        assert plan.positions[places].tolist() == list(range(len(places)))


# -- more than whole prompts in common --------------------------------------------------------------------------


def episode(uid: int, sequences: list[tuple[list[int], list[tuple[int, int]]]]) -> Sample:
    """An episode of these sequences, each with the spans that were generated in it."""
    rows = np.array([(number, *span) for number, (_, spans) in enumerate(sequences) for span in spans])
    ids = np.concatenate([np.array(one, np.int32) for one, _ in sequences])
    count = int((rows[:, 2] - rows[:, 1]).sum())
    turns = Turns(np.array([len(one) for one, _ in sequences]), rows, np.zeros(count, np.bool_))
    zeros = np.zeros(count, np.float32)
    return Sample(uid, 0, uid, np.zeros(0, np.int32), ids, zeros, zeros.astype(np.uint32), turns=turns)


def alike() -> list[Sample]:
    """Forked episodes, and answers to prompts that begin alike, among samples that share nothing."""
    random = np.random.default_rng(8)

    def ids(count: int) -> list[int]:
        return random.integers(0, 64, count).tolist()

    start, middle = ids(30), ids(20)
    forks = [([*start, *middle, *ids(5 + n)], [(40, 44), (52, 53 + n)]) for n in range(3)]
    forks.append(([*start, *ids(9)], [(30, 34)]))
    made = [episode(0, forks), episode(1, [([*start, *middle, *ids(3)], [(50, 53)])])]
    for member, prompt in enumerate([[*start, *ids(4)], [*start, *ids(6)], ids(5)]):
        tokens, zeros = np.array(ids(7), np.int32), np.zeros(7, np.float32)
        versions = zeros.astype(np.uint32)
        made.append(Sample(9 + member, 5 + member, 0, np.array(prompt, np.int32), tokens, zeros, versions))
    return made


def each_alone(model: Any, own: list[Sample]) -> torch.Tensor:
    """Every sequence in a row of its own, by the model's own forward."""
    found = []
    for piece in pieces_of(own):
        ids = torch.from_numpy(piece.ids.copy()).long()
        logs = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0, :-1].float(), -1)
        chosen = logs.gather(-1, ids[1:, None])[:, 0]
        found += [chosen[begin - 1 : end - 1] for begin, end in piece.spans.tolist()]
    return torch.cat(found)


@pytest.mark.parametrize("longest", [256, 20, 0, -1], ids=["rectangles", "both", "alone", "one call"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_sequences_have_in_common_is_computed_once_and_exactly(
    kind: str, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, own = build(kind), alike()
    expected = each_alone(model, own)
    slopes = gradients(model, (expected * torch.arange(len(expected))).sum())
    if longest < 0 and kind in ("qwen2", "qwen3", "mistral", "gemma3"):
        monkeypatch.setattr(packing, "_flash", lambda: (kernel_on_a_cpu, True))
        monkeypatch.setattr(packing, "_flash_knows", lambda query, key, rule: True)
    monkeypatch.setattr(packing, "LONGEST_TOGETHER", longest)
    plan, prompts = packing.plan_of(own), packing.plan_of(own, beyond=False)
    assert len(plan.ids) < 0.7 * len(prompts.ids) and plan.shared == 0
    way = choose_forward(model)
    assert way.name == "packed"
    actual, _ = way.score(own, flatten(own, torch.float32, model.device))
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)
    for name, slope in gradients(model, (actual * torch.arange(len(actual))).sum()).items():
        assert float((slope - slopes[name]).abs().max()) < 1e-4 * (1 + float(slopes[name].abs().max())), name


def paths_of(plan: packing.Plan) -> list[tuple[int, ...]]:
    """Of each row the ids up to it, by what it attends to."""
    paths: list[tuple[int, ...]] = [()] * len(plan.ids)
    ids = plan.ids.tolist()
    for start, before, first, length in plan.sequences.rows():
        earlier = plan.sequences.earlier(np.arange(start, start + before)).tolist()
        for row in range(first, first + length):
            paths[row] = tuple(ids[at] for at in [*earlier, *range(first, row + 1)])
            assert int(plan.positions[row]) == len(paths[row]) - 1
    return paths


sequences = st.lists(st.integers(0, 1), min_size=2, max_size=12).flatmap(
    lambda ids: st.tuples(st.just(ids), st.integers(1, len(ids) - 1)))


@settings(max_examples=150)
@given(made=st.lists(sequences, min_size=1, max_size=14), least=st.sampled_from([1, 4, 10**6]))
def test_a_row_of_a_tree_stands_once_behind_its_own_ids(made: list[tuple[list[int], int]], least: int) -> None:
    own = [episode(uid, [(ids, [(begin, len(ids))])]) for uid, (ids, begin) in enumerate(made)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "LEAST_SHARED", least)
        patch.setattr(packing, "LEAST_SAVED", 0.0)
        plan = packing.plan_of(own)
    paths = paths_of(plan)
    rows = range(plan.shared, len(paths)) if plan.wanted is None else (plan.wanted + plan.shared).tolist()
    assert [paths[row] for row in rows] == [tuple(ids[:at]) for ids, begin in made for at in range(begin, len(ids))]
    if least == 1:
        assert len(paths) == len({tuple(ids[:at]) for ids, _ in made for at in range(1, len(ids))})


def test_samples_that_share_prompts_alone_have_the_plan_that_they_had() -> None:
    own = samples(40)
    plan, before = packing.plan_of(own), packing.plan_of(own, beyond=False)
    assert torch.equal(plan.ids, before.ids) and plan.shared == before.shared > 0 and plan.sequences.context is None
