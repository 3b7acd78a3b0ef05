"""`busrl doctor`: whether this machine can run busrl, part by part, with what to do where it cannot.

Looks at the machine and at what is installed, and starts nothing but short programs that import torch. Knows nothing of
any run: what a topology needs of the machine is `busrl check`'s.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import cache_from_source, find_spec
from pathlib import Path

import busrl
from busrl import capabilities
from busrl.pages import PACKAGE, opened
from busrl.preflight import machine, memory
from busrl.system.imports import APART, EXTRAS, is_installed

GIB = 1 << 30
LITTLE_SHM = GIB  # a container's default is 64 MiB
FEW_FILES = 1024
IMPORT_S = 120.0
LARGE = ("torch", "transformers", "vllm")
EXTRA = re.compile(r'extra == "([a-z0-9-]+)"')  # the marker of a requirement
REMOTE = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "9p"}
REMOTE_RUN = "a start reads and locks files there: a run directory on a local disk is safer and faster"
SEEN = """
import json, torch
from busrl.system import device
found = {kind: device.missing(kind) for kind in ("cuda", "npu")}
count = torch.cuda.device_count() if not found["cuda"] else 0
print(json.dumps([torch.__version__, found, [torch.cuda.get_device_name(one) for one in range(count)]]))
"""


@dataclass(frozen=True)
class Line:
    """The state of one part of the machine; a `remedy` where it is wanting, `bad` where busrl cannot run so."""

    part: str
    found: str
    remedy: str = ""
    bad: bool = False


def doctor(options: argparse.Namespace) -> int:
    lines = [line for look in LOOKS for line in _seen(look)]
    if options.json:
        print(opened(json.dumps([asdict(line) for line in lines], indent=1)))
    else:
        for line in lines:
            state = "bad" if line.bad else "warn" if line.remedy else "ok"
            remedy = f"\n{'':19}-> {line.remedy}" if line.remedy else ""
            print(opened(f"{state:<5}{line.part:<14}{line.found}{remedy}"))
    return int(any(line.bad for line in lines))


def _seen(look: Callable[[], Iterator[Line]]) -> list[Line]:
    """The lines of one look; a package that it cannot import is reported as a line of its own."""
    try:
        return list(look())
    except ImportError as problem:
        part = look.__name__.strip("_")
        return [Line(part, f"not looked at: {problem}", "pip install busrl again in this Python", bad=True)]


def _python() -> Iterator[Line]:
    yield Line("busrl", f"{busrl.__version__} on Python {platform.python_version()} ({sys.executable})")
    if others := _others():
        remedy = "remove one of them, from PYTHONPATH or by pip uninstall"
        yield Line("busrl", f"{PACKAGE} comes before busrl in {', '.join(others)}", remedy)
    recorded = next((one.version for one in metadata.distributions(name="busrl")), busrl.__version__)
    if recorded != busrl.__version__:
        yield Line("busrl", f"{PACKAGE} was installed as {recorded}", "install it again: compiled parts may be older")
    for name in ("_ring", "_wire", "_blocks", "_fields", "_adapters"):
        try:
            importlib.import_module(f"busrl.{name}")
        except ImportError as problem:
            remedy = "install busrl again in this Python; from its source that takes a C++ compiler (apt install g++)"
            yield Line("extension", f"busrl.{name} cannot be loaded: {problem}", remedy, bad=True)


def _others() -> list[str]:
    """Folders of the search path that have a busrl of their own."""
    folders, ours = dict.fromkeys(os.path.realpath(folder) for folder in sys.path), os.path.realpath(PACKAGE.parent)
    return [folder for folder in folders if folder != ours and Path(folder, "busrl/__init__.py").is_file()]


def _machine() -> Iterator[Line]:
    cores, ram = len(machine.cores()), memory.host_memory()
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    yield Line("machine", f"{platform.node()}, Linux {platform.release()}, {cores} cores, {ram / GIB:.0f} GiB memory")
    if cores < 2:
        yield Line("machine", "one core for all processes", "it works, and each waits for the others; use two or more")
    if nodes > 1:
        remedy = "bind each engine and learner to the cores beside its device: `cpus` of its [[process]]"
        yield Line("NUMA", f"{nodes} nodes", remedy)


def _kernel() -> Iterator[Line]:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as problem:
        yield Line("kernel", f"no pidfd_open: {problem}", "Linux 5.3 or newer, no seccomp rule against it", bad=True)


def _shm() -> Iterator[Line]:
    free = machine.shm_free()
    small = "docker: --shm-size=8g or --ipc=host; Kubernetes: an emptyDir of medium Memory at /dev/shm"
    remedy = small if free < LITTLE_SHM else ""
    room = f"{free / GIB:.2f} GiB free; `busrl check TOPOLOGY` says what a run needs"
    yield Line("/dev/shm", room, remedy, bad=free < 1 << 20)


def _limits() -> Iterator[Line]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = f"ulimit -n {min(hard, 65536)}" if soft < FEW_FILES else ""
    yield Line("limits", f"{soft} open files (at most {hard})", few)


def _folder() -> Iterator[Line]:
    from busrl.ring import OfdLock  # imported here, so that a broken extension is reported as such

    here = Path.cwd()
    try:
        with tempfile.TemporaryDirectory(prefix=".busrl-", dir=here) as folder:
            has_locks = OfdLock(str(Path(folder) / "lock")).try_acquire()
        kind = _file_system(here)
        yield Line("folder", f"{here} on {kind}", REMOTE_RUN if kind in REMOTE else "")
        if not has_locks:
            yield Line("folder", f"{here} keeps no lock", "run directories need a file system with locks", bad=True)
    except OSError as problem:
        yield Line("folder", f"{here}: {problem}", "run directories are made below it, or where --run-dir says")


def _file_system(path: Path) -> str:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = [(len(mount[1]), mount[2]) for mount in mounts if path.is_relative_to(mount[1].replace("\\040", " "))]
    return max(above, default=(0, "unknown"))[1]


def _bus() -> Iterator[Line]:
    import zmq

    curve = bool(zmq.has("curve"))
    remedy = "" if curve else "runs over TCP need it: pip install --force-reinstall pyzmq (its wheels have it)"
    yield Line("ZeroMQ", f"{zmq.zmq_version()}, pyzmq {zmq.__version__}, CURVE: {'yes' if curve else 'no'}", remedy)


def _torch() -> Iterator[Line]:
    try:
        done = subprocess.run([sys.executable, "-c", APART + SEEN], capture_output=True, text=True, timeout=IMPORT_S)
        version, missing, names = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        yield Line("torch", f"not imported after {IMPORT_S:g} s", "is its folder on a slow or broken disk?", bad=True)
        return
    except (IndexError, ValueError):
        last = (done.stderr.strip() or "it said nothing").splitlines()[-1]
        yield Line("torch", last, "pip install 'busrl[train]'; only workers and watching run without")
        return
    yield Line("torch", version)
    unseen = not names and any(Path("/dev").glob("nvidia[0-9]*"))
    yield Line("devices", ", ".join(names) or "CPU alone", missing["cuda"] if unseen else "")


def _bytecode() -> Iterator[Line]:
    """Tell where every start would compile large libraries again: uv compiles none, and many images write none."""
    lacking = [name for name in LARGE if (origin := _source(name)) and not os.path.exists(cache_from_source(origin))]
    if lacking and sys.dont_write_bytecode:
        folder = Path(_source(lacking[0])).parents[1]
        remedy = f"unset PYTHONDONTWRITEBYTECODE, or once: {sys.executable} -m compileall -q {folder}"
        yield Line("bytecode", f"none of {', '.join(lacking)}, and none is written: each start compiles them", remedy)


def _source(package: str) -> str:
    """The file of a package's first module; empty where it is not here or has none."""
    found = find_spec(package) if is_installed(package) else None
    return found.origin or "" if found and found.has_location else ""


def _packages() -> Iterator[Line]:
    """Compare what is installed with the versions that busrl's own metadata asks for."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return
    for wanted in map(Requirement, metadata.requires("busrl") or ()):
        try:
            installed = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            continue
        if not wanted.specifier.contains(installed, prereleases=True):
            extra = EXTRA.search(str(wanted.marker))
            remedy = f"pip install --upgrade 'busrl[{extra[1]}]'" if extra else "pip install --upgrade busrl"
            yield Line(wanted.name, installed, f"busrl was made with {wanted.name}{wanted.specifier}: {remedy}")


def _extras() -> Iterator[Line]:
    """Tell which extras this Python has, by the packages that they bring; the others are no fault."""
    brought: dict[str, list[str]] = {}
    for package, extra in EXTRAS.items():
        brought.setdefault(extra, []).append(package)
    lacking = {extra: [name for name in packages if not is_installed(name)] for extra, packages in brought.items()}
    here = ", ".join(extra for extra, missing in lacking.items() if not missing) or "none"
    others = ", ".join(f"{extra} ({', '.join(missing)})" for extra, missing in lacking.items() if missing)
    yield Line("extras", here + (f"; not here: {others}: pip install 'busrl[NAME]'" if others else ""))


def _parts() -> Iterator[Line]:
    """Tell what the optional parts of busrl look for on a machine."""
    for look in capabilities.plugs("machine_looks"):
        yield from look()


LOOKS: tuple[Callable[[], Iterator[Line]], ...] = (
    _python, _machine, _kernel, _shm, _limits, _folder, _bus, _torch, _bytecode, _packages, _extras, _parts,
)
