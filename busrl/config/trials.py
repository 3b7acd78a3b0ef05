"""Tables of a topology for trying things out: what a simulation assumes, faults on purpose, scripted engines, the log.

A part of `schema`, which offers these tables beside its own. Knows nothing of the other tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from busrl.config.declare import REQUIRED, key

BYTES_PER_TOKEN = 4  # of a prompt of a scripted engine: what tokenizers come to for plain text


@dataclass(frozen=True)
class Simulate:
    """[simulate]: what `busrl simulate` assumes, times in seconds; set here, they go before --fit and [mock]."""

    actors: int = key(0, "rollout processes; 0 = as many as the topology starts", low=0, high=1 << 20)
    step_s: float = key(0.004, "a decoding step of a rollout process ...", low=0, high=1e6)
    row_s: float = key(0.00004, "... and more for each sequence that it runs", low=0, high=1e6)
    sequence_s: float = key(0.0002, "a sequence that joins or leaves", low=0, high=1e6)
    prefill_token_s: float = key(0.000005, "a token of its prompt, or of earlier segments", low=0, high=1e6)
    weights_s: float = key(0.002, "new weights stop a rollout process for this long", low=0, high=1e6)
    speed_spread: float = key(0.0, "how unequal rollout processes are: spread of the log of their times", low=0, high=3)
    step_spread: float = key(0.0, "how its times vary between quarter seconds: spread of the log", low=0, high=3)
    reward_s: float = key(0.03, "mean time that an answer waits until a reward process looks", low=0, high=1e6)
    reward_call_s: float = key(0.0, "one call of the reward, made by one of reward.workers", low=0, high=1e6)
    learner_step_s: float = key(0.01, "an optimiser step besides its tokens", low=0, high=1e6)
    learner_token_s: float = key(0.00003, "forward and backward of one trained token", low=0, high=1e6)
    learner_group_s: float = key(0.0003, "setting one group aside", low=0, high=1e6)
    learner_spread: float = key(0.0, "how the learner's times vary from step to step: spread of the log", low=0, high=3)
    publish_s: float = key(0.001, "publishing a version", low=0, high=1e6)
    checkpoint_s: float = key(0.05, "writing a checkpoint", low=0, high=1e6)
    length_median: int = key(0, "median answer without a trace, in tokens; 0 = max_new_tokens / 4", low=0, high=1 << 20)
    flat_share: float = key(0.2, "share of flat groups (equal rewards), if a trace has no rewards", low=0, below=1)
    oracle: bool = key(False, "the policy gets the true lengths instead of predictions")


@dataclass(frozen=True)
class BusFault:
    """[[faults.bus]]: trouble for messages; the first entry that fits a message decides about it."""

    types: tuple[str, ...] = key((), "names of messages, for example NEW_TASK; empty = all")
    roles: tuple[str, ...] = key((), "roles at whose end it happens, launch included; empty = all but the broker")
    at: str = key("receiver", "each receiver loses its own, or the sender for all", choices=("receiver", "sender"))
    drop: float = key(0.0, "share of the messages that is lost", low=0, high=1)
    duplicate: float = key(0.0, "share that arrives twice", low=0, high=1)
    delay_s: float = key(0.0, "each arrives late, by anything up to this", low=0, high=60)
    reorder: float = key(0.0, "share that the next message overtakes", low=0, high=1)


@dataclass(frozen=True)
class CrashFault:
    """[[faults.crash]]: a process ends by SIGKILL at a named step of the ring; see docs/faults.md."""

    process: str = key(REQUIRED, "which process, for example rollout/0")
    point: str = key(REQUIRED, "name of the step, for example commit.before")
    count: int = key(1, "it dies when it passes the step for this time", low=1, high=1 << 40)
    lives: int = key(1, "in so many lives of the process; 0 = in every one", low=0, high=1 << 20)


@dataclass(frozen=True)
class Faults:
    """[faults]: faults on purpose, for tests and for trying out an actor."""

    seed: int = key(0, "seed of everything that happens by chance here", low=0, high=2**31 - 1)
    bus: tuple[BusFault, ...] = ()
    crash: tuple[CrashFault, ...] = ()


@dataclass(frozen=True)
class Mock:
    """[mock]: the pace of scripted engines (engine = "mock"); lengths come from data.train, which is then a trace."""

    token_s: float = key(0.005, "seconds of a decoding step, in which every sequence gets a token", above=0, high=5)
    per_sequence_s: float = key(0.0, "seconds more per step for each running sequence", low=0, high=1)
    prefill_s_per_token: float = key(0.0, "seconds for each token of a prompt or earlier segment", low=0, high=1)
    jitter: float = key(0.0, "each stretch of steps is up to this share longer or shorter", low=0, below=1)
    learner_s_per_token: float = key(0.0, "least time of the learner per trained token", low=0, high=0.002)
    right: float = key(0.5, "share of answers that are right, by chance, where a line has no rewards", low=0, high=1)


@dataclass(frozen=True)
class Log:
    """[log]: what is kept for people."""

    samples: int | str = key(1, "trained samples of a step that samples.jsonl keeps, with prompt and answer as text",
                             words=("all",), low=0, high=1 << 20)


@dataclass(frozen=True)
class ControllerRules:
    """[experiments.controller]: the thresholds of learner.controller, with measured defaults; see docs/control.md."""

    ema: float = key(0.9, "what a smoothed number keeps of itself per step", low=0, below=1)
    probe_every: int = key(5, "the probe set is scored every so many steps", low=1, high=10000)
    probe_samples: int = key(32, "samples of the probe set, in whole groups of the first step", low=1, high=65536)
    reference_steps: int = key(20, "H_ref and the clip baseline are means over the first so many steps", low=1)
    high: float = key(1.3, "H / H_ref above it is high", above=0, high=100)
    low: float = key(0.6, "H / H_ref below it is low", above=0, high=100)
    hysteresis: float = key(0.1, "a band is left so far inside of its threshold", low=0, high=10)
    high_t_max_s: float = key(0.25, "t_max_s at high entropy, where it is finite", above=0)
    low_t_max_s: float = key(1.0, "t_max_s at low entropy, where it is finite", above=0)
    clip_factor: float = key(5.0, "a clip fraction so many times its baseline vetoes smaller steps", low=1, high=1e6)
    clip_floor: float = key(0.001, "least baseline of the clip fraction", above=0, high=1)
    ess_low: float = key(0.5, "an ESS below it vetoes smaller steps", low=0, high=1)


@dataclass(frozen=True)
class Experiments:
    """[experiments]: for measurements; each of these has been tried and is off."""

    dmmpt: str = key("off", "leave out mastered tokens: never, always, at low entropy", choices=("off", "on", "gate"))
    dmmpt_tau: float = key(0.99, "mastered: a token of a better answer with at least this probability", low=0, high=1)
    dmmpt_sigma: float = key(0.2, "nats; only in answers of lower mean entropy; and of the gate", above=0, high=100)
    forced_age: int = key(0, "publish the weights this many steps late", low=0, high=1024)
    controller: ControllerRules = field(default_factory=ControllerRules)
