"""Checks a decoder against the model's own forward when an engine is built, and chooses the decoder.

Used by the torch engine. A decoder that computes something else would train the model on wrong log-probabilities and
nobody would see it, so what disagrees, or raises, is not used: the next slower way is tried, and the log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from busrl.errors import UserError
from busrl.inference.cache import Staging
from busrl.inference.decoder import Decoder, GenericDecoder
from busrl.inference.fast_decoder import FastDecoder, NotRecognised
from busrl.inference.states import StateDecoder, WholeDecoder, whole_by_logits

log = logging.getLogger("busrl")
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
LOOSE = 0.15  # bfloat16 and float16: rounding in another order
Maker = Callable[[Any, int, int], Decoder]
WAYS: tuple[Any, ...] = (FastDecoder, GenericDecoder, StateDecoder, WholeDecoder, whole_by_logits)  # quickest first
SLOW = (WholeDecoder, whole_by_logits)
SLOW_TEXT = "every token costs a forward pass over its whole sequence; engine = vllm is quicker"


def choose(model: Any, rows: int, max_length: int, fast: bool) -> Decoder:
    """The quickest decoder that agrees with the model; UserError if none does."""
    name = type(model).__name__
    told: list[str] = []
    maker: Maker
    for maker in WAYS if fast else WAYS[1:]:
        why = _objection(model, maker, max_length)
        if not why:
            if maker in SLOW:
                log.warning("%s: %s; %s", name, "; ".join(told), SLOW_TEXT)
            return maker(model, rows, max_length)
        told.append(f"{maker.__name__}: {why}")
        if maker is FastDecoder:
            log.info("generic decoder for %s: %s", name, why)
    raise UserError(
        f"{name}: decoding differs from its plain forward ({'; '.join(told)}); the torch engine can not run this "
        "architecture, use another engine"
    )


def _objection(model: Any, maker: Maker, max_length: int) -> str:
    """Why this decoder is not for the model; "" if it is."""
    try:
        gap = disagreement(model, maker, max_length)
    except NotRecognised as problem:
        return str(problem)
    except Exception as problem:  # a model that asks its cache for something else: whatever it raises
        return f"{type(problem).__name__}: {problem}"
    allowed = _allowed(model)
    return "" if gap <= allowed else f"its logits differ from the model's by {gap:.2g} (allowed {allowed:.2g})"


def disagreement(model: Any, maker: Maker, max_length: int) -> float:
    """Largest difference of logits over random sequences of unequal length: prefilled in part, one of them in two
    pieces, and then stepped."""
    decoder = maker(model, 3, max_length)  # outside inference mode: it may move the parameters, which stay writable
    with torch.inference_mode():
        return _compare(model, decoder, max_length)


def _compare(model: Any, decoder: Decoder, max_length: int) -> float:
    rows, device = 3, next(model.parameters()).device
    length = max(2, min(12, max_length))
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(0)).to(device)
    wanted = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.float()
    known = torch.tensor([length // 2, length // 3, length // 2], device=device)  # tokens prefilled, per row
    order = torch.tensor([2, 0, 1], device=device)
    if length // 2:
        everyone = torch.arange(rows, device=device)
        if decoder.equal_lengths:
            decoder.prefill(ids[[2, 0], : length // 2], everyone[[2, 0]], None)
            decoder.prefill(ids[1:2, : length // 3], everyone[1:2], None)
        else:
            decoder.prefill(ids[order, : length // 2], everyone[order], None)
        staging = Staging(length // 2)
        for piece in torch.split(ids[:1, : length // 2], -(-length // 4), dim=1):
            decoder.prefill_piece(piece, staging)
        decoder.cache.adopt(staging, torch.zeros(1, dtype=torch.int64, device=device))
    everyone = torch.arange(rows, device=device)
    gap = 0.0
    for k in range(length - length // 2):
        positions = known + k
        logits = decoder.step(ids[everyone, positions], positions, int(positions.max()) + 1).float()
        gap = max(gap, float((logits - wanted[everyone, positions]).abs().max()))
    scale = max(1.0, float(wanted.abs().max()))
    return gap / scale if gap == gap else float("inf")


def _allowed(model: Any) -> float:
    return TOLERANCE.get(next(model.parameters()).dtype, LOOSE)
