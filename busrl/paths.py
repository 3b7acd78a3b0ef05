"""Every name of a run on disk, in /dev/shm and in the socket directory, in one place.

Talks to nothing: it only computes paths from a run directory. Knows nothing of what the files hold; `docs/` and the
modules that write them say that. The short key in shared names is a hash of the run directory's real path, so that a
second start in the same directory finds what the first one left.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

SHM = Path("/dev/shm")


@dataclass(frozen=True)
class RunPaths:
    """Names of one run. `root` is the run directory; nothing is created here."""

    root: Path

    @classmethod
    def of(cls, run_dir: str | os.PathLike[str]) -> RunPaths:
        return cls(Path(run_dir).resolve())

    @property
    def key(self) -> str:
        """12 hex digits that name this run directory on this host."""
        return hashlib.sha1(str(self.root).encode()).hexdigest()[:12]

    @property
    def ring_name(self) -> str:
        return f"busrl.{os.getuid()}.{self.key}.ring"

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
    def published(self) -> Path:
        """Directory with a folder per published checkpoint; gone when the run has ended."""
        return self.root / "published"

    @property
    def runtime_dir(self) -> Path:
        """Directory of the sockets: short, because a socket path may have 107 bytes at most."""
        return Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"busrl-{os.getuid()}" / self.key

    @property
    def frontend(self) -> str:
        """Endpoint that publishers connect to."""
        return f"ipc://{self.runtime_dir}/pub.sock"

    @property
    def backend(self) -> str:
        """Endpoint that subscribers connect to."""
        return f"ipc://{self.runtime_dir}/sub.sock"

    @property
    def tap(self) -> str:
        """Endpoint that monitors and recorders listen at."""
        return f"ipc://{self.runtime_dir}/tap.sock"

    def lock(self, role: str) -> Path:
        return self.root / f"{role}.lock"

    def log(self, process: str) -> Path:
        return self.logs / f"{process.replace('/', '-')}.log"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def topology(self) -> Path:
        return self.root / "topology.json"

    @property
    def run_json(self) -> Path:
        return self.root / "run.json"

    @property
    def fates(self) -> Path:
        return self.root / "fates.bin"

    @property
    def validate_fates(self) -> Path:
        return self.root / "fates.validate.bin"

    @property
    def draws(self) -> Path:
        return self.root / "draws.log"

    @property
    def wal(self) -> Path:
        return self.root / "wal"

    @property
    def train_log(self) -> Path:
        return self.root / "train.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def decisions(self) -> Path:
        """What the controller saw of every step, and what it decided."""
        return self.root / "decisions.jsonl"

    @property
    def groups(self) -> Path:
        """Lengths and rewards of every group that ended, for the learner's next life and `busrl simulate --fit`."""
        return self.root / "groups.jsonl"

    @property
    def pace(self) -> Path:
        """Directory with a file per rollout process: how long its decoding steps took, for the same."""
        return self.root / "pace"

    @property
    def samples(self) -> Path:
        return self.root / "samples.jsonl"

    @property
    def validation(self) -> Path:
        return self.root / "validation.jsonl"

    @property
    def errors(self) -> Path:
        return self.root / "errors.jsonl"

    @property
    def supervisor(self) -> Path:
        """What launch counted of its children and of errors from outside, for `busrl status`."""
        return self.root / "supervisor.json"

    @property
    def gateway(self) -> Path:
        """What the keeper's gateway counted, for `busrl status`."""
        return self.root / "gateway.json"

    @property
    def predictor(self) -> Path:
        """What the length predictor has learned; losing it costs quality, never a sample."""
        return self.root / "predictor.npz"

    @property
    def scheduler_log(self) -> Path:
        """Predicted and real lengths, and waits, of the groups that ended."""
        return self.root / "scheduler.jsonl"

    @property
    def open_bin(self) -> Path:
        return self.root / "open.bin"

    @property
    def starts(self) -> Path:
        """A line per start: what differs from the one before, and what its files held."""
        return self.root / "starts.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"
