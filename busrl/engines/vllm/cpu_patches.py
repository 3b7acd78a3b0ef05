"""Patches for vLLM's CPU backend: `apply` changes vLLM's classes in the worker's process before a model is made, and
`load` packs new weights for its kernels.

Called by `worker` alone. Talks to vLLM's internals. Knows nothing of requests or of how weights arrive, and changes
nothing on an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch


def apply() -> None:
    """Apply four work-arounds, on a CPU only.

    - A random stream is set back by its state after a step that took only a part of a prompt (`rewind_streams`).
    - Linear layers do not pack their weight. A packed copy would not get new weights; for a tied output head nothing
      would show it. Turned off are the packing of oneDNN, and that of processors with AMX for weights of 16 bits.
    - Heads smaller than any that its attention kernels support are padded with zeros, which changes no result
      (`pad_heads`).
    - Rows without an adapter get nothing of any (`spare_base_rows`).
    """
    from vllm import _custom_ops as operations
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    operations._supports_onednn = False
    from vllm.model_executor.layers import utils

    utils.check_cpu_sgl_kernel = lambda *_: False  # of AMX; a version without it never asks
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    rewind_streams(GPUModelRunner)
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    spare_base_rows(lora_ops, punica_cpu)
    from vllm.model_executor.layers.attention import Attention

    try:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        sizes = sorted(CPUAttentionBackend.get_supported_head_sizes())
    except (ImportError, AttributeError):  # another version refuses by itself the sizes that it cannot do
        return
    pad_heads(Attention, sizes)


def load(model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> Any:
    """`model.load_weights`, then pack the weights of experts again. vLLM writes new weights unpacked into tensors that
    were packed once; packed and unpacked have one shape, so nothing else would show the fault."""
    packed = list(_packed_experts(model))
    for tensor, _ in packed:
        tensor.zero_()  # new weights do not cover the padding
    loaded = model.load_weights(iter(tensors))
    for tensor, pack in packed:
        tensor.copy_(pack(tensor.clone()).view_as(tensor))
    return loaded


def _packed_experts(model: Any) -> Iterator[tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]]:
    """Each tensor of experts that a kernel reads packed, with the function that packs it; none on an accelerator."""
    for module in model.modules():
        experts = getattr(getattr(getattr(module, "quant_method", None), "moe_kernel", None), "fused_experts", None)
        isa = getattr(experts, "isa", None)
        if isa is None or getattr(experts, "_use_zentorch", False):  # zentorch reads them unpacked
            continue
        from vllm._custom_ops import cpu_prepack_moe_weight
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return
        for name in ("w13_weight", "w2_weight"):
            yield getattr(module, name).data, partial(cpu_prepack_moe_weight, isa=isa)


def rewind_streams(runner: Any) -> None:
    """Make a class of runners, from which the CPU's runner derives, set back the streams of discarded tokens.

    A row draws a token in every step, even in the steps that take only a piece of its prompt. vLLM discards that token
    and sets the stream back by an offset, which a CPU generator does not have, and fails. Versions of vLLM that keep
    the discarded rows under another name run without setting back.
    """
    sample, bookkeep = runner._sample, runner._bookkeeping_sync

    def _sample(self: Any, *args: Any, **more: Any) -> Any:
        streams, mask = self.input_batch.generators, getattr(self, "discard_request_mask", None)
        rows = [] if mask is None else mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
        discarded = [streams[row] for row in rows if row in streams]
        states = [stream.get_state() for stream in discarded]
        output = sample(self, *args, **more)
        for stream, state in zip(discarded, states):
            stream.set_state(state)
        return output

    def _bookkeeping_sync(self: Any, *args: Any, **more: Any) -> Any:
        streams, self.input_batch.generators = self.input_batch.generators, {}  # used here for the offset alone
        try:
            return bookkeep(self, *args, **more)
        finally:
            self.input_batch.generators = streams

    runner._sample, runner._bookkeeping_sync = _sample, _bookkeeping_sync


def spare_base_rows(operations: Any, *callers: Any) -> None:
    """Make a row without an adapter, whose place is -1, get nothing: vLLM takes the last place's adapter for it. Where
    rows are scored whose places are not told (those of a prompt, at the head), none gets anything."""
    shrink, expand = operations.bgmv_shrink, operations.bgmv_expand

    def bgmv_shrink(rows: Any, weights: Any, output: Any, places: Any, *args: Any, **more: Any) -> None:
        if len(places) != len(rows):
            output.zero_()
            return
        shrink(rows, weights, output, places, *args, **more)
        output[places < 0] = 0

    def bgmv_expand(rows: Any, weights: Any, output: Any, places: Any, *args: Any, **more: Any) -> None:
        if len(places) == len(rows):
            expand(rows, weights, output, places, *args, **more)

    for module in (operations, *callers):
        module.bgmv_shrink, module.bgmv_expand = bgmv_shrink, bgmv_expand


def pad_heads(attention: Any, sizes: list[int]) -> None:
    """Make the layer class use the next head size that its kernels support. The caller chose the scale: it stays."""
    initialise, forward = attention.__init__, attention.forward

    def __init__(self: Any, num_heads: int, head_size: int, *args: Any, **more: Any) -> None:
        same_width = more.get("head_size_v") in (None, head_size)
        wide = next((size for size in sizes if size >= head_size), head_size) if same_width else head_size
        initialise(self, num_heads, wide, *args, **more)
        self.busrl_head = head_size

    def padded(self: Any, query: Any, key: Any, value: Any, *args: Any, **more: Any) -> Any:
        head, wide = self.busrl_head, self.head_size
        if head == wide:
            return forward(self, query, key, value, *args, **more)

        def pad(tensor: Any, heads: int) -> Any:
            split = tensor.reshape(-1, heads, head)
            return torch.nn.functional.pad(split, (0, wide - head)).flatten(1)

        out = forward(self, pad(query, self.num_heads), pad(key, self.num_kv_heads), pad(value, self.num_kv_heads))
        return out.reshape(-1, self.num_heads, wide)[..., :head].reshape(-1, self.num_heads * head)

    attention.__init__, attention.forward = __init__, padded
