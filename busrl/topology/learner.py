"""The learner's tables of a topology: objective, optimiser, steps, memory, ranks and the entropy controller.

A part of `schema`, which offers these tables beside its own, as is the shape of a model's routes. Knows nothing of the
other tables.
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any

import numpy as np

from busrl.algorithms import catalog
from busrl.algorithms.catalog import LossSettings
from busrl.topology.declare import REQUIRED, Rule, Table, key


class Trigger(Table):
    """[learner.trigger]: when an optimiser step fires; counts are in groups."""

    n_min: int = key(32, "fire when this many groups are ready", low=1, high=65536)
    t_max_s: float = key(math.inf, "fire after this many seconds if n_floor groups are ready; inf = never",
                         words=("inf",), above=0, finite=False)
    count: str = key("usable", "what n_min counts: groups to train on, or all that ended", choices=("usable", "ended"))
    n_floor: int = key(0, "fewest groups that t_max_s may fire with; 0 = max(4, n_min / 4)", low=0, high=65536)


class Controller(Table):
    """[learner.controller]: whether n_min and t_max_s follow the entropy of the policy; see docs/control.md."""

    mode: str = key("off", "no controller, log what it would do, or do it", choices=("off", "advise", "act"))
    n_lo: int = key(0, "smallest n_min that it may choose (high entropy); 0 = n_min / 2", low=0, high=65536)
    n_hi: int = key(0, "largest n_min that it may choose (low entropy); 0 = 2 x n_min", low=0, high=65536)
    every: int = key(5, "a decision every so many steps", low=1, high=10000)
    cooldown: int = key(10, "after a move nothing moves for so many steps", low=0, high=10000)


ON_GPUS = ("flex_attention", "flash_attention_2", "flash_attention_3")
ATTENTIONS = ("sdpa", "eager", *ON_GPUS)  # names of transformers


class Memory(Table):
    """[learner.memory]: what the learner keeps for its backward, and what it computes again or in pieces."""

    activation_checkpointing: str = key("auto", "keep the input of each layer alone and compute the rest again; auto = "
                                                "on an accelerator from 1 B parameters on",
                                        choices=("auto", "full", "none"))
    head_rows: int = key(0, "rows of logits that exist at the same time; 0 = as many as 64 MiB hold (on an accelerator "
                            "256 MiB)", low=0, high=1 << 20)
    head_dtype: str = key("model", "number type in which logits are multiplied out: that of the weights, or float32",
                          choices=("model", "float32"))
    attention: str = key("auto", "auto = packed rows, a shared prompt once; or an implementation of transformers, by "
                                 "name, over rows of whole samples", choices=("auto", *ATTENTIONS))
    compile: bool = key(False, "compile each layer (torch.compile), which takes minutes at the start; needs a C++ "
                               "compiler on a CPU, Triton on a GPU")


class Value(Table):
    """[learner.value]: the value head of advantage = "gae" (PPO); see docs/beyond-groups.md."""

    gamma: float = key(1.0, "what a reward one token later is worth", above=0, high=1)
    decay: float = key(1.0, "lambda of the advantages", low=0, high=1)
    decay_of_values: float = key(1.0, "lambda of what values are trained towards; 1 = the sum of rewards", low=0,
                                 high=1)
    whiten: bool = key(True, "advantages have mean 0 and variance 1 over the tokens of a step, which is then "
                             "computed when it fires")
    coef: float = key(0.1, "how much of the value loss reaches the model; 0 = the head alone is trained", low=0,
                      high=100)
    clip: float = key(0.5, "the value loss is clipped at this distance from the value before the step; 0 = off", low=0,
                      high=1e6)
    rate: float = key(10.0, "learning rate of the head, in learning rates of the model", above=0, high=1e6)


OPTIMIZERS = ("adamw", "adamw8bit", "adafactor")


class Parallel(Table):
    """[learner.parallel]: a learner of several processes (ranks); see docs/ranks.md."""
    replicate: int = key(1, "copies of the parts: groups of ranks that hold one model each", low=1, high=512)
    tensor: int = key(1, "ranks that compute one layer together, heads and columns of its matrices cut", low=1, high=64)
    expert: int = key(1, "ranks that the experts of a layer are dealt out over, whole", low=1, high=512)
    offload: str = key("none", "where parts, gradient and optimiser are: on the device, or in the host's memory",
                       choices=("none", "all"))
    reshard: bool = key(True, "give up gathered weights between forward and backward: less memory, one more gathering")
    collective_timeout_s: float = key(120.0, "a rank that others await longer is named, all start again", above=0)
    host_timeout_s: float = key(1800.0, "ranks of another host that are not there after this long end the run", above=0)


def ranks_at(ranks: int, hosts: tuple[str, ...], host: str) -> range:
    """The ranks on `host` ("": home): as many on each, home's first, then in the order in which hosts are named."""
    each, at = ranks // (1 + len(hosts)), ("", *hosts).index(host)
    return range(at * each, (at + 1) * each)


class Parity(Table):
    """[learner.parity]: engines answer fixed prompts, and the learner scores them; see docs/parity.md."""

    updates: str = key("end", "after every update each engine proves by a few tokens that it has the new weights; one "
                              "that does not is a warning, and twice in a row the end of the run",
                       choices=("end", "warn", "off"))
    every: int = key(10, "compare longer answers every so many versions; 0 = never (but for the samples of the first "
                         "step)", low=0, high=1 << 20)
    limit: float = key(0.0, "mean difference in nats above which a warning names the probable cause; 0 = by number "
                            "type", low=0, high=100)
    end: float = key(0.0, "the run ends if the mean difference is above this; 0 = never", low=0, high=100)
    wait_s: float = key(2.0, "a step waits so long, after its version is out, for engines that have not answered",
                        low=0, high=600)
    copy: bool = key(False, "keep the weights of the version before in host memory, so that a layer that was left out, "
                            "a stale cache or a wrong version is named at once; false = only after a first difference")


class TeacherRow(Table):
    """[[learner.teacher]]: a teacher, of several or behind an endpoint; one folder alone is model.teacher."""

    tag: str = key("", "it teaches the prompts with this tag (of their source, or of their line); empty = all others")
    path: str = key("", "its model folder, where the learner computes it; the tokenizer of model.path", path=True)
    base_url: str = key("", "or: an OpenAI-compatible endpoint with prompt_logprobs, as vLLM; it ends with /v1")
    posted: bool = key(False, "or: atropos clients post its probabilities (distill_token_ids, distill_logprobs)")
    model: str = key("", "base_url: the model's name there; empty = the only one that it has")
    api_key_env: str = key("", "base_url: environment variable that holds the key; empty = no key is sent")
    concurrency: int = key(64, "base_url: requests under way at a time, of all ranks together", low=1, high=10000)
    timeout_s: float = key(120.0, "base_url: an answer that takes longer is asked for again", above=0, high=3600)
    patience_s: float = key(600.0, "base_url: the learner ends after so long without a usable answer", above=0,
                            high=86400)


class Learner(Table):
    """[learner]: loss, optimiser, log and checkpoints."""

    lr: float = key(REQUIRED, "learning rate for n_min groups; scaled by sqrt(groups / n_min)", above=0, high=10)
    recipe: str = key("", "sets the keys of a published algorithm that are left out; see docs/algorithms.md",
                      choices=("", *catalog.RECIPES), methods=True)
    loss: str = key("ppo_clip", "objective per token; see docs/algorithms.md", choices=tuple(catalog.LOSS_FACTS),
                    methods=True, function=True)
    advantage: str = key("group_std", "how an answer compares with others; see docs/algorithms.md",
                         choices=tuple(catalog.ADVANTAGE_FACTS), methods=True, function=True)
    credit: str = key("episode", "one advantage for all turns of an episode, or one for each: what came of it",
                      choices=("episode", "turn"))
    gamma: float = key(1.0, "what a reward one turn later is worth (credit = turn)", above=0, high=1)
    unit: str = key("episode", "what aggregation and losses of whole samples take as one: an episode, or each turn",
                    choices=("episode", "turn"))
    aggregation: str = key("token-mean", "from the losses of tokens to that of a step", choices=catalog.AGGREGATIONS,
                           methods=True)
    length_norm: int = key(0, "aggregation = seq-mean-token-sum-norm: what a sum is divided by; 0 = the limit of an "
                              "answer", low=0, high=1 << 24)
    ratio: str = key(
        LossSettings.ratio,
        "what the ratio of a loss is to: recorded log-probabilities, or those of the weights before the step",
        choices=("behaviour", "proximal")
    )
    newest_ratio: str = key("recorded", "ratio of tokens drawn by the very weights that are trained: to what was "
                            "recorded, or exactly 1", choices=("recorded", "one"))
    correction: str = key(
        LossSettings.correction, "weight for what separates trainer and engine; see docs/algorithms.md",
        choices=tuple(catalog.CORRECTIONS), methods=True
    )
    correction_low: float = key(
        LossSettings.correction_low, "lower bound of the correction; 0 = its own default", low=0, high=1000
    )
    correction_high: float = key(
        LossSettings.correction_high, "upper bound of the correction; 0 = its own default", low=0, high=1e6
    )
    kl: str = key(LossSettings.kl, "estimator of the KL to model.reference", choices=catalog.KL_TERMS, methods=True)
    kl_coef: float = key(LossSettings.kl_coef, "what the KL is multiplied by", low=0, high=100)
    kl_in: str = key("loss", "add the KL to the loss of each token, or take its sum from the reward of the answer",
                     choices=("loss", "reward"))
    entropy_coef: float = key(
        LossSettings.entropy_coef, "this times the entropy of each token is taken from its loss", low=0, high=100
    )
    teacher_k: int = key(8, "tokens of model.teacher that are looked at in the place of each generated one", low=1,
                         high=1024)
    teacher_top: str = key("teacher", "whose most probable tokens these are: a teacher's, or the trained model's",
                           choices=("teacher", "student"))
    teacher: tuple[TeacherRow, ...] = ()
    teacher_coef: float = key(
        LossSettings.teacher_coef,
        "this times KL(model.teacher || model) over these tokens is added to the loss of each token",
        low=0, high=100
    )
    metrics: tuple[str, ...] = key((), "functions that add numbers of your own to each line of metrics.jsonl, as "
                                   "package.module:name or file.py:name (docs/extend-functions.md)")
    optimizer: str = key("adamw", "what turns gradients into updates; adamw8bit has states of 8 bits (busrl[adam8])",
                         choices=OPTIMIZERS, function=True)
    options: dict[str, Any] = field(default_factory=dict, metadata={"rule": Rule(
        "arguments of adafactor, or of an optimiser class of your own")})
    train_layers: str = key("", "train these alone, for example 20-27,lm_head: layers by number from 0, or parts of "
                                "parameter names; empty = all")
    betas: tuple[float, float] = key((0.9, 0.999), "AdamW betas", low=0, below=1)
    weight_decay: float = key(0.0, "AdamW weight decay", low=0, high=10)
    eps: float = key(1e-8, "AdamW epsilon", above=0, high=1)
    clip_low: float = key(LossSettings.clip_low, "the ratio is clipped below at 1 - clip_low", low=0, high=1)
    clip_high: float = key(LossSettings.clip_high, "the ratio is clipped above at 1 + clip_high", low=0, high=100)
    dual_clip: float = key(
        LossSettings.dual_clip, "bound on the loss of tokens with negative advantage", above=1, high=1000
    )
    tis_cap: float = key(LossSettings.tis_cap, "cap of the importance weight (loss = decoupled)", above=0, high=1000)
    cispo_cap: float = key(LossSettings.cispo_cap, "cap of the ratio itself (loss = cispo)", above=0, high=1000)
    sapo_taus: tuple[float, float] = key(
        LossSettings.sapo_taus, "temperatures of the gate for A > 0 and others (loss = sapo)", above=0, high=1000
    )
    two_sided_delta: float = key(
        LossSettings.two_sided_delta, "bound on the ratio (loss = two_sided)", above=1, high=1000
    )
    dppo_mask: float = key(
        LossSettings.dppo_mask, "change of probability beyond which a token is dropped (loss = dppo)", above=0, high=1
    )
    dppo_square: float = key(LossSettings.dppo_square, "weight of the squared log-ratio (loss = dppo)", low=0, high=100)
    opsm_delta: float = key(
        LossSettings.opsm_delta, "mean log-ratio in nats beyond which a bad answer is dropped (loss = opsm)",
        low=0, high=100
    )
    m2po_tau: float = key(LossSettings.m2po_tau, "mean squared log-ratio that is left (loss = m2po)", above=0, high=100)
    cov_share: float = key(
        LossSettings.cov_share, "share of all tokens that is held (loss = clip_cov, kl_cov)", above=0, high=1
    )
    clip_cov_range: tuple[float, float] = key(
        LossSettings.clip_cov_range, "covariances that are eligible (loss = clip_cov)", low=0, high=1e6
    )
    kl_cov_coef: float = key(
        LossSettings.kl_cov_coef, "weight of the log-ratio's size (loss = kl_cov)", low=0, high=100
    )
    max_grad_norm: float = key(1.0, "the gradient is clipped to this norm", above=0, high=1e6)
    warmup_groups: int = key(0, "groups over which lr rises from 0", low=0)
    decay: str = key("none", "shape of the fall of lr after the warm-up", choices=("none", "linear", "cosine"))
    decay_groups: int = key(0, "groups over which it falls; 0 = to the end of the run", low=0)
    decay_to: float = key(0.0, "share of lr that is left at the end of the fall", low=0, high=1)
    micro_batch_tokens: int = key(4096, "padded tokens per forward and backward", low=1, high=1 << 26)
    micro_batch_min_samples: int = key(16, "start a micro-batch when this many samples are ready", low=1, high=65536)
    updates_per_batch: int = key(1, "optimiser updates per step, each on a mini-batch of whole groups", low=1, high=64)
    passes_per_batch: int = key(1, "passes over the samples of a step, each of updates_per_batch updates", low=1,
                                high=64)
    publish_every: int = key(1, "publish the weights every so many steps", low=1, high=1024)
    checkpoint_every: int = key(50, "a checkpoint every so many steps (of n_min groups); 0 = only at the end", low=0)
    checkpoint_mode: str = key("auto", "training waits for a checkpoint (sync), or goes on while weights and optimiser "
                                       "are written in shards; auto = async with several ranks",
                               choices=("auto", "sync", "async"))
    start_from: str = key("", "checkpoint (global_step_N) of another run with whose weights this one begins; empty = "
                              "those of model.path", path=True)
    start_optimizer: bool = key(True, "start_from: begin with its optimiser too")
    keep_last: int = key(2, "checkpoints kept", low=1, high=10000)
    wal: str = key("sync", "write-ahead log: with fsync, without, or none", choices=("sync", "async", "off"))
    deterministic: bool = key(False, "claim at firing and train in (group, member) order")
    routes: str = key("auto", "mixture of experts: train each token with the experts that the engine chose for it "
                      "(replay), or with those that the learner chooses (own); see docs/experts.md",
                      choices=("auto", "replay", "own"))
    routes_of: str = key("all", "replay: of prompt and answer, or of the answer alone, which costs less memory with "
                         "long prompts", choices=("all", "answer"))
    log_routes: str = key("auto", "replay: keep the engine's choices in the write-ahead log; off = a step that is "
                          "trained again after a crash takes the learner's; auto = on below 64 MB a step",
                          choices=("auto", "on", "off"))
    balance: float = key(0.0, "mixture of experts: this times the loss that spreads tokens evenly over experts is "
                         "added; 0 = off", low=0, high=100)
    routes_compare_every: int = key(0, "replay: of so many micro-batches one, by lot, is computed again with the "
                                    "learner's own choices, to compare (routes/mismatch_own); 0 = never",
                                    low=0, high=1 << 20)
    mismatch_limit: float = key(1.0, "the run ends if, before its first step, the engines' log-probabilities are this "
                                     "far (nats, mean) from the learner's; 0 = never", low=0)
    ess_alarm: float = key(0.3, "warn if the effective sample size (ess) of two in three steps is below this; 0 = off",
                           low=0, high=1)
    length_alarm: float = key(0.9, "warn if trained answers are shorter than this share of all; 0 = off", low=0, high=1)
    length_alarm_steps: int = key(20, "steps over which lengths are compared", low=1, high=10000)
    trigger: Trigger = field(default_factory=Trigger)
    controller: Controller = field(default_factory=Controller)
    value: Value = field(default_factory=Value)
    memory: Memory = field(default_factory=Memory)
    parity: Parity = field(default_factory=Parity)
    parallel: Parallel = field(default_factory=Parallel)

    @property
    def held_back(self) -> str:
        """The reason why a step is computed at once, when it fires; empty where parts of it may be."""
        return catalog.held_back(self)

    @property
    def trains_flat(self) -> bool:
        """Tell whether groups whose rewards are all equal are trained like any other."""
        return catalog.trains_flat(self)

    @property
    def batch_varies(self) -> bool:
        """Tell whether steps can have other sizes than n_min: intervals then count groups."""
        return self.controller.mode == "act" or math.isfinite(self.trigger.t_max_s)

    @property
    def n_range(self) -> tuple[int, int]:
        """(n_lo, n_hi) that the controller chooses from, in every mode."""
        n_min, controller = self.trigger.n_min, self.controller
        return controller.n_lo or max(1, n_min // 2), controller.n_hi or 2 * n_min

    def saves_meanwhile(self, ranks: int) -> bool:
        """Tell whether training goes on while a checkpoint is written."""
        return self.checkpoint_mode == "async" or (self.checkpoint_mode == "auto" and ranks > 1)


class Log(Table):
    """[log]: what is kept for people."""

    samples: int | str = key(1, "trained samples of a step that samples.jsonl keeps, with prompt and answer as text",
                             words=("all",), low=0, high=1 << 20)
    keep_mb: float = key(256.0, "MB of each file that is for people (logs, metrics, samples, pace, ...) that are kept, "
                         "the newest; 0 = all, see docs/operating.md", low=0, high=1e9)

    @property
    def keep(self) -> int:
        """`keep_mb` in bytes."""
        return int(self.keep_mb * 1e6)


# -- of a model that is a mixture of experts -----


class Routing(Table):
    """The shape of a model's routes: for each token, in each of `layers`, the `top_k` experts of `experts` that a
    router chose."""

    layers: tuple[int, ...]  # those that have experts, by number
    experts: int
    top_k: int

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint8 if self.experts <= 256 else np.uint16)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the routes of one token."""
        return len(self.layers), self.top_k

    @property
    def bytes_per_token(self) -> int:
        return len(self.layers) * self.top_k * self.dtype.itemsize


# Left out of topology.json where they have their defaults, as `derived.routing` is where a run carries no routes.
OF_ROUTES = {"routes": "auto", "routes_of": "all", "log_routes": "auto", "balance": 0.0, "routes_compare_every": 0}
