"""The tables of a topology that say what runs and how it meets: processes, bus, ring, dispatch, limits, faults, pace.

Declarations alone; `schema.py` puts them together. Knows nothing of files, models or rules between keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from busrl.topology.keys import REQUIRED, describe, key

SPAWNED_ROLES = ("rollout", "reward", "learner", "validator")  # what [[process]] may name


@dataclass(frozen=True)
class Bus:
    """[bus]: the doorbell."""

    endpoint: str = key("ipc", "sockets in the run's 0700 directory; tcp://ADDRESS:PORT: listed keys connect there too")
    keys: str = key("", "directory of `busrl keys`, needed for tcp; empty: busrl/keys in $XDG_CONFIG_HOME", path=True)
    hwm: int = key(20000, "messages queued per socket before libzmq drops (slower, never wrong)", low=1, high=10**7)
    max_message_bytes: int = key(1 << 20, "a larger message is refused by its receiver", low=4096, high=1 << 30)


@dataclass(frozen=True)
class Ring:
    """[ring]: the shared-memory ledger."""

    slots: int | str = key("auto", "slots; auto = groups.size x admitted groups + the validation reserve",
                           words=("auto",), low=1, high=1 << 20)  # fmt: skip
    slot_bytes: int | str = key("auto", "payload bytes per slot; auto = from the longest prompt and completion",
                                words=("auto",), low=256, high=1 << 30)  # fmt: skip
    processes: int = key(64, "entries of the process table; restarts re-use theirs", low=8, high=4096)


@dataclass(frozen=True)
class Scheduler:
    """[scheduler]: which prompt next."""

    policy: str = key("fifo", "order of dispatch: as drawn, shortest or longest predicted answer first, or short in a "
                      "stream and long in a round", choices=("fifo", "sjf", "ljf", "adaptive"))  # fmt: skip
    predictor: str = key("rules", "who predicts the length of an answer: words, a model of texts, like answers, or all "
                         "three; the oracle reads the trace (scripted engine only)",
                         choices=("rules", "learned", "history", "blend", "oracle"))  # fmt: skip
    keywords: str = key("", "TOML table of weighted words for rules and blend; empty: the one that is shipped",
                        path=True)  # fmt: skip
    horizon: int = key(0, "a policy reorders only within this many drawn groups; 0 = 2 x n_min", low=0, high=1 << 20)
    ahead: int = key(0, "open no new group while this many samples wait for an engine, so that order is decided late; "
                        "0 = no limit", low=0, high=1 << 20)  # fmt: skip
    aging: float = key(0.5, "how much waiting raises a prompt's rank, so that nothing starves", low=0, high=1000)
    tail_share: float = key(0.25, "adaptive, in a stream: share of the workers' rows kept for the longest quarter",
                            low=0, high=0.9)  # fmt: skip
    probe: bool = key(False, "one sample of a group first; its siblings follow in the order that its length teaches")


@dataclass(frozen=True)
class Limits:
    """[limits]: how long anything may take before it is named."""

    ready_s: float = key(120.0, "a child must be ready after this time", low=0, open_low=True)
    progress_s: float = key(30.0, "a process without progress for this long is killed and restarted",
                            low=0, open_low=True)  # fmt: skip
    work_s: float = key(600.0, "the same for one piece of long work: a micro-batch, a prompt's prefill, a part of a "
                               "checkpoint or of a publication, a result of a validation that holds the version",
                        low=0, open_low=True)  # fmt: skip
    stop_s: float = key(10.0, "a stopping process is killed after this time", low=0, open_low=True)
    lease_s: float = key(20.0, "a task of a worker without a mapping of the ring goes back after this silence",
                         low=0, open_low=True, high=3600)  # fmt: skip
    idle_groups: int | str = key("auto", "the run ends, with the cause, after so many groups in a row of which none "
                                 "could be trained; auto = 4 x n_min, at least 32; 0 = never",
                                 words=("auto",), low=0)  # fmt: skip
    restart_attempts: int = key(5, "deaths before ready, in a row, until the run gives up", low=0, high=1000)
    crash_attempts: int = key(8, "deaths after ready, in a row and with no work done in between, until the run gives "
                              "up; 0 = it never does", low=0, high=1000)  # fmt: skip


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
    step_spread: float = key(0.0, "how its times vary from one quarter second to the next: spread of the log", low=0,
                             high=3)  # fmt: skip
    reward_s: float = key(0.03, "mean time that an answer waits until a reward process looks", low=0, high=1e6)
    reward_call_s: float = key(0.0, "one call of the reward; reward.workers of each process make them, others wait",
                               low=0, high=1e6)  # fmt: skip
    learner_step_s: float = key(0.01, "an optimiser step besides its tokens", low=0, high=1e6)
    learner_token_s: float = key(0.00003, "forward and backward of one trained token", low=0, high=1e6)
    learner_group_s: float = key(0.0003, "setting one group aside", low=0, high=1e6)
    learner_spread: float = key(0.0, "how the learner's times vary from step to step: spread of the log", low=0, high=3)
    publish_s: float = key(0.001, "publishing a version", low=0, high=1e6)
    checkpoint_s: float = key(0.05, "writing a checkpoint", low=0, high=1e6)
    length_median: int = key(0, "median answer in tokens where there is no trace; 0 = max_new_tokens / 4",
                             low=0, high=1 << 20)  # fmt: skip
    flat_share: float = key(0.2, "share of the groups whose rewards are all equal, where a trace has no rewards",
                            low=0, high=1, open_high=True)  # fmt: skip
    oracle: bool = key(False, "the policy is told the true lengths instead of predictions")


@dataclass(frozen=True)
class BusFault:
    """[[faults.bus]]: trouble for messages; the first entry that fits a message decides about it."""

    types: tuple[str, ...] = key((), "names of messages, for example NEW_TASK; empty = all")
    roles: tuple[str, ...] = key((), "roles at whose end it happens, launch included; empty = all but the broker")
    at: str = key("receiver", "each receiver loses its own, or the sender loses it for all",
                  choices=("receiver", "sender"))  # fmt: skip
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

    token_s: float = key(0.005, "seconds of a decoding step, in which every sequence gets a token",
                         low=0, open_low=True, high=5)  # fmt: skip
    per_sequence_s: float = key(0.0, "seconds more per step for each sequence that runs at the same time",
                                low=0, high=1)  # fmt: skip
    prefill_s_per_token: float = key(0.0, "seconds for each token of a prompt, or of an answer that is continued",
                                     low=0, high=1)  # fmt: skip
    jitter: float = key(0.0, "every stretch of steps takes up to this share longer or shorter, by chance",
                        low=0, high=1, open_high=True)  # fmt: skip
    learner_s_per_token: float = key(0.0, "the learner takes at least this long per trained token, as a larger model "
                                          "would", low=0, high=0.002)  # fmt: skip
    right: float = key(0.5, "share of answers that are right, by chance, where a line has no rewards", low=0, high=1)


@dataclass(frozen=True)
class Log:
    """[log]: what is kept for people."""

    samples: int | str = key(1, "trained samples of a step that samples.jsonl keeps, with prompt and answer as text",
                             words=("all",), low=0, high=1 << 20)  # fmt: skip


@dataclass(frozen=True)
class Openai:
    """[openai]: the endpoint of engine = "openai", any server that speaks this protocol; see docs/engines.md."""

    base_url: str = key("", "address of the API, for example http://127.0.0.1:8000/v1")
    model: str = key("", "the model's name there; empty = the only one that it has")
    endpoint: str = key("completions", "token ids both ways, or prompts as a user turn of a chat",
                        choices=("completions", "chat"))  # fmt: skip
    update: str = key("none", "how the server is told of new weights; none = it keeps those that it was started with",
                      choices=("none", "vllm", "sglang"))  # fmt: skip
    api_key_env: str = key("", "environment variable that holds the key; empty = no key is sent")
    tools: str = key("", "chat: JSON file with a list of tools that every request names", path=True)
    timeout_s: float = key(60.0, "a try that brings no token for this long has failed", low=0, open_low=True, high=3600)
    retries: int = key(8, "a request that fails so often in a row, while others succeed, is given up", low=0, high=1000)
    patience_s: float = key(120.0, "no usable answer to any request for this long ends the process, with the reason",
                            low=0, open_low=True, high=86400)  # fmt: skip


@dataclass(frozen=True)
class Process:
    """[[process]]: `count` processes of one role. The bus, keeper and scheduler are implied, one each."""

    role: str = key(REQUIRED, "what the process does", choices=SPAWNED_ROLES)
    count: int = key(1, "how many; 0 = none is started, they join from outside", low=0, high=1024)
    engine: str = key("torch", "rollout: what generates; mock has no model, its answers are scripted: see [mock]; "
                      "openai asks an endpoint: see [openai]", choices=("torch", "mock", "vllm", "openai"))  # fmt: skip
    threads: int = key(1, "threads of its numeric libraries", low=1, high=1024)
    cpus: str = key("", 'cores that its processes may use, "0" or "2-5,8"; all others then stay off them. Empty = '
                    "any that no entry names")  # fmt: skip
    command: tuple[str, ...] = key((), "start this instead of busrl's own process (any language); "
                                       "{run_dir}, {name}, {here} (this file's folder) are filled in")  # fmt: skip
    device: str = key("", "where its model runs; empty = model.device", choices=("", "auto", "cpu", "cuda", "npu"))
    devices: tuple[str, ...] = key((), 'numbers of the devices that it sees, an item per process, dealt in turn: '
                                       '["0", "1"], or ["0,1"] for both in one')  # fmt: skip
    env: dict[str, str] = field(default_factory=dict, metadata=describe("environment variables added for it"))
