"""The topology of a run as frozen dataclasses: every table of a topology file, and what is computed from them.

Attributes are keys, and each key is declared here, in `learner`, in `prompts` or in `rewards`, and nowhere else. Every
role reads its settings from here. Knows nothing of files, rules between keys, torch or NumPy.

- Frozen: what `launch` checked is what every process sees.
- `Derived` holds everything computed from more than one key, so that no two processes can compute it differently.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import field
from typing import Any

from busrl.capabilities import CALLER_ROLES, IMPLIED_ROLES, RANK, ROLES
from busrl.scheduling.admission import MODES, AdmissionLimits
from busrl.topology.declare import REQUIRED, Rule, Table, build, key, plain
from busrl.topology.kinds import ENGINES, FIFO, POLICIES, RESTARTS, SCRIPTED, TRANSPORTS
from busrl.topology.learner import OF_ROUTES, Learner, Log, Routing, ranks_at
from busrl.topology.models import SeveralModels
from busrl.topology.prompts import AskedSet, Data, MadeSet, SourceLines, Validation
from busrl.topology.rewards import Reward

BYTES_PER_TOKEN = 4  # of a prompt of a scripted engine: what tokenizers come to for plain text
AGENT = "agent"  # the role that plays episodes
NAMED_ROLES = tuple(role.name for role in ROLES.values() if role.named)  # that an entry of [[process]] may name
SERVE = "serve"  # the role that lets clients play them
ATROPOS = "atropos"  # the role that takes groups of them from environments
SINKS = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio", "prometheus": "prometheus_client"}
PREFIX_KEEP_S = 30.0  # generation.prefix_keep_s = "auto", with agents
MESSAGE_FIELD_BYTES = 4096  # of a message that carries a sample, besides the bytes of its slot
TABLE_TENSORS, TENSORS_OF_SLOT, TENSORS_OF_SEGMENT = 48, 4, 3  # task, prompt_ids, reward_parts, text; the arrays
MOST_SEGMENTS = (TABLE_TENSORS - TENSORS_OF_SLOT) // TENSORS_OF_SEGMENT  # what the table of a slot has room for


# -- what is trained, on what, and how -----


class Run(Table):
    """[run]: the experiment as a whole."""

    name: str = key("run", "name of the run, also the start of its directory's name")
    seed: int = key(0, "seed of the data order, of sampling and of the training", low=0, high=2**31 - 1)
    max_steps: int = key(200, "the run ends after this many optimiser steps", low=1)
    max_groups: int = key(0, "or after this many trained groups, whichever comes first; 0 = no such limit", low=0)
    template: bool = key(True, "fork processes from one that has imported what they need; false: each starts alone")


class Model(Table):
    """[model]: what is trained."""

    path: str = key(REQUIRED, "a Hugging Face model folder, or the quickstart's own model tiny:sort", path=True)
    reference: str = key("", "model folder of the reference of learner.kl; empty = model.path as the run begins",
                         path=True)
    teacher: str = key("", "model folder of the teacher of loss topk_kl and learner.teacher_coef; the same tokenizer",
                       path=True)
    dtype: str = key("auto", "number type of the weights; auto = bfloat16 on an accelerator, float32 on a CPU",
                     choices=("auto", "float32", "bfloat16"))
    seats: tuple[str, ...] = key((), "seats of an episode that this model plays, as in self-play; empty = one")
    device: str = key("auto", "the model's device; auto = best; docs/gpu.md", choices=("auto", "cpu", "cuda", "npu"))


class Lora(Table):
    """[lora]: train a low-rank adapter of the model instead of all of its weights; needs the extra busrl[lora]."""

    rank: int = key(0, "rank of the adapter; 0 = off, all weights are trained", low=0, high=4096)
    alpha: int = key(0, "what the adapter adds is scaled by alpha / rank; 0 = 2 x rank", low=0, high=1 << 20)
    targets: tuple[str, ...] = key((), "last names of the layers that get one, as q_proj; empty = all but the head")
    dropout: float = key(0.0, "share of a layer's inputs that its adapter does not see while training", low=0, below=1)
    layers: str = key("", "layers that get one, by number from 0, for example 20-31 or 0-3,28-31; empty = all")
    experts: bool = key(False, "the experts of a mixture get one too, where a layer has them in one parameter")

    @property
    def on(self) -> bool:
        return self.rank > 0

    @property
    def scale(self) -> float:
        """The factor of the product of the adapter's two matrices."""
        return (self.alpha or 2 * self.rank) / max(1, self.rank)


class Groups(Table):
    """[groups]: samples per prompt."""

    size: int = key(8, "samples per prompt, G; their rewards are compared with each other, unless learner.advantage "
                       "compares nothing", low=1, high=1024)


class Generation(Table):
    """[generation]: sampling of training trajectories."""

    max_new_tokens: int = key(64, "a completion is cut after this many tokens", low=1, high=1 << 20)
    temperature: float = key(1.0, "sampling temperature of training tasks", above=0, high=10)
    top_p: float = key(1.0, "nucleus sampling; training needs 1.0", above=0, high=1)
    max_batch: int = key(128, "sequences that one rollout process generates at the same time", low=1, high=65536)
    max_prompt_tokens: int | str = key("auto", "a longer prompt is set aside (fate l); auto = what the longest needs",
                                       words=("auto",), low=1, high=1 << 20)
    prefill_tokens: int = key(2048, "torch engine: most prompt tokens between two decoding steps", low=1, high=1 << 20)
    on_update: str = key("auto", "keys and values of running sequences after new weights: kept, or computed again; "
                         "auto = the engine's own choice", choices=("auto", "keep", "recompute"))
    prefix_keep_s: float | str = key("auto", "torch engine: keys and values of a request that ended wait so long for "
                                     "one that continues it; auto = 30 with agents, else 0", words=("auto",), low=0,
                                     high=1e6)


class Segments(Table):
    """[segments]: long training answers in pieces, each generated and committed by itself."""

    length: int | str = key(0, "tokens of one segment; 0 = answers are made in one go, auto = from the lengths seen",
                            words=("auto",), low=0, high=1 << 20)
    max_segments: int = key(8, "an answer has at most so many segments", low=1, high=MOST_SEGMENTS)
    global_max_length: int = key(0, "tokens of a whole answer; 0 = generation.max_new_tokens", low=0, high=1 << 20)
    loss: str = key("behaviour", "trained: all tokens with their own ratios, all with ratio 1, or the last segment",
                    choices=("behaviour", "pois", "last_segment"))
    rounds: str = key("answers", "sync: a round is of answers or a segment of each", choices=("answers", "segments"))

    @property
    def on(self) -> bool:
        return self.length != 0

    @property
    def waves(self) -> int:
        """Waves that an answer may take, where rounds are made of segments; else 0."""
        return self.max_segments if self.on and self.rounds == "segments" else 0


class Sparse(Table):
    """[weights.sparse]: only the values that changed, instead of all of them (docs/weights.md)."""

    enabled: bool = key(False, "send changed values only where that is less; costs one more copy in the learner")
    threshold: float = key(0.1, "send all values if more than this share of the bytes changed", above=0, high=1)
    key_every: int = key(32, "send all values every so many versions all the same", low=1, high=65536)


class Weights(Table):
    """[weights]: from the learner to the engines."""

    transport: str = key("shm", "how weights travel; see docs/weights.md", choices=tuple(TRANSPORTS))
    restart_every: int = key(1, "lora_restart, checkpoint_restart: take one publication in so many", low=1, high=1024)
    on_restart: str = key("continue", "answers that run while an engine restarts: cut and continued after it, or ended "
                          "before it", choices=("continue", "finish"))
    mode: str = key("batch-async", "how far ahead generation may run", choices=MODES)
    max_staleness: int = key(2, "batch-async: greatest age of a trained sample in steps, S", low=0, high=1024)
    over_age: str = key("wait", "a group above max_staleness holds admission, or is dropped", choices=("wait", "drop"))
    window: int = key(0, "W: groups past the oldest that may go first; 0 = 0.3 of the buffer B", low=0, high=65536)
    timeout_s: float = key(10.0, "a transfer that takes longer names the member that is late", above=0)
    checksum: bool = key(False, "engines check the bytes of each version against a digest (one more pass over them)")
    bucket_mb: int = key(16, "broadcast: MiB that are sent at once and have a deadline of their own", low=1, high=4096)
    backend: str = key("gloo", "broadcast: what carries it; gloo through the host's memory, nccl (CUDA) and hccl (NPU) "
                       "from device to device", choices=("gloo", "nccl", "hccl"))
    sparse: Sparse = field(default_factory=Sparse)

    @property
    def copies(self) -> float:
        """Versions of all values that the learner's host holds: the one that is read and the one that comes next, and
        with sparse updates the changes beside them; none for folders and for weights that are not copied."""
        kind = TRANSPORTS[self.transport]
        return kind.copies + kind.changes * self.sparse.enabled


# -- what runs, and how it meets -----


class Bus(Table):
    """[bus]: the doorbell."""

    endpoint: str = key("ipc", "sockets in the run's 0700 directory; tcp://ADDRESS:PORT: listed keys connect there too")
    keys: str = key("", "directory of `busrl keys`, needed for tcp; empty: busrl/keys in $XDG_CONFIG_HOME", path=True)
    hwm: int = key(20000, "messages queued per socket before libzmq drops (slower, never wrong)", low=1, high=10**7)
    max_message_bytes: int = key(1 << 20, "a larger message is refused by its receiver", low=4096, high=1 << 30)


class Ring(Table):
    """[ring]: the shared-memory ledger."""

    slots: int | str = key("auto", "slots; auto = groups.size x admitted groups + the validation reserve",
                           words=("auto",), low=1, high=1 << 20)
    slot_bytes: int | str = key("auto", "payload bytes per slot; auto = from the longest prompt and completion",
                                words=("auto",), low=256, high=1 << 30)
    expected_tokens: int | str = key("auto", "tokens of a usual answer, for the memory that long answers are expected "
                                     "to take; auto = a quarter of generation.max_new_tokens", words=("auto",), low=1)
    processes: int = key(64, "entries of the process table; restarts re-use theirs", low=8, high=4096)


class Scheduler(Table):
    """[scheduler]: which prompt next."""

    policy: str = key(FIFO, "order of dispatch: as drawn, shortest or longest predicted answer first, or short in a "
                      "stream and long in a round", choices=tuple(POLICIES))
    predictor: str = key("rules", "who predicts the length of an answer: words, a model of texts, like answers, or all "
                         "three; the oracle reads the trace (scripted engine only)",
                         choices=("rules", "learned", "history", "blend", "oracle"))
    keywords: str = key("", "TOML table of weighted words for rules and blend; empty: busrl's own", path=True)
    horizon: int = key(0, "a policy reorders only within this many drawn groups; 0 = 2 x n_min", low=0, high=1 << 20)
    ahead: int = key(0, "open no new group while this many samples wait for an engine, so that order is decided late; "
                        "0 = no limit", low=0, high=1 << 20)
    aging: float = key(0.5, "how much waiting raises a prompt's rank, so that nothing starves", low=0, high=1000)
    tail_share: float = key(0.25, "adaptive, in a stream: share of rows kept for the longest quarter", low=0, high=0.9)

    @property
    def predicts(self) -> bool:
        """Tell whether the order of dispatch goes by predicted lengths."""
        return self.policy in POLICIES and POLICIES[self.policy].predicts


class Limits(Table):
    """[limits]: how long anything may take before it is named."""

    ready_s: float = key(120.0, "a child must be ready after this time, without that in which it used the processor; "
                         "five times as long at most", above=0)
    progress_s: float = key(30.0, "a process without progress for this long is killed and restarted", above=0)
    work_s: float = key(600.0, "the same for one piece of long work: a micro-batch, a prompt's prefill, a part of a "
                        "checkpoint or of a publication, a result of a validation that holds the version", above=0)
    stop_s: float = key(10.0, "a stopping process is killed after this time", above=0)
    lease_s: float = key(20.0, "a remote worker's task goes back after this silence", above=0, high=3600)
    idle_groups: int | str = key("auto", "the run ends, with the cause, after so many groups in a row of which none "
                                 "could be trained; auto = 4 x n_min, at least 32; 0 = never", words=("auto",), low=0)
    stall_steps: float = key(10.0, "a warning says who waits for whom after so many usual step times; 0 = never", low=0)
    stall_s: float = key(120.0, "and after this time at least; five times as long before the first step", above=0)
    restart_attempts: int = key(5, "deaths before ready, in a row, until the run gives up", low=0, high=1000)
    crash_attempts: int = key(8, "deaths after ready, in a row and with no work done in between, until the run gives "
                              "up; 0 = it never does", low=0, high=1000)

    @property
    def start_most_s(self) -> float:
        """Seconds after which no child may still be starting, however hard it works."""
        return 5 * self.ready_s


class Openai(Table):
    """[openai]: the endpoint of engine = "openai", any server that speaks this protocol; see docs/endpoint.md."""

    base_url: str = key("", "address of the API, for example http://127.0.0.1:8000/v1")
    model: str = key("", "the model's name there; empty = the only one that it has")
    endpoint: str = key("completions", "token ids both ways, or prompts as chats", choices=("completions", "chat"))
    update: str = key("none", "how the server gets new weights; none = never", choices=("none", "vllm", "sglang"))
    api_key_env: str = key("", "environment variable that holds the key; empty = no key is sent")
    tools: str = key("", "chat: JSON file with a list of tools that every request names", path=True)
    timeout_s: float = key(60.0, "a try that brings no token for this long has failed", above=0, high=3600)
    retries: int = key(8, "a request that fails so often in a row, while others succeed, is given up", low=0, high=1000)
    patience_s: float = key(120.0, "the process ends after so long without a usable answer", above=0, high=86400)


class Process(Table):
    """[[process]]: `count` processes of one role. The bus, keeper and scheduler are implied, one each."""

    role: str = key(REQUIRED, "what the process does", choices=NAMED_ROLES)
    count: int = key(1, "how many; 0 = none is started, they join from outside", low=0, high=1024)
    engine: str = key("torch", "rollout: what generates; mock has no model, its answers are scripted: see [mock]; "
                      "openai asks an endpoint: see [openai]", choices=tuple(ENGINES))
    threads: int = key(1, "threads of its numeric libraries", low=1, high=1024)
    ranks: int = key(1, "learner: processes that train one model together, a part of it each", low=1, high=512)
    cpus: str = key("", 'cores that its processes may use, "0" or "2-5,8"; all others then stay off them. Empty = '
                    "any that no entry names")
    command: tuple[str, ...] = key((), "start this instead of busrl's own process (any language); "
                                       "{run_dir}, {name}, {here} (this file's folder) are filled in")
    serves: str = key("all", 'rollout: what it answers; "validation" is for validation.mode = "dedicated", and then '
                      "the others train", choices=("all", "validation"))
    device: str = key("", "where its model runs; empty = model.device", choices=("", "auto", "cpu", "cuda", "npu"))
    model: str | tuple[str, ...] = key("", "rollout, learner: the tag of its [[model]]; empty = the lead. A list "
                                       "of tags: one vLLM engine, or one learner, for the adapters of all")
    function: str = key("", "agent: what plays an episode, package.module:function or file.py:function, or a class")
    program: tuple[str, ...] = key((), "agent: start this for each episode instead of a function, led to its model by "
                                       "OPENAI_BASE_URL and OPENAI_API_KEY; {run_dir} and {here} are filled in")
    environment: str = key("", "agent, instead of function: gymnasium:ID, textarena:ID, openenv:URL or verifiers:NAME")
    options: dict[str, Any] = field(default_factory=dict, metadata={"rule": Rule(
        'agent: of its environment: { action = "\\d+", system = "...", chat = false }, and what that itself takes')})
    python: str = key("", "the Python that runs it, or an agent's code: an interpreter or the folder of a virtual "
                      "environment; empty = busrl's", path=True)
    devices: tuple[str, ...] = key((), 'numbers of the devices that it sees, an item per process, dealt in turn: '
                                       '["0", "1"], or ["0,1"] for both in one')
    env: dict[str, str] = field(default_factory=dict, metadata={"rule": Rule("environment variables added for it")})
    hosts: tuple[str, ...] = key((), "names of other hosts, each of which runs `count` (rollout, reward, agent, "
                                 "serve); ranks of a learner are dealt out over this one and these; see docs/hosts.md")

    def is_at(self, host: str) -> bool:  # whether any of its processes are on that host ("": home)
        return host in self.hosts if host else not self.hosts or self.role == "learner"


class Vllm(Table):
    """[vllm]: rollout processes with engine = "vllm"; see docs/vllm.md."""

    tensor_parallel: int = key(1, "devices that one engine spreads its model over", low=1, high=64)
    gpu_memory_utilization: float = key(0.85, "accelerator: share of its memory for weights and cache", above=0, high=1)
    kv_cache_mb: int | str = key("auto", "key-value cache in MiB; auto = what max_batch sequences can need, on an "
                                 "accelerator what is left", words=("auto",), low=1, high=1 << 24)
    enforce_eager: str = key("auto", "no compilation, no CUDA graphs; auto = on CPU", choices=("auto", "on", "off"))
    block_size: int = key(0, "positions per block of the cache; 0 = 32 on CPU, else vLLM's own", low=0, high=4096)
    max_model_len: int = key(0, "longest sequence; 0 = longest prompt and answer", low=0, high=1 << 24)
    seeded: bool = key(True, "a random stream for each sample; false = one for all, faster with many rows")
    start_s: float = key(120.0, "vLLM must have started after this time", above=0)
    rpc_s: float = key(20.0, "a call to vLLM without an answer for this long ends the process", above=0)
    silent_s: float = key(60.0, "so does an engine at work that makes no token for this long", above=0)
    stop_s: float = key(5.0, "a stopping vLLM is killed after this time", above=0)
    check_parameters: int = key(50_000_000, "after the first new weights a model of at most so many parameters is "
                                "compared with a plain forward pass; 0 = never", low=0)
    check_tolerance: float = key(0.0, "largest difference then; 0 = 0.001 for float32, 0.2 for bfloat16", low=0)
    extra: dict[str, str] = field(default_factory=dict, metadata={"rule": Rule(
        'further arguments of vLLM\'s engine, as text: { max_num_batched_tokens = "8192" }')})


class Agents(Table):
    """[agents]: episodes of many model calls, played by processes of the role agent; see docs/agents.md."""

    episodes: int = key(64, "episodes that an agent process plays at the same time", low=1, high=1 << 14)
    children: int = key(1, "processes of each agent process that run the function", low=1, high=256)
    parallel: int = key(8, "model calls of one episode at the same time; more wait", low=1, high=1024)
    context: int = key(0, "token ids that a call reads and draws, at most; 0 = the longest prompt and answer", low=0,
                       high=1 << 24)
    sampled: int = key(0, "ids that an episode draws in all, at most; 0 = four answers", low=0, high=1 << 24)
    tokens: int = key(0, "ids of all training sequences of an episode, at most; 0 = twice the context", low=0,
                      high=1 << 26)
    affinity_ms: float = key(500.0, "a call that continues another is left to that one's engine for so long", low=0,
                             high=1e6)
    max_turns: int = key(64, "model calls of an episode, at most", low=1, high=1 << 16)
    max_sequences: int = key(16, "training sequences of an episode, at most", low=1, high=1 << 12)
    episode_s: float = key(600.0, "time of an episode without that in which its calls wait or generate; one that takes "
                           "longer ends as H", above=0)
    failure_reward: float = key(0.0, "what an episode is worth that raises because a limit above is used up")
    history: str = key("extend", "what a call reads that continues an earlier one: its exact ids and the new messages, "
                       "or what the template makes of all messages", choices=("extend", "template"))
    tools: str = key("auto", "how calls of tools are read: auto (by the template), none, hermes, qwen_xml, llama3, "
                     "mistral, glm, or file.py:function")
    reasoning: str = key("split", "what stands in thinking marks: reasoning_content of the message, or kept in its "
                         "text", choices=("split", "keep"))
    sampling: str = key("override", "clients over HTTP that ask for another temperature than the sample's, say, get "
                        "the sample's, or an error", choices=("override", "refuse"))
    transcript_bytes: int = key(1 << 16, "JSON of an episode's messages, for rewards and people; longer is cut", low=0,
                                high=1 << 26)


class Serve(Table):
    """[serve]: where processes of the roles serve and atropos listen; see docs/serve.md, docs/environments.md."""

    host: str = key("127.0.0.1", "address that is listened on; any other than this machine's own needs a proxy for TLS")
    port: int = key(0, "port of the first, others have the next ones; 0 = any, told in serve-0.json", low=0, high=65000)


class TinkerKey(Table):
    """[[tinker.key]]: a key of a service beside the run's own; `busrl tinker-key NAME` makes one."""

    name: str = key(REQUIRED, "whose it is; sessions, models, samplers and saved weights belong to this name")
    digest: str = key(REQUIRED, "SHA-256 of the key, in hexadecimal digits")
    models: int = key(16, "adapters of its sessions that go on, at most", low=1, high=1 << 16)
    samples_in_flight: int = key(0, "samples that it may have under way; 0 = tinker.samples_in_flight", low=0)
    tokens_per_day: int = key(0, "tokens that it may train on and draw in a day of UTC; 0 = any number", low=0)


class Tinker(Table):
    """[tinker]: training and sampling as a service, where a process has the role tinker; see docs/service.md."""

    host: str = key("127.0.0.1", "address that is listened on; any other than this machine's own needs a proxy for TLS")
    port: int = key(0, "port that is listened on; 0 = any, told in tinker.json", low=0, high=65535)
    base: str = key("", "name of the model for clients; empty = model.path")
    tokenizer: str = key("", "what clients load their tokenizer from; empty = the name of the model")
    context: int = key(2048, "token ids of a sequence, at most", low=16, high=1 << 24)
    weights: str = key("adapters", "what is trained: adapters of many models, or all weights (full) of one at a time",
                       choices=("adapters", "full"))
    max_rank: int = key(64, "highest rank of an adapter", low=1, high=4096)
    models: int = key(64, "adapters of sessions that go on, at most", low=1, high=1 << 16)
    samples_in_flight: int = key(2000, "samples that a key may have under way", low=1, high=1 << 20)
    pending_mb: int = key(256, "MiB of a model's requests that may wait; a client with more must ask again", low=1)
    state_every_s: float = key(60.0, "seconds of a model's work that a death may cost, about", low=0, high=86400)
    turn_tokens: int = key(2048, "tokens that are trained at a time, before the turn of another model", low=1)
    resident_mb: int = key(8192, "MiB of models in memory; above it those used longest ago wait on the disk", low=0)
    silent_s: float = key(120.0, "silence after which the samples of a session wait until it is heard again", above=0)
    session_s: float = key(1800.0, "silence after which a session counts as left, and a model is parked", above=0)
    snapshot_mb: int = key(16384, "MiB of snapshots without a name; above it the ones sampled longest ago go", low=0)
    keep_answers_s: float = key(86400.0, "an answer that no client fetches is kept for this long", low=60)
    key: tuple[TinkerKey, ...] = ()


class Hosts(Table):
    """[hosts]: other hosts, as `hosts` of a [[process]] names them; see docs/hosts.md."""

    ahead: int = key(0, "samples that a host holds beside those that its engines run; 0 = a group, or a sixteenth of "
                     "its rows", low=0, high=1 << 16)
    piece_mb: int = key(1, "MiB of weights that a host asks for at a time", low=1, high=256)
    chain: bool = key(True, "hosts fetch weights from one another, each at a port of its own; false: all from home")
    start: tuple[str, ...] = key((), "launch starts each host by this command, which has to run `busrl host -` there, "
                                     "and starts it again when it ends; {host} is its name; empty = you start them")
    compress: bool = key(False, "hosts compress the routes of their samples (zlib) before they send them, and nothing "
                                "else")
    orphan_s: float = key(1800.0, "a host that hears nothing of the run for this long ends", above=0)


# -- for trying things out -----


class Simulate(Table):
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


class BusFault(Table):
    """[[faults.bus]]: trouble for messages; the first entry that fits a message decides about it."""

    types: tuple[str, ...] = key((), "names of messages, for example NEW_TASK; empty = all")
    roles: tuple[str, ...] = key((), "roles at whose end it happens, launch included; empty = all but the broker")
    at: str = key("receiver", "each receiver loses its own, or the sender for all", choices=("receiver", "sender"))
    drop: float = key(0.0, "share of the messages that is lost", low=0, high=1)
    duplicate: float = key(0.0, "share that arrives twice", low=0, high=1)
    delay_s: float = key(0.0, "each arrives late, by anything up to this", low=0, high=60)
    reorder: float = key(0.0, "share that the next message overtakes", low=0, high=1)


class CrashFault(Table):
    """[[faults.crash]]: a process ends by SIGKILL at a named step of the ring; see docs/faults.md."""

    process: str = key(REQUIRED, "which process, for example rollout/0")
    point: str = key(REQUIRED, "name of the step, for example commit.before")
    count: int = key(1, "it dies when it passes the step for this time", low=1, high=1 << 40)
    lives: int = key(1, "in so many lives of the process; 0 = in every one", low=0, high=1 << 20)


class Faults(Table):
    """[faults]: faults on purpose, for tests and for trying out an actor."""

    seed: int = key(0, "seed of everything that happens by chance here", low=0, high=2**31 - 1)
    bus: tuple[BusFault, ...] = ()
    crash: tuple[CrashFault, ...] = ()


class Scripted(Table):
    """[mock]: the pace of scripted engines (engine = "mock"); lengths come from data.train, which is then a trace."""

    token_s: float = key(0.005, "seconds of a decoding step, in which every sequence gets a token", above=0, high=5)
    per_sequence_s: float = key(0.0, "seconds more per step for each running sequence", low=0, high=1)
    prefill_s_per_token: float = key(0.0, "seconds for each token of a prompt or earlier segment", low=0, high=1)
    jitter: float = key(0.0, "each stretch of steps is up to this share longer or shorter", low=0, below=1)
    learner_s_per_token: float = key(0.0, "least time of the learner per trained token", low=0, high=0.002)
    right: float = key(0.5, "share of answers that are right, by chance, where a line has no rewards", low=0, high=1)


class Sinks(Table):
    """[sinks]: where the numbers of metrics.jsonl and validation.jsonl go too; see docs/metrics.md."""

    to: tuple[str, ...] = key((), f"{', '.join(SINKS)}, or a class of yours as package.module:Class or file.py:Class")
    project: str = key("busrl", "name of the project in Weights & Biases and Trackio")
    host: str = key("127.0.0.1", "address at which Prometheus may ask; it needs no key")
    port: int = key(9464, "its port; 0 = any, told in logs/sinks.log", low=0, high=65535)


class ControllerRules(Table):
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


class Experiments(Table):
    """[experiments]: for measurements; each of these has been tried and is off."""

    forced_age: int = key(0, "publish the weights this many steps late", low=0, high=1024)
    controller: ControllerRules = field(default_factory=ControllerRules)


# -- the whole -----


class Derived(Table):
    """Values that follow from several keys together; `explain` holds the sums as text."""

    limits: AdmissionLimits  # B, W and the thresholds: derived once, used by every process
    horizon: int  # drawn groups among which the policy may reorder
    slots: int  # slots of the ring: train_slots + val_reserve
    train_slots: int
    val_reserve: int  # slots that only validation may take
    slot_bytes: int  # payload bytes per slot
    task_bytes: int  # longest JSONL line
    train_prompts: int  # lines of data.train
    validation_prompts: int  # lines of the file that validation uses, 0 if there is no validation
    ring_bytes: int  # most that the shared-memory file takes, or both where there is a ring of calls
    val_samples: int  # answers of one validation round over all sets, 0 = validation is off
    sets: tuple[AskedSet, ...] = ()  # what a round of validation asks
    prompt_tokens: int = 0  # the limit on prompts, "auto" worked out
    prompt_text: str = ""  # how the tokens of the prompts were counted
    sources: tuple[SourceLines, ...] = ()  # data.train was made of them,
    sources_key: str = ""  # by these settings, of files of this age
    made: tuple[MadeSet, ...] = ()  # the prompts of validation that were made of others in the same way
    trial: tuple[str, ...] = ()  # the first prompt, and what the reward said of two answers to it
    call_slots: int = 0  # of the ring of model calls, 0 = the run has none
    call_slot_bytes: int = 0
    ring_held: int = 0  # as ring_bytes, where each slot holds a usual answer,
    usual_tokens: int = 0  # of so many tokens
    routing: Routing | None = None  # the shape of the routes that samples carry; None: they carry none
    explain: tuple[str, ...] = ()
    algorithm: tuple[str, ...] = ()  # keys that recipe and loss set, and those that the file sets against them
    warnings: tuple[str, ...] = ()


class Follow(Table):
    """[model.follow] of a [[model]]: it answers with checkpoints of another tag; see docs/several-models.md."""

    model: str = key("", "the trained tag whose checkpoints it loads; empty = it follows none")
    every: int = key(50, "those whose step is a multiple of this", low=1)
    back: int = key(0, "so many of them before the newest; process number i of the tag: i more", low=0, high=1024)


class Own(Table):
    """Tables that the topology of a tag beside the lead has of its own; all else is the run's."""

    model: Model
    lora: Lora
    weights: Weights
    learner: Learner
    generation: Generation
    vllm: Vllm
    process: tuple[Process, ...]
    derived: Derived


class Tag(Table):
    """[[model]]: one of several models of a run. Its other keys are those of [model], and [model.learner] and the like
    are keys of that table for this tag alone; see docs/several-models.md."""

    tag: str = key(REQUIRED, "its name, [a-z][a-z0-9-]{0,15}; the first trained one is the lead")
    trained: bool = key(True, "false: it only serves, as a judge or an opponent")
    max_steps: int = key(0, "it is frozen after so many optimiser steps; 0 = run.max_steps", low=0)
    follow: Follow = field(default_factory=Follow)
    seats: tuple[str, ...] = ()
    first: int = 0  # number of its first rollout process
    own: tuple[Own, ...] = ()  # one; of the lead none: it has the tables of the run


class ProcessName(Table):
    """A process to start: its name ("rollout/0", "learner"), role, index, and the entry it comes from."""

    name: str
    role: str
    index: int
    spec: Process
    place: int = 0  # which of the processes of its entry it is

    @property
    def devices(self) -> str:
        return self.spec.devices[self.place % len(self.spec.devices)] if self.spec.devices else ""


def has_model(entry: Process) -> bool:
    """Tell whether processes of this entry load the model: the learner, and rollouts with an engine that has one
    here."""
    generates = entry.role == "rollout" and entry.engine in ENGINES and ENGINES[entry.engine].model == "here"
    return not entry.command and (entry.role == "learner" or generates)


class Topology(SeveralModels, Table):
    """A checked topology. `source` is the file it was read from, `overrides` the --set arguments."""

    run: Run
    model: Model
    data: Data
    groups: Groups
    generation: Generation
    bus: Bus
    ring: Ring
    scheduler: Scheduler
    learner: Learner
    weights: Weights
    reward: Reward
    validation: Validation
    limits: Limits
    process: tuple[Process, ...]
    derived: Derived
    faults: Faults = field(default_factory=Faults)
    mock: Scripted = field(default_factory=Scripted)
    openai: Openai = field(default_factory=Openai)
    vllm: Vllm = field(default_factory=Vllm)
    segments: Segments = field(default_factory=Segments)
    lora: Lora = field(default_factory=Lora)
    agents: Agents = field(default_factory=Agents)
    serve: Serve = field(default_factory=Serve)
    tinker: Tinker = field(default_factory=Tinker)
    hosts: Hosts = field(default_factory=Hosts)
    log: Log = field(default_factory=Log)
    sinks: Sinks = field(default_factory=Sinks)
    simulate: Simulate = field(default_factory=Simulate)
    experiments: Experiments = field(default_factory=Experiments)
    source: str = ""
    overrides: tuple[str, ...] = ()
    here: str = ""  # the name of the host that these processes are for; empty = the one of the run directory
    # Of a run of several models; left out of topology.json otherwise. `of` says what these are in a projection.
    models: tuple[Tag, ...] = ()
    tag: str = ""  # whose topology this is
    frozen: bool = False  # it only serves
    first: int = 0  # number of its first rollout process,
    apart: int = 0  # and what the number of each further one has more; 0 = 1, but for the lead of several
    follows: tuple[Follow, ...] = ()  # one, where it answers with checkpoints of another tag
    served_by: tuple[str, ...] = ()  # rollout processes of other tags that answer for it too

    @property
    def base_dir(self) -> str:
        """The folder of the topology file: code of the user's is looked for there (`busrl.system.imports`)."""
        return os.path.dirname(self.source) or "."

    @property
    def max_prompt_tokens(self) -> int:
        """A prompt with more tokens is set aside: the key, or what "auto" came to."""
        setting = self.generation.max_prompt_tokens
        return setting if isinstance(setting, int) else self.derived.prompt_tokens

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: prompt and answer, or what a call of an agent may come to."""
        answered = self.max_prompt_tokens + self.generation.max_new_tokens
        return max(answered, self.agents.context) if self.has_callers else answered

    @property
    def has_callers(self) -> bool:
        """Tell whether samples are episodes of model calls: those have a ring, and rollouts take nothing else."""
        return any(entry.role in CALLER_ROLES for entry in self.process)

    @property
    def prefix_keep_s(self) -> float:
        """For how long the torch engine keeps the rows of requests that ended: the key, or what "auto" came to."""
        setting = self.generation.prefix_keep_s
        return float(setting) if not isinstance(setting, str) else PREFIX_KEEP_S if self.has_callers else 0.0

    @property
    def keeps_prefixes(self) -> bool:
        """Tell whether an engine may still have what a call's parent read and wrote."""
        engines = {entry.engine for entry in self.process if entry.role == "rollout" and not entry.command}
        return "vllm" in engines or ("torch" in engines and self.prefix_keep_s > 0)

    @property
    def episode_limits(self) -> tuple[int, int, int]:
        """Ids of the longest path of an episode, that it draws in all, and of all its training sequences."""
        context = self.agents.context or self.longest
        sampled = self.agents.sampled or 4 * self.generation.max_new_tokens
        return context, sampled, self.agents.tokens or 2 * context

    @property
    def task_message_bytes(self) -> int:
        """Most bytes of a message that carries one sample: what its slot holds, and the fields."""
        return max(self.derived.slot_bytes, self.derived.call_slot_bytes) + MESSAGE_FIELD_BYTES

    @property
    def scripted(self) -> bool:
        """Tell whether any engine is scripted: then data.train is a trace, and nothing is learnt from its answers."""
        return any(entry.role == "rollout" and entry.engine == SCRIPTED and not entry.command for entry in self.process)

    @property
    def publish_every(self) -> int:
        """Steps between two publications, as long as groups do not wait for one."""
        restarts = self.weights.transport in RESTARTS
        return self.learner.publish_every * (self.weights.restart_every if restarts else 1)

    @property
    def validates(self) -> bool:
        return self.derived.val_samples > 0

    @property
    def sets(self) -> tuple[AskedSet, ...]:
        """The sets that a round of validation asks; empty without validation."""
        return self.derived.sets

    @property
    def dedicated(self) -> bool:
        return self.validation.mode == "dedicated" and self.validates

    @property
    def host_names(self) -> tuple[str, ...]:
        return tuple(sorted({name for entry in self.process for name in entry.hosts}))

    @property
    def is_service(self) -> bool:
        """True if programs outside say what is trained and sampled."""
        return any(entry.role == "tinker" for entry in self.process)

    @property
    def implied(self) -> tuple[str, ...]:
        """The roles of which this host has a process that no entry names."""
        away = bool(self.here)
        wanted = {"": True, "home": not away and not self.is_service, "away": away,
                  "both": away or bool(self.host_names), "sinks": not away and bool(self.sinks.to)}
        return tuple(role for role in IMPLIED_ROLES if wanted[ROLES[role].where])

    def processes(self) -> list[ProcessName]:
        """Every process on this host in starting order; indices of a role go on from entry to entry."""
        names = [] if self.beside else [ProcessName(role, role, 0, Process(role)) for role in self.implied]
        entries = [entry for entry in self.process if entry.is_at(self.here)]
        for role in [role for role in self.own_roles if role != "learner" or not self.here]:
            specs = [(spec, place) for spec in entries if spec.role == role for place in range(spec.count)]
            numbers = self._numbers(self.first, len(specs)) if role == "rollout" else range(len(specs))
            names += [ProcessName(self.named(role, at), role, at, *spec) for at, spec in zip(numbers, specs)]
        teams = [(entry, ranks_at(entry.ranks, entry.hosts, self.here)) for entry in entries if entry.role == "learner"]
        names += [ProcessName(f"{RANK}/{i}", RANK, i, entry, i) for entry, ranks in teams for i in ranks if i]
        return names + [name for row in self.models if row.own for name in self.of(row.tag).processes()]

    @property
    def ranks(self) -> int:  # processes that train the model together
        return max((entry.ranks for entry in self.process if entry.role == "learner"), default=1)

    @property
    def rank_hosts(self) -> tuple[str, ...]:  # the other hosts that have some of them, in their order
        return next((entry.hosts for entry in self.process if entry.role == "learner"), ())

    def device_of(self, name: str) -> str:
        """The device key of a process; one that joins from outside has that of its role's first entry."""
        if self.models and (tag := self.tag_of(name)) != self.tag:
            return self.of(tag).device_of(name)
        role = name.partition("/")[0]
        by_name = (process.spec.device for process in self.processes() if process.name == name)
        entries = (entry.device for entry in self.process if entry.role == role)
        return next(by_name, next(entries, "")) or self.model.device

    def to_dict(self) -> dict[str, Any]:
        """Plain data, infinity as the word "inf"; the limits stand flat among the derived values, and what only models
        of several seats have is left out of others."""
        data: dict[str, Any] = plain(dataclasses.asdict(self))
        data["derived"] = {**data["derived"].pop("limits"), **data["derived"]}
        if not self.model.seats:
            del data["model"]["seats"], data["derived"]["seats"]
        for table in (data, *data["process"]):
            for name in OF_SEVERAL & table.keys():
                if not table[name]:
                    del table[name]
        for tables in (data, *(own for row in data.get("models", ()) for own in row["own"])):
            for table in LATER.keys() & tables.keys():
                for name in [name for name, default in LATER[table].items() if tables[table][name] == default]:
                    del tables[table][name]
        return data

    def to_json(self) -> str:
        """The text of topology.json; `from_json` gives an equal object back."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> Topology:
        return build(Topology, _with_limits(json.loads(text)), "topology.json")


# Left out of topology.json where they say nothing.
OF_SEVERAL = {"models", "tag", "frozen", "first", "apart", "follows", "served_by", "model"}
# And these where they have their defaults, so that a run without them has the topology.json that it ever had.
LATER: dict[str, dict[str, Any]] = {
    "lora": {"layers": "", "experts": False}, "derived": {"routing": None}, "hosts": {"compress": False},
    "learner": {**OF_ROUTES, "teacher": [], "teacher_top": "teacher"},
}
LIMITS = {item.name for item in dataclasses.fields(AdmissionLimits)}


def _with_limits(data: Any) -> Any:
    """Plain data of a topology with the limits, which stand flat among the derived values, as a table of their own."""
    if not isinstance(data, dict):
        raise TypeError(f"expected a map, got {type(data).__name__}")
    derived = data.get("derived")
    if not isinstance(derived, dict):
        return data
    limits = {name: value for name, value in derived.items() if name in LIMITS}
    return {**data, "derived": {**{name: derived[name] for name in derived if name not in LIMITS}, "limits": limits}}
