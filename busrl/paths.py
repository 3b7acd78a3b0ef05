"""Every name of a run on disk, in /dev/shm and in the socket directory, in one place.

Talks to nothing: it computes paths from a run directory, and asks only whether one is that of a model of a run. Knows
nothing of what the files hold; `docs/` and the modules that write them say that. The short key in shared names is a
hash of the directory's real path, so that a second start in the same directory finds what the first one left.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

SHM = Path("/dev/shm")
CLAIMED_FROM = "claimed_from"  # key of run.json: the ring that other hosts claim from
CHECKPOINT = "global_step_"  # and the number of the step: a folder in checkpoints/
# The folder of an adapter, as peft has it; the prefix stands before the names that the model has without one.
ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_PREFIX = (
    "adapter_config.json", "adapter_model.safetensors", "base_model.model."
)


class _Named:
    """An attribute that is the path of this name in the run directory; in that of its models too, or in theirs."""

    def __init__(self, name: str, of_run: bool = False) -> None:
        self.name, self.of_run = name, of_run

    def __get__(self, run: RunPaths, owner: type | None = None) -> Path:
        return (run.home if self.of_run else run.root) / self.name


@dataclass(frozen=True)
class RunPaths:
    """Names of one run, or of one of its models. `root` is the run directory; nothing is created here."""

    root: Path
    run: Path | None = None  # the run directory, where `root` is that of a model beside the lead

    topology = _Named("topology.json")
    topology_file = _Named("topology.toml")  # as the user wrote it
    run_json = _Named("run.json")
    starts = _Named("starts.jsonl")  # a line per start: what differs from the one before, and what its files held
    logs = _Named("logs", of_run=True)
    data = _Named("data", of_run=True)  # the prompts, where they were made of sources
    models = _Named("models", of_run=True)  # a folder for each model beside the lead
    followed = _Named("followed")  # checkpoints of another model that its engines answer with
    errors = _Named("errors.jsonl", of_run=True)
    summary = _Named("summary.json", of_run=True)
    supervisor = _Named("supervisor.json", of_run=True)  # launch's counts of its children and of errors from outside
    gateway = _Named("gateway.json", of_run=True)  # what the keeper's gateway counted
    # the ledger
    fates = _Named("fates.bin")
    validate_fates = _Named("fates.validate.bin")
    wal = _Named("wal")
    train_log = _Named("train.jsonl")
    draws = _Named("draws.log")
    open_bin = _Named("open.bin")
    checkpoints = _Named("checkpoints")
    # what was measured and decided
    metrics = _Named("metrics.jsonl")
    decisions = _Named("decisions.jsonl")  # what the controller saw of every step, and what it decided
    sinks = _Named("sinks")  # a folder per sink: how far it has come, and files of its own
    samples = _Named("samples.jsonl")
    validation = _Named("validation.jsonl")
    validation_log = _Named("validation.log")  # what every answer of a round was worth
    evaluated = _Named("evaluated")  # what `busrl evaluate` wrote
    report = _Named("report.html")  # what `busrl report` wrote,
    timeline = _Named("trace.json")  # and `busrl trace`
    failed_work = _Named("failed.json")  # samples with which a rank of the learner failed last
    validate_request = _Named("validate.json")  # what `busrl validate` asked for last, and what became of it
    groups = _Named("groups.jsonl")  # lengths and rewards of every group that ended: for the learner's next life
    pace = _Named("pace")  # a file per rollout process: how long its decoding steps took; `busrl simulate --fit`
    predictor = _Named("predictor.npz")  # what the length predictor has learned; losing it never loses a sample
    skips = _Named("skips.jsonl")  # prompts left out by their pass rates: written before the fates that say so
    scheduler_log = _Named("scheduler.jsonl")  # predicted and real lengths, and waits, of the groups that ended
    control = _Named("control.jsonl", of_run=True)  # what was asked of the run while it ran, and what became of it
    control_key = _Named("control.key", of_run=True)  # who may read it may ask; for the owner alone
    serve_key = _Named("serve.key", of_run=True)  # what clients claim episodes with; for the owner alone
    taught = _Named("taught")  # a file per posted group: what a teacher said of it (learner.teacher.posted)
    atropos_seen = _Named("atropos.seen")  # digests of the groups that environments posted and that were kept
    hosts_now = _Named("hosts.json")  # what home's relay last received from each host
    hosts = _Named("hosts.jsonl")  # when other hosts started, joined, fell silent, came back, were replaced, went
    host_source = _Named("host.json")  # on another host: where home is, and who this host is there
    published = _Named("published")  # a folder per published checkpoint; gone when the run has ended

    @classmethod
    def of(cls, run_dir: str | os.PathLike[str]) -> RunPaths:
        """The paths of a run directory, or of that of one of its models."""
        root = Path(run_dir).resolve()
        above = root.parent.parent
        return cls(root, above if root.parent == above / "models" and (above / "run.json").is_file() else None)

    @classmethod
    def names(cls) -> frozenset[str]:
        """Names of the files and folders that busrl makes in a run directory, besides locks."""
        return frozenset(path.name for path in vars(cls).values() if isinstance(path, _Named))

    @property
    def home(self) -> Path:
        """The run directory."""
        return self.run or self.root

    def of_tag(self, tag: str) -> RunPaths:
        """The paths of a model beside the lead; of "" these."""
        return RunPaths(self.models / tag, self.home) if tag else self

    def lock(self, role: str) -> Path:
        return (self.home if role == "run" else self.root) / f"{role}.lock"

    def log(self, process: str) -> Path:
        return self.logs / f"{process.replace('/', '-')}.log"

    def served(self, process: str) -> Path:
        """The address at which a server of episodes listens."""
        return self.home / f"{process}.json"

    # -- beyond the run directory -----

    @property
    def key(self) -> str:
        """12 hex digits that name this run directory on this host."""
        return hashlib.sha1(str(self.root).encode()).hexdigest()[:12]

    @property
    def ring_name(self) -> str:
        return f"busrl.{os.getuid()}.{self.key}.ring"

    @property
    def calls_name(self) -> str:
        """The ring of model calls, where the run has one."""
        return f"busrl.{os.getuid()}.{self.key}.calls"

    @property
    def weights_name(self) -> str:
        return f"busrl.{os.getuid()}.{self.key}.weights"

    @property
    def ring_file(self) -> Path:
        return SHM / self.ring_name

    @property
    def weights_file(self) -> Path:
        return SHM / self.weights_name

    @property
    def adapters(self) -> Path:
        """Directory in shared memory with a folder per published adapter."""
        return SHM / f"{self.weights_name}.adapters"

    @property
    def runtime_dir(self) -> Path:
        """Directory of the sockets: short, because a socket path may have 107 bytes at most."""
        return Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"busrl-{os.getuid()}" / RunPaths(self.home).key

    @property
    def frontend(self) -> str:
        """Endpoint that publishers connect to."""
        return f"ipc://{self.runtime_dir}/pub.sock"

    @property
    def backend(self) -> str:
        """Endpoint that subscribers connect to."""
        return f"ipc://{self.runtime_dir}/sub.sock"

    @property
    def ranks(self) -> Path:
        """Socket at which the learner's further ranks meet it."""
        return self.runtime_dir / "ranks.sock"

    @property
    def rank_place(self) -> Path:
        """File with the port at which the learner meets ranks of other hosts."""
        return self.ranks.with_suffix(".json")

    @property
    def tap(self) -> str:
        """Endpoint that monitors and recorders listen at."""
        return f"ipc://{self.runtime_dir}/tap.sock"
