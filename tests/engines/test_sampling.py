"""Drawing tokens: frequencies, truncation, and streams of random numbers."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from busrl.engines.base import Streams
from busrl.engines.torch.engine import Sampling, sample_tokens

PLAIN = Sampling(None, None, None)


def column(values: object) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float64)[:, None]


def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.3])
    uniforms = column((np.arange(10_000) + 0.5) / 10_000)
    tokens, logprobs = sample_tokens(probabilities.log().expand(10_000, 4), uniforms, PLAIN)
    assert torch.bincount(tokens, minlength=4).tolist() == [5000, 0, 2000, 3000]
    torch.testing.assert_close(logprobs, probabilities.log()[tokens])


def test_temperature_divides_the_logits() -> None:
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    temperature = torch.full((6, 1), 0.5)
    tokens, logprobs = sample_tokens(logits, column([0.3] * 6), Sampling(1 / temperature, None, None))
    torch.testing.assert_close(logprobs, torch.log_softmax(logits / 0.5, -1)[torch.arange(6), tokens])


def test_top_p_keeps_the_likeliest_tokens_and_measures_under_what_is_kept() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(1000, 4)
    uniforms = column((np.arange(1000) + 0.5) / 1000)
    top_p = torch.full((1000, 1), 0.65, dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, uniforms, Sampling(None, None, top_p))
    assert set(tokens.tolist()) == {1, 3}
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.0, 4 / 7, 0.0, 3 / 7])[tokens])


def test_rows_with_and_without_top_p_share_a_batch() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1)).expand(2, 50)
    top_p = column([1.0, 1e-9])
    tokens, logprobs = sample_tokens(logits, column([0.9, 0.9]), Sampling(None, None, top_p))
    assert tokens[1] == logits[1].argmax() and logprobs[1] == 0
    alone, _ = sample_tokens(logits[:1], column([0.9]), PLAIN)
    assert alone[0] == tokens[0]


def test_greedy_rows_take_the_largest_logit_among_rows_that_sample() -> None:
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(2))
    greedy = torch.tensor([[True], [False]])
    tokens, logprobs = sample_tokens(logits, column([0.99, 0.99]), Sampling(None, greedy, None))
    assert tokens[0] == logits[0].argmax() and logprobs[0] == 0 and logprobs[1] < 0


def test_non_finite_logits_give_a_nan_and_a_token_from_the_vocabulary() -> None:
    tokens, logprobs = sample_tokens(torch.full((1, 5), torch.nan), column([0.5]), PLAIN)
    assert torch.isnan(logprobs).all() and 0 <= int(tokens[0]) < 5


@settings(max_examples=40)
@given(st.integers(1, 400), st.floats(0.01, 30.0), st.integers(0, 2**32 - 1))
def test_the_extreme_random_numbers_never_draw_an_impossible_token(size: int, spread: float, seed: int) -> None:
    logits = torch.randn(2, size, generator=torch.Generator().manual_seed(seed)) * spread
    logits[:, torch.randperm(size, generator=torch.Generator().manual_seed(seed))[1 : size // 2]] = -torch.inf
    tokens, logprobs = sample_tokens(logits, column([2.0**-33, 1 - 2.0**-33]), PLAIN)
    assert torch.isfinite(logprobs).all() and (tokens < size).all()


def test_a_stream_depends_on_all_its_names_and_longer_draws_share_beginnings() -> None:
    streams = Streams()
    first = streams.uniforms(1, 2, 3, 50)
    assert first.min() > 0 and first.max() < 1
    for other in [(9, 2, 3), (1, 9, 3), (1, 2, 9), (1, (1 << 62) | 2, 3)]:
        assert not np.isin(streams.uniforms(*other, 50), first).all()
    np.testing.assert_array_equal(Streams().uniforms(1, 2, 3, 80)[:50], first)


def test_the_stream_is_the_one_that_docs_name() -> None:
    words = np.random.Philox(key=np.array([2, 1], np.uint64), counter=np.array([0, 0, 3, 0], np.uint64)).random_raw(9)
    wanted = ((words >> np.uint64(32)).astype(np.float64) + 0.5) / 2**32
    np.testing.assert_array_equal(Streams().uniforms(1, 2, 3, 9), wanted)


def test_the_numbers_of_a_stream_are_spread_evenly() -> None:
    drawn = np.concatenate([Streams().uniforms(0, uid, 0, 16) for uid in range(2000)])
    counts = np.histogram(drawn, 16, (0, 1))[0]
    assert abs(counts - 2000).max() < 250
