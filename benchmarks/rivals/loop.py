"""The rival of `compare`: one tuned synchronous GRPO loop in one process, as a good engineer would write it.

It imports nothing of busrl but the quickstart's paths. What it does for speed: fused projections, its own key-value
cache, each prompt computed once for its group, ended rows dropped, groups without advantage skipped, micro-batches
sorted by length, logits only where a token is trained. Same model folder, prompts, reward, batch (32 drawn groups of
8), loss and learning rate as the others. Prints one JSON object; the clock runs from the first generated token to the
goal, without imports and loading.

    python -m benchmarks.rivals.loop --seed 0 --threads 1
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from busrl.quickstart import ensure

MAX_NEW = 64  # the quickstart's max_new_tokens
COMPACT = 0.85  # rows are packed again when fewer than this share of them is alive


class RmsNorm(torch.autograd.Function):
    """Half the passes over memory of what autograd makes of the formula."""

    @staticmethod
    def forward(ctx, rows, weight):
        inverse = rows.square().mean(-1, keepdim=True).add_(1e-6).rsqrt_()
        normal = rows * inverse
        ctx.save_for_backward(normal, inverse, weight)
        return normal * weight

    @staticmethod
    def backward(ctx, gradient):
        normal, inverse, weight = ctx.saved_tensors
        shared = (gradient * normal).flatten(0, -2)
        towards = (gradient * weight).addcmul_(
            normal, torch.mv(shared, weight).view(inverse.shape), value=-1 / weight.numel()
        )
        return towards.mul_(inverse), shared.sum(0)


class Swiglu(torch.autograd.Function):
    """silu(first half) * second half."""

    @staticmethod
    def forward(ctx, hidden):
        gate, up = hidden.chunk(2, -1)
        active = F.silu(gate)
        ctx.save_for_backward(hidden, active)
        return active * up

    @staticmethod
    def backward(ctx, gradient):
        hidden, active = ctx.saved_tensors
        gate, up = hidden.chunk(2, -1)
        out = torch.empty_like(hidden)
        width = gate.shape[-1]
        out[..., :width] = torch.ops.aten.silu_backward(gradient * up, gate)
        torch.mul(gradient, active, out=out[..., width:])
        return out


class Model(torch.nn.Module):
    """A Qwen3 with fused projections, for training and for decoding."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        from safetensors.torch import load_file

        self.config = json.loads((folder / "config.json").read_text())
        old = load_file(folder / "model.safetensors")
        self.heads, self.size = self.config["num_attention_heads"], self.config["head_dim"]
        assert self.config["num_key_value_heads"] == self.heads, "grouped keys are not written here"
        self.embed = torch.nn.Parameter(old["model.embed_tokens.weight"])
        self.norm = torch.nn.Parameter(old["model.norm.weight"])
        self.blocks = torch.nn.ModuleList()
        for index in range(self.config["num_hidden_layers"]):
            part = {key.removeprefix(f"model.layers.{index}."): value for key, value in old.items()}
            fused = {
                "qkv": torch.cat([part[f"self_attn.{name}_proj.weight"] for name in "qkv"]),
                "out": part["self_attn.o_proj.weight"],
                "gate_up": torch.cat([part["mlp.gate_proj.weight"], part["mlp.up_proj.weight"]]),
                "down": part["mlp.down_proj.weight"],
                "norm1": part["input_layernorm.weight"],
                "norm2": part["post_attention_layernorm.weight"],
                "q_norm": part["self_attn.q_norm.weight"],
                "k_norm": part["self_attn.k_norm.weight"],
            }
            self.blocks.append(torch.nn.ParameterDict(fused))
        theta = self.config["rope_parameters"]["rope_theta"]
        angles = torch.outer(torch.arange(128.0), theta ** (-torch.arange(0, self.size, 2) / self.size)).repeat(1, 2)
        self.cosine, self.sine = angles.cos(), angles.sin()

    def turn(self, heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        first, second = heads.chunk(2, -1)
        return heads * cosine + torch.cat((-second, first), -1) * sine

    def project(self, block, rows: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key, value as [rows, heads, time, size] from [rows, time, hidden]."""
        mixed = F.linear(RmsNorm.apply(rows, block["norm1"]), block["qkv"])
        q, k, v = mixed.view(*rows.shape[:2], 3, self.heads, self.size).unbind(2)
        q = self.turn(RmsNorm.apply(q, block["q_norm"]), cosine, sine)
        k = self.turn(RmsNorm.apply(k, block["k_norm"]), cosine, sine)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def prepare(self) -> None:
        """Make what a rollout reads of the weights beside the matrices: norms of query and key heads as one tensor."""
        self.head_norms = [torch.stack([b["q_norm"], b["k_norm"]])[:, None].detach() for b in self.blocks]

    def decode_block(self, index: int, rows: Tensor, turn: tuple[Tensor, Tensor], cache: Cache, column: int) -> Tensor:
        """Decode one token of every row, without autograd: fewer, larger operations than `project` and `finish`."""
        block, (cosine, sine), end = self.blocks[index], turn, column + 1
        hidden = rows.shape[-1]
        mixed = F.linear(F.rms_norm(rows, (hidden,), block["norm1"], 1e-6), block["qkv"])
        mixed = mixed.view(-1, 3, self.heads, self.size)
        both = F.rms_norm(mixed[:, :2], (self.size,), None, 1e-6) * self.head_norms[index]
        both = torch.addcmul(both * cosine, both.roll(self.size // 2, -1), sine)
        cache.keys[index][:, :, column], cache.values[index][:, :, column] = both[:, 1], mixed[:, 2]
        scores = torch.matmul(both[:, 0, :, None] * self.size**-0.5, cache.keys[index][:, :, :end].transpose(-1, -2))
        shares = scores.add_(cache.hidden[..., :end]).softmax(-1)
        attended = torch.matmul(shares, cache.values[index][:, :, :end]).view(-1, self.heads * self.size)
        rows = torch.addmm(rows, attended, block["out"].t())
        gate, up = F.linear(F.rms_norm(rows, (hidden,), block["norm2"], 1e-6), block["gate_up"]).chunk(2, -1)
        return torch.addmm(rows, F.silu(gate).mul_(up), block["down"].t())

    def finish(self, block, rows: Tensor, attended: Tensor) -> Tensor:
        rows = rows + F.linear(attended, block["out"])
        hidden = F.linear(RmsNorm.apply(rows, block["norm2"]), block["gate_up"])
        return rows + F.linear(Swiglu.apply(hidden), block["down"])

    def forward(self, ids: Tensor, trained: Tensor) -> Tensor:
        """Logits of the positions where `trained` is true; rows are padded at the right."""
        rows = F.embedding(ids, self.embed)
        cosine, sine = self.cosine[: ids.shape[1], None], self.sine[: ids.shape[1], None]
        for index, block in enumerate(self.blocks):
            q, k, v = self.project(block, rows, cosine, sine)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            if index == len(self.blocks) - 1:
                rows, attended = rows[trained], attended[trained]
            rows = self.finish(block, rows, attended)
        return F.linear(RmsNorm.apply(rows, self.norm), self.embed)


@dataclass
class Cache:
    """Keys and values per layer, [rows, heads, columns, size], and -1e9 where a row's prompt has not begun."""

    keys: list[Tensor]
    values: list[Tensor]
    hidden: Tensor

    def pack(self, keep: Tensor, used: int) -> None:
        """Keep those rows; only columns in use are copied."""
        self.hidden = self.hidden[keep]
        for caches in (self.keys, self.values):
            for index, old in enumerate(caches):
                caches[index] = torch.empty(len(keep), *old.shape[1:])
                caches[index][:, :, :used] = old[:, :, :used].index_select(0, keep)


@dataclass
class Rollout:
    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor


class Sampler:
    """Decodes a batch of groups together; prompts are padded at the left, so all rows write the same cache column."""

    def __init__(self, model: Model, end: int, pad: int, group: int, generator: torch.Generator) -> None:
        self.model, self.end, self.pad, self.group, self.generator = model, end, pad, group, generator

    @torch.no_grad()
    def __call__(self, prompts: list[list[int]]) -> Rollout:
        self.prefill(prompts)
        count = len(prompts) * self.group
        self.tokens = torch.full((count, MAX_NEW), self.pad)
        self.logprobs, self.lengths = torch.zeros(count, MAX_NEW), torch.full((count,), MAX_NEW)
        self.where, alive = torch.arange(count), torch.ones(count, dtype=torch.bool)
        for step in range(MAX_NEW):
            chosen = self.choose(step)
            ended = (chosen == self.end) & alive
            self.lengths[self.where[ended]] = step + 1
            alive = alive & ~ended
            left = int(alive.sum())
            if left == 0 or step == MAX_NEW - 1:
                break
            if left < COMPACT * len(alive):
                keep = alive.nonzero()[:, 0]
                chosen, alive = chosen[keep], alive[keep]
                self.compact(keep, self.width + step)
            self.advance(chosen, self.width + step)
        return Rollout(self.tokens, self.logprobs, self.lengths)

    def prefill(self, prompts: list[list[int]]) -> None:
        model, self.width = self.model, max(map(len, prompts))
        total = self.width + MAX_NEW
        ids = torch.tensor([[self.pad] * (self.width - len(prompt)) + prompt for prompt in prompts])
        missing = torch.tensor([self.width - len(prompt) for prompt in prompts])
        places = (torch.arange(total) - missing[:, None]).clamp_(min=0)
        cosine, sine = model.cosine[places][:, :, None], model.sine[places][:, :, None]  # [prompts, columns, 1, size]
        hidden = torch.zeros(len(prompts), 1, 1, total).masked_fill_(
            (torch.arange(total) < missing[:, None])[:, None, None], -1e9
        )
        causal = torch.full((self.width, self.width), -1e9).triu(1)
        model.prepare()
        self.cache = Cache([], [], hidden.repeat_interleave(self.group, 0))
        rows = F.embedding(ids, model.embed)
        for block in model.blocks:
            q, k, v = model.project(block, rows, cosine[:, : self.width], sine[:, : self.width])
            shares = (q @ k.transpose(-1, -2) * model.size**-0.5 + causal + hidden[..., : self.width]).softmax(-1)
            rows = model.finish(block, rows, (shares @ v).transpose(1, 2).flatten(2))
            self.cache.keys.append(self.spread(k, total))
            self.cache.values.append(self.spread(v, total))
        self.state = rows[:, -1].repeat_interleave(self.group, 0)
        half = model.size // 2
        signed = torch.cat((-sine[..., :half], sine[..., half:]), -1)  # `roll` swaps the halves without a sign
        self.cosine, self.sine = (part.repeat_interleave(self.group, 0) for part in (cosine, signed))

    def spread(self, part: Tensor, total: int) -> Tensor:
        """A prompt's keys or values into the caches of its group."""
        cache = torch.empty(part.shape[0] * self.group, part.shape[1], total, part.shape[3])
        cache[:, :, : self.width] = part.repeat_interleave(self.group, 0)
        return cache

    def choose(self, step: int) -> Tensor:
        logits = F.linear(F.rms_norm(self.state, self.state.shape[1:], self.model.norm, 1e-6), self.model.embed)
        logprobs = logits.log_softmax(-1)
        chosen = torch.multinomial(logprobs.exp(), 1, generator=self.generator)
        self.tokens[self.where, step] = chosen[:, 0]
        self.logprobs[self.where, step] = logprobs.gather(1, chosen)[:, 0]
        return chosen[:, 0]

    def compact(self, keep: Tensor, used: int) -> None:
        self.where, self.cosine, self.sine = self.where[keep], self.cosine[keep], self.sine[keep]
        self.cache.pack(keep, used)

    def advance(self, chosen: Tensor, column: int) -> None:
        turn = self.cosine[:, column, None], self.sine[:, column, None]
        rows = F.embedding(chosen, self.model.embed)
        for index in range(len(self.model.blocks)):
            rows = self.model.decode_block(index, rows, turn, self.cache, column)
        self.state = rows


class Prompts:
    """The train file in seeded random order, epoch after epoch, as token ids with their answers."""

    def __init__(self, path: Path, vocabulary: dict[str, int], seed: int) -> None:
        self.records = [json.loads(line) for line in path.read_text().splitlines()]
        self.vocabulary, self.seed, self.drawn = vocabulary, seed, 0
        self.order: np.ndarray | None = None

    def draw(self, count: int) -> list[tuple[list[int], list[int]]]:
        picked = []
        for _ in range(count):
            epoch, place = divmod(self.drawn, len(self.records))
            if place == 0:
                self.order = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(len(self.records))
            record = self.records[self.order[place]]
            self.drawn += 1
            picked.append(tuple([self.vocabulary[char] for char in record[key]] for key in ("prompt", "answer")))
        return picked


@dataclass
class Loop:
    """A run: `step()` until the goal."""

    options: argparse.Namespace
    model: Model
    vocabulary: dict[str, int]
    prompts: Prompts
    rewards: list[float] = field(default_factory=list)
    samples: int = 0
    generation_s: float = 0.0  # of CPU

    def __post_init__(self) -> None:
        options = self.options
        self.end, self.bar = self.vocabulary["<eos>"], self.vocabulary["|"]
        generator = torch.Generator().manual_seed(options.seed)
        self.sampler = Sampler(self.model, self.end, self.vocabulary["<pad>"], options.group, generator)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=options.lr, betas=(0.9, options.beta2), eps=1e-8, weight_decay=0.0, fused=True
        )

    def step(self) -> None:
        drawn = self.prompts.draw(self.options.groups)
        begun_s = time.process_time()
        rollout = self.sampler([prompt for prompt, _ in drawn])
        self.generation_s += time.process_time() - begun_s
        rewards = self.judge(rollout, [answer for _, answer in drawn])
        spread = rewards.std(1, keepdim=True)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (spread + 1e-6)).flatten()
        self.train([prompt for prompt, _ in drawn], rollout, advantages)
        self.rewards.append(rewards.mean().item())
        self.samples += rewards.numel()

    def judge(self, rollout: Rollout, answers: list[list[int]]) -> Tensor:
        """1 where the completion ends with the bar, the answer, and the end token."""
        rewards = torch.zeros(len(answers), self.options.group)
        rows, lengths = rollout.tokens.tolist(), rollout.lengths.tolist()
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            group, member = divmod(index, self.options.group)
            wanted = [self.bar, *answers[group], self.end]
            rewards[group, member] = float(row[:length][-len(wanted) :] == wanted)
        return rewards

    def train(self, prompts: list[list[int]], rollout: Rollout, advantages: Tensor) -> None:
        kept = advantages.nonzero()[:, 0].tolist()
        if not kept:
            return
        lengths = rollout.lengths.tolist()
        kept.sort(key=lambda row: len(prompts[row // self.options.group]) + lengths[row])
        trained = sum(lengths[row] for row in kept)
        self.optimizer.zero_grad()
        for start in range(0, len(kept), self.options.micro):
            self.backward(kept[start : start + self.options.micro], prompts, rollout, advantages, trained)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()

    def backward(self, rows: list[int], prompts, rollout: Rollout, advantages: Tensor, trained: int) -> None:
        lengths = rollout.lengths[rows]
        asked = [prompts[row // self.options.group] for row in rows]
        before = torch.tensor([len(prompt) for prompt in asked])
        width = int((before + lengths).max())
        ids = np.zeros((len(rows), width), dtype=np.int64)
        tokens = rollout.tokens[rows].numpy()
        for index, (prompt, length) in enumerate(zip(asked, lengths.tolist(), strict=True)):
            ids[index, : len(prompt)] = prompt
            ids[index, len(prompt) : len(prompt) + length] = tokens[index, :length]
        batch = torch.from_numpy(ids)
        place = torch.arange(1, width)
        mask = (place >= before[:, None]) & (place < (before + lengths)[:, None])
        logits = self.model(batch[:, :-1], mask)
        now = logits.log_softmax(-1).gather(1, batch[:, 1:][mask][:, None])[:, 0]
        then = rollout.logprobs[rows][torch.arange(MAX_NEW) < lengths[:, None]]
        each = advantages[rows].repeat_interleave(lengths)
        ratio = (now - then).clamp(-20, 20).exp()
        gain = torch.min(ratio * each, ratio.clamp(0.8, 1.28) * each)
        gain = torch.where(each < 0, torch.max(gain, 3.0 * each), gain)
        (gain.sum() / -trained).backward()


def run(options: argparse.Namespace) -> dict:
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("highest")
    paths = ensure(options.model)
    vocabulary = json.loads((paths.model / "tokenizer.json").read_text())["model"]["vocab"]
    loop = Loop(options, Model(paths.model), vocabulary, Prompts(paths.train, vocabulary, options.seed))
    curve, reached = [], False
    began, cpu_began = time.perf_counter(), time.process_time()
    while not reached and len(loop.rewards) < options.max_updates:
        loop.step()
        last = loop.rewards[-10:]
        curve.append([round(time.perf_counter() - began, 3), round(last[-1], 4)])
        reached = len(last) == 10 and math.fsum(last) / 10 >= options.goal
    cpu_s = time.process_time() - cpu_began
    return {
        "system": "loop",
        "seed": options.seed,
        "threads": options.threads,
        "lr": options.lr,
        "reached": reached,
        "updates": len(curve),
        "seconds": curve[-1][0],
        "cpu_seconds": round(cpu_s, 3),
        "cpu_by_part": {
            "generation": round(loop.generation_s, 3), "training and reward": round(cpu_s - loop.generation_s, 3),
        },
        "samples": loop.samples,
        "curve": curve,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny:sort")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--beta2", type=float, default=0.95)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--micro", type=int, default=32, help="samples in a micro-batch")
    parser.add_argument("--goal", type=float, default=0.85)
    parser.add_argument("--max-updates", type=int, default=400)
    print(json.dumps(run(parser.parse_args())))


if __name__ == "__main__":
    main()
