"""The tables of a topology that say what is trained, on what, and how: frozen dataclasses, attributes are keys.

Declarations alone; `schema.py` puts them together. Knows nothing of files, processes or rules between keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from busrl.topology.keys import REQUIRED, key

TABLE_TENSORS, TENSORS_OF_SLOT, TENSORS_OF_SEGMENT = 48, 4, 3  # task, prompt_ids, reward_parts, text; the arrays
MOST_SEGMENTS = (TABLE_TENSORS - TENSORS_OF_SLOT) // TENSORS_OF_SEGMENT  # what the table of a slot has room for


@dataclass(frozen=True)
class Run:
    """[run]: the experiment as a whole."""

    name: str = key("run", "name of the run, also the start of its directory's name")
    seed: int = key(0, "seed of the data order, of sampling and of the training", low=0, high=2**31 - 1)
    max_steps: int = key(200, "the run ends after this many optimiser steps", low=1)
    max_groups: int = key(0, "or after this many trained groups, whichever comes first; 0 = no such limit", low=0)


@dataclass(frozen=True)
class Model:
    """[model]: what is trained."""

    path: str = key(REQUIRED, "a Hugging Face model folder, or the quickstart's own model tiny:sort", path=True)
    dtype: str = key("auto", "number type of the weights; auto = bfloat16 on an accelerator, float32 on a CPU",
                     choices=("auto", "float32", "bfloat16"))  # fmt: skip
    device: str = key("auto", "where the model runs: a kind of device, or the best there is; see docs/gpu.md",
                      choices=("auto", "cpu", "cuda", "npu"))  # fmt: skip


@dataclass(frozen=True)
class Lora:
    """[lora]: train a low-rank adapter of the model instead of all of its weights; needs the extra busrl[lora]."""

    rank: int = key(0, "rank of the adapter; 0 = off, all weights are trained", low=0, high=4096)
    alpha: int = key(0, "what the adapter adds is scaled by alpha / rank; 0 = 2 x rank", low=0, high=1 << 20)
    targets: tuple[str, ...] = key((), "last names of the linear layers that get one, for example q_proj; empty = all "
                                       "but the output head")  # fmt: skip
    dropout: float = key(0.0, "share of a layer's inputs that its adapter does not see while training",
                         low=0, high=1, open_high=True)  # fmt: skip

    @property
    def on(self) -> bool:
        """Whether an adapter is trained."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """What the product of the adapter's two matrices is multiplied by."""
        return (self.alpha or 2 * self.rank) / max(1, self.rank)


@dataclass(frozen=True)
class Data:
    """[data]: prompts, one JSON object per line."""

    train: str = key(REQUIRED, "JSONL file of training prompts, or tiny:sort", path=True)
    prompt_key: str = key("prompt", "the key of a line that holds the prompt")
    answer_key: str = key("answer", "the key of a line that holds the right answer")
    shuffle: bool = key(True, "draw the lines of each epoch in an order given by run.seed")
    arrivals: bool = key(False, "an open stream: a prompt is there arrival_s seconds (of its line) after the start")
    template: str = key("none", "the prompt as it stands, or by the model's chat template: as a user turn, or as the "
                        "messages that it is a list of", choices=("none", "chat"))  # fmt: skip
    system: str = key("", "template = chat: the system message of every prompt that has none of its own")


@dataclass(frozen=True)
class Groups:
    """[groups]: samples per prompt."""

    size: int = key(8, "samples per prompt, G; their rewards are compared with each other", low=2, high=1024)


@dataclass(frozen=True)
class Generation:
    """[generation]: sampling of training trajectories."""

    max_new_tokens: int = key(64, "a completion is cut after this many tokens", low=1, high=1 << 20)
    temperature: float = key(1.0, "sampling temperature of training tasks", low=0, open_low=True, high=10)
    top_p: float = key(1.0, "nucleus sampling; training needs 1.0", low=0, open_low=True, high=1)
    max_batch: int = key(128, "sequences that one rollout process generates at the same time", low=1, high=65536)
    max_prompt_tokens: int | str = key("auto", "a longer prompt is set aside (fate l); auto = the longest of the data",
                                       words=("auto",), low=1, high=1 << 20)  # fmt: skip
    prefill_tokens: int = key(2048, "torch engine: prompt tokens that are computed between two decoding steps, at most",
                              low=1, high=1 << 20)  # fmt: skip
    on_update: str = key("auto", "keys and values of running sequences after new weights: kept, or computed again; "
                         "auto = the engine's own choice", choices=("auto", "keep", "recompute"))  # fmt: skip


@dataclass(frozen=True)
class Segments:
    """[segments]: long training answers in pieces, each generated and committed by itself."""

    length: int | str = key(0, "tokens of one segment; 0 = answers are made in one go, auto = from the lengths seen",
                            words=("auto",), low=0, high=1 << 20)  # fmt: skip
    max_segments: int = key(8, "an answer has at most so many segments", low=1, high=MOST_SEGMENTS)
    global_max_length: int = key(0, "tokens of an answer over all of its segments, the place of "
                                    "generation.max_new_tokens; 0 = that", low=0, high=1 << 20)  # fmt: skip
    loss: str = key("behaviour", "trained: all tokens with their own ratios, all with ratio 1, or the last segment",
                    choices=("behaviour", "pois", "last_segment"))  # fmt: skip
    rounds: str = key("answers", "weights.mode = sync: a round ends with its answers, or with a segment of each",
                      choices=("answers", "segments"))  # fmt: skip

    @property
    def on(self) -> bool:
        """Whether training answers are made in segments."""
        return self.length != 0

    @property
    def waves(self) -> int:
        """Waves that an answer may take, where rounds are made of segments; else 0."""
        return self.max_segments if self.on and self.rounds == "segments" else 0


@dataclass(frozen=True)
class Trigger:
    """[learner.trigger]: when an optimiser step fires; counts are in groups."""

    n_min: int = key(32, "fire when this many groups are ready", low=1, high=65536)
    t_max_s: float = key(math.inf, "fire after this many seconds if n_floor groups are ready; inf = never",
                         words=("inf",), low=0, open_low=True, finite=False)  # fmt: skip
    count: str = key("usable", "what counts against n_min: groups to train on, or every ended group (flat ones too)",
                     choices=("usable", "ended"))  # fmt: skip
    n_floor: int = key(0, "fewest groups that t_max_s may fire with; 0 = max(4, n_min / 4)", low=0, high=65536)


@dataclass(frozen=True)
class Controller:
    """[learner.controller]: whether n_min and t_max_s follow the entropy of the policy; see docs/control.md."""

    mode: str = key("off", "no controller, log what it would do, or do it", choices=("off", "advise", "act"))
    n_lo: int = key(0, "smallest n_min that it may choose (high entropy); 0 = n_min / 2", low=0, high=65536)
    n_hi: int = key(0, "largest n_min that it may choose (low entropy); 0 = 2 x n_min", low=0, high=65536)
    every: int = key(5, "a decision every so many steps", low=1, high=10000)
    cooldown: int = key(10, "after a move nothing moves for so many steps", low=0, high=10000)


@dataclass(frozen=True)
class Learner:
    """[learner]: loss, optimiser, log and checkpoints."""

    lr: float = key(REQUIRED, "learning rate for steps of n_min groups; scaled by sqrt(groups / n_min)",
                    low=0, open_low=True, high=10)  # fmt: skip
    loss: str = key("ppo_clip", "objective per token", choices=("ppo_clip", "decoupled"))
    advantage: str = key("group_std", "(R - mean) / std of the group, or R - mean", choices=("group_std", "group_mean"))
    betas: tuple[float, float] = key((0.9, 0.999), "AdamW betas", low=0, high=1, open_high=True)
    weight_decay: float = key(0.0, "AdamW weight decay", low=0, high=10)
    eps: float = key(1e-8, "AdamW epsilon", low=0, open_low=True, high=1)
    clip_low: float = key(0.2, "the ratio is clipped below at 1 - clip_low", low=0, high=1)
    clip_high: float = key(0.28, "the ratio is clipped above at 1 + clip_high", low=0, high=100)
    dual_clip: float = key(3.0, "bound on the loss of tokens with negative advantage", low=1, open_low=True, high=1000)
    tis_cap: float = key(2.0, "cap of the importance weight (loss = decoupled)", low=0, open_low=True, high=1000)
    max_grad_norm: float = key(1.0, "the gradient is clipped to this norm", low=0, open_low=True, high=1e6)
    warmup_groups: int = key(0, "groups over which lr rises from 0", low=0)
    decay: str = key("none", "shape of the fall of lr after the warm-up", choices=("none", "linear", "cosine"))
    decay_groups: int = key(0, "groups over which it falls; 0 = to the end of the run", low=0)
    decay_to: float = key(0.0, "share of lr that is left at the end of the fall", low=0, high=1)
    micro_batch_tokens: int = key(4096, "padded tokens per forward and backward", low=1, high=1 << 26)
    micro_batch_min_samples: int = key(16, "start a micro-batch when this many samples are ready", low=1, high=65536)
    updates_per_batch: int = key(1, "optimiser updates per step, each on a mini-batch of whole groups", low=1, high=64)
    publish_every: int = key(1, "publish the weights every so many steps", low=1, high=1024)
    checkpoint_every: int = key(50, "write a checkpoint every so many steps (of n_min groups each where the batch can "
                                    "vary); 0 = only at the end", low=0)  # fmt: skip
    keep_last: int = key(2, "checkpoints kept", low=1, high=10000)
    wal: str = key("sync", "write-ahead log: fsync before training, without fsync, or none",
                   choices=("sync", "async", "off"))  # fmt: skip
    deterministic: bool = key(False, "claim at firing and train in (group, member) order")
    mismatch_limit: float = key(1.0, "the run ends if, before its first step, the engines' log-probabilities are this "
                                     "far (nats, mean) from the learner's; 0 = never", low=0)  # fmt: skip
    length_alarm: float = key(0.9, "warn if trained answers are shorter than this share of all that ended; 0 = never",
                              low=0, high=1)  # fmt: skip
    length_alarm_steps: int = key(20, "steps over which lengths are compared", low=1, high=10000)
    trigger: Trigger = field(default_factory=Trigger)
    controller: Controller = field(default_factory=Controller)


@dataclass(frozen=True)
class Sparse:
    """[weights.sparse]: only the values that changed, instead of all of them (docs/sparse.md)."""

    enabled: bool = key(False, "send changed values only where that is less; costs one more copy in the learner")
    threshold: float = key(0.1, "send all values when the changed ones would be more than this share of the bytes",
                           low=0, open_low=True, high=1)  # fmt: skip
    key_every: int = key(32, "send all values every so many versions all the same", low=1, high=65536)


@dataclass(frozen=True)
class Weights:
    """[weights]: from the learner to the engines."""

    transport: str = key("shm", "how weights travel; see docs/weights.md", choices=(
                         "shm", "broadcast", "cuda_ipc", "lora_hotswap", "lora_restart",
                         "checkpoint_restart"))  # fmt: skip
    restart_every: int = key(1, "lora_restart, checkpoint_restart: of the publications that learner.publish_every "
                                "gives, every so many", low=1, high=1024)  # fmt: skip
    on_restart: str = key("continue", "answers that run while an engine restarts: cut and continued after it, or ended "
                          "before it", choices=("continue", "finish"))  # fmt: skip
    mode: str = key("batch-async", "how far generation may run ahead of training",
                    choices=("sync", "batch-async", "fully-async"))  # fmt: skip
    max_staleness: int = key(2, "batch-async: steps that a trained sample may be old, S", low=0, high=1024)
    over_age: str = key("wait", "a group above max_staleness: hold admission until it is trained, or drop it",
                        choices=("wait", "drop"))  # fmt: skip
    window: int = key(0, "W: groups past the oldest that may be trained before it; 0 = 0.3 of the buffer B",
                      low=0, high=65536)  # fmt: skip
    timeout_s: float = key(10.0, "a transfer that takes longer names the member that is late", low=0, open_low=True)
    checksum: bool = key(False, "engines check the bytes of each version against a digest (one more pass over them)")
    bucket_mb: int = key(16, "broadcast: MiB that are sent at once and have a deadline of their own", low=1, high=4096)
    backend: str = key("gloo", "broadcast: what carries it; gloo through the host's memory, nccl (CUDA) and hccl (NPU) "
                       "from device to device", choices=("gloo", "nccl", "hccl"))  # fmt: skip
    sparse: Sparse = field(default_factory=Sparse)


@dataclass(frozen=True)
class Reward:
    """[reward]: what an answer is worth."""

    kind: str = key("exact_match", "compare with the answer, or call a Python function (so where one is given)",
                    choices=("exact_match", "python"))  # fmt: skip
    function: str = key("", "kind = python: package.module:function or file.py:function")
    extract: str = key("", "exact_match: regular expression; its last match (group 1, or what follows) is the answer")
    answer_key: str = key("", "key of the right answer; empty = data.answer_key")
    timeout_s: float = key(10.0, "a single call that takes longer is killed, the sample ends as H",
                           low=0, open_low=True)  # fmt: skip
    workers: int = key(1, "child processes that call the function, per reward process", low=1, high=256)
    truncated: float | str = key("reward", "what a training answer is worth that the limit cut: its reward, or this",
                                 words=("reward",))  # fmt: skip
    truncated_penalty: float = key(0.0, "subtracted from the reward of a training answer that the limit cut", low=0)


@dataclass(frozen=True)
class Validation:
    """[validation]: measuring without training; on when `data` names prompts, and the validator is started then."""

    data: str = key("", "JSONL file of validation prompts, or tiny:sort; empty = no validation", path=True)
    every: int = key(0, "a round every so many steps (of n_min groups each where the batch can vary); 0 = never "
                        "during the run", low=0)  # fmt: skip
    samples: int = key(512, "samples a round, spread over a longer file; each prompt of a shorter one counts the same",
                       low=1, high=1 << 24)  # fmt: skip
    temperature: float = key(1.0, "0 = greedy", low=0, high=10)
    at_start: bool = key(True, "one round before the first step")
    at_end: bool = key(True, "one round after the last step")
    mode: str = key("hold", "pin the version during a round, or let it move and label the metric mixed",
                    choices=("hold", "free"))  # fmt: skip
