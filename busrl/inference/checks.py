"""Checks a decoder against the model's own forward when an engine is built, and chooses the decoder.

Used by the torch engine. A decoder that computes something else would train the model on wrong log-probabilities and
nobody would see it, so disagreement is an error (generic) or a fall back with a line in the log (fast).
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

log = logging.getLogger("busrl")
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
LOOSE = 0.15  # bfloat16 and float16: rounding in another order
Maker = Callable[[Any, int, int], Decoder]


def choose(model: Any, rows: int, max_length: int, fast: bool) -> Decoder:
    """The fast decoder if it knows the model and agrees with it, else the generic one, which must agree."""
    if fast:
        try:
            gap = disagreement(model, FastDecoder, max_length)
            if gap <= _allowed(model):
                return FastDecoder(model, rows, max_length)
            why = f"its logits differ from the model's by {gap:.2g}"
        except NotRecognised as problem:
            why = str(problem)
        log.info("generic decoder for %s: %s", type(model).__name__, why)
    gap = disagreement(model, GenericDecoder, max_length)
    if gap > _allowed(model):
        raise UserError(
            f"{type(model).__name__}: decoding with a key-value cache differs from its plain forward by {gap:.2g} "
            f"(allowed {_allowed(model):.2g}); the torch engine can not run this architecture, use another engine"
        )
    return GenericDecoder(model, rows, max_length)


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
        decoder.prefill(ids[order, : length // 2], torch.arange(rows, device=device)[order], None)
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
