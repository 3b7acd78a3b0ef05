"""The kinds of device: CPU, CUDA and NPU (Ascend, through torch_npu). No other module of busrl distinguishes them.

Used by every process that loads a model, by the weight transports for their group backend, and by launch for the
variables that set which devices a process sees.

- No other module of busrl names `torch.cuda` or `torch.npu` (a test checks that), and only this one imports torch_npu.
- Importing this module imports no torch: launch uses it too.
- A process sees only its own devices (`visible`), so it always uses their number 0.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from busrl.errors import DeviceMissing

if TYPE_CHECKING:
    import torch

KINDS = ("cpu", "cuda", "npu")
LARGE_MODEL = 10**9  # parameters
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
BACKEND = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
HCCL_PORTS = {"HCCL_NPU_SOCKET_PORT_RANGE": "auto", "HCCL_HOST_SOCKET_PORT_RANGE": "auto"}
# Torch reads these when a group is made; its defaults end the whole process when a peer is late. Older versions of
# torch_npu have HCCL's names without a prefix.
WAITING_RAISES = {
    "TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_HCCL_BLOCKING_WAIT": "1", "TORCH_HCCL_ASYNC_ERROR_HANDLING": "0",
    "HCCL_BLOCKING_WAIT": "1", "HCCL_ASYNC_ERROR_HANDLING": "0",
}
ONE_HOST = {"NCCL_SOCKET_IFNAME": "=lo", "HCCL_SOCKET_IFNAME": "=lo"}  # else ranks connect over a network's interface
_environment = threading.Lock()


# -- without torch ---------------------------------------------------------------------------------------------


def visible(kind: str, devices: str) -> dict[str, str]:
    """The environment that shows a process only `devices` ("0", "0,1", a UUID); {} if it may see all."""
    if not devices or kind == "cpu":
        return {}
    names = [VISIBLE[kind]] if kind in VISIBLE else list(VISIBLE.values())  # auto: whichever kind the machine has
    return dict.fromkeys(names, devices)


def environment(kind: str, devices: str, present: Mapping[str, str]) -> dict[str, str]:
    """The variables that a process on that kind of device needs; those in `present` keep their values.

    HCCL's default is port 16666 of the NPU, which two processes on one NPU cannot share.
    """
    ports = HCCL_PORTS if kind == "npu" else {}
    return {**{name: value for name, value in ports.items() if name not in present}, **visible(kind, devices)}


def kind_of(backend: str) -> str:
    """The kind of device whose memory a process-group backend sends from."""
    return next(kind for kind, name in BACKEND.items() if name == backend)


def expected(wanted: str) -> str:
    """The kind of device that `choose` will probably find, by drivers and torch's build, without importing torch."""
    if wanted != "auto":
        return wanted
    return next(kind for kind in ("cuda", "npu", "cpu") if likely(kind))


def likely(kind: str) -> bool:
    """Check whether this process probably sees a device of that kind, by drivers and torch's build."""
    return kind == "cpu" or (_driver(kind) and bool(os.environ.get(VISIBLE[kind], "all").strip()))


def has_bfloat16(kind: str) -> bool:
    """Check whether devices of that kind compute in bfloat16: NVIDIA's do from Ampere (compute capability 8.0) on."""
    if kind != "cuda":
        return kind == "npu"
    return all(capability >= 8 for capability in _of_gpus("compute_cap"))  # no answer: nearly all GPUs in use do


def memory(kind: str) -> int:
    """Bytes of the smallest device of that kind, by its driver; 0 where the driver does not answer."""
    return int(min(_of_gpus("memory.total"), default=0)) << 20 if kind == "cuda" else 0


def _of_gpus(what: str) -> list[float]:
    """A number for each GPU, by nvidia-smi; none where it does not answer."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        numbers = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()
        return [float(number) for number in numbers]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def _driver(kind: str) -> bool:
    """Check whether the host has such a device, and torch was built for it."""
    if kind == "npu":
        return any(Path("/dev").glob("davinci[0-9]*")) and importlib.util.find_spec("torch_npu") is not None
    nodes = (*Path("/dev").glob("nvidia[0-9]*"), Path("/dev/dxg"), Path("/dev/kfd"))
    torch = importlib.util.find_spec("torch") if any(node.exists() for node in nodes) else None
    if torch is None or torch.origin is None:
        return False
    with contextlib.suppress(OSError):
        text = Path(torch.origin).with_name("version.py").read_text()
        return re.search(r"^(cuda|hip)\b[^=\n]*= *'", text, re.M) is not None
    return True


# -- memory of the C library -----------------------------------------------------------------------------------

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # of mallopt(3)
LARGEST = (1 << 31) - 1  # bytes, for no limit
SLACK = 1 << 26  # bytes that the C library gets from the kernel at a time
LARGE_BLOCK = (1 << 26) + (1 << 16)  # bytes, a little above one buffer of logits
LARGE_BLOCK_OF_MANY = 1 << 22  # the same where a model has MANY parameters
MANY = 10**8


def keep_freed_memory(parameters: int = 0) -> bool:
    """Let glibc keep freed memory instead of returning it to the kernel; True if it does.

    A step allocates the same few megabytes again and again. If they were returned each time, every page would have to
    be mapped and zeroed again: thousands of page faults, about a tenth of the time of a small model's step. Large
    blocks are returned all the same: between smaller ones they would leave holes that nothing else fits into. With MANY
    parameters these holes, between gradients and the activations that layers keep, would be a sixth of all memory:
    there a block counts as large from fewer bytes on.
    """
    largest = LARGE_BLOCK_OF_MANY if parameters >= MANY else LARGE_BLOCK
    settings = ((MMAP_THRESHOLD, largest), (TRIM_THRESHOLD, LARGEST), (TOP_PAD, SLACK))
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        return sum(int(mallopt(option, value)) for option, value in settings) == len(settings)
    return False


# -- which device ----------------------------------------------------------------------------------------------


def computes_again(setting: str, kind: str, parameters: Callable[[], int]) -> bool:
    """Decide whether backward computes layers again: under "full", and under "auto" for a large model on an
    accelerator, where memory is scarce."""
    return setting == "full" or (setting == "auto" and kind != "cpu" and parameters() >= LARGE_MODEL)


def choose(wanted: str = "auto") -> torch.device:
    """The device to work on: of the wanted kind, or the best one present. DeviceMissing says what is wrong."""
    import torch

    if wanted == "auto":
        wanted = next(kind for kind in ("cuda", "npu", "cpu") if not missing(kind))
    elif why := missing(wanted):
        raise DeviceMissing(f'model.device = "{wanted}": {why}; set model.device = "cpu", or "auto" for the best one')
    if wanted == "cuda":  # cuDNN's attention makes a plan for each new shape, and rows of tokens have ever new ones
        torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device(wanted) if wanted == "cpu" else torch.device(wanted, 0)


def missing(kind: str) -> str:
    """The reason why this process cannot use a device of that kind; empty if it can."""
    import torch

    if kind == "cpu":
        return ""
    if kind == "npu":
        try:
            importlib.import_module("torch_npu")  # it adds the kind to torch
        except ImportError as problem:
            return f"torch_npu cannot be imported ({problem}); pip install 'busrl[npu]' for your CANN version"
        except Exception as problem:  # the CANN libraries below it are missing or of another version
            return f"torch_npu does not start ({type(problem).__name__}: {problem}); source CANN's set_env.sh first"
    module = getattr(torch, kind, None)
    if module is not None and module.is_available():
        return ""
    hidden = os.environ.get(VISIBLE[kind])
    if hidden is not None and not hidden.strip():
        return f"{VISIBLE[kind]} is empty, so this process sees no {kind} device"
    if kind == "cuda" and torch.version.cuda is None:
        return f"this torch ({torch.__version__}) was built without CUDA; install one that was built with it"
    seen = f" ({VISIBLE[kind]} = {hidden})" if hidden else ""
    return f"torch finds no {kind} device{seen}; is there one, and does its driver answer?"


class Stopwatch:
    """Measures the time of work on a device: `mark` before and after it, then `seconds` between the marks. On an
    accelerator a mark is an event in its queue: `mark` does not wait for the device, `seconds` does."""

    def __init__(self, device: torch.device) -> None:
        self._events: Any = None if device.type == "cpu" else _module(device)

    def mark(self) -> Any:
        """The time now, or when the device will reach this point of its queue."""
        if self._events is None:
            return time.perf_counter()
        event = self._events.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, before: Any, after: Any) -> float:
        if self._events is None:
            return float(after - before)
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3


def random_state(device: torch.device) -> torch.Tensor | None:
    """The state of the device's generator; None for the CPU, whose generator is torch's."""
    return None if device.type == "cpu" else _module(device).get_rng_state(device)


def restore_random(device: torch.device, state: torch.Tensor) -> None:
    _module(device).set_rng_state(state, device)


def identity(device: torch.device) -> str:
    """A text that is the same in every process, whatever number the device has there: its UUID, or "cpu"."""
    if device.type == "cpu":
        return "cpu"
    properties = _module(device).get_device_properties(device)
    unique = getattr(properties, "uuid", None) or f"{os.environ.get(VISIBLE[device.type], '')}:{device.index}"
    return f"{device.type}:{unique}"


def device_group(backend: str, store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """A separate NCCL or HCCL process group over a store; waiting in it raises after `timeout_s`. Not verified on
    hardware with more than one device."""
    from datetime import timedelta

    import torch.distributed as dist

    group: Any = getattr(dist, "ProcessGroupNCCL", None)
    if backend == "hccl":
        group = importlib.import_module("torch_npu")._C._distributed_c10d.ProcessGroupHCCL
    if group is None or backend not in ("nccl", "hccl"):
        raise DeviceMissing(f"this torch has no process groups of {backend}; use gloo")
    options = group.Options()
    options._timeout = timedelta(seconds=timeout_s)
    for name, value in ONE_HOST.items():  # read at the first connection of the process, so they stay set
        os.environ.setdefault(name, value)
    with _waiting_raises():
        return group(store, rank, size, options)


@contextlib.contextmanager
def _waiting_raises() -> Iterator[None]:
    """Let a group that is made in this block raise in the thread that waits, and its watchdog not end the process."""
    with _environment:
        before = {name: os.environ[name] for name in WAITING_RAISES if name in os.environ}
        os.environ.update(WAITING_RAISES)
        try:
            yield
        finally:
            for name in WAITING_RAISES:
                os.environ.pop(name, None)
            os.environ.update(before)


# -- streams ---------------------------------------------------------------------------------------------------


def own_stream(device: str) -> None:
    """Give this thread a stream of its own: its work on the device does not wait for that of other threads."""
    import torch

    if device != "cpu":
        torch.accelerator.set_stream(torch.Stream(device=torch.device(device)))


def finish_stream(device: str) -> None:
    """Wait until the device has done the work that this thread has queued."""
    import torch

    if device != "cpu":
        torch.accelerator.current_stream(torch.device(device)).synchronize()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all work that is queued; returns at once on a CPU."""
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Return cached memory to the device, for other processes."""
    if device.type != "cpu":
        _module(device).empty_cache()


def _module(device: torch.device) -> Any:
    """`torch.cuda` or `torch.npu`."""
    import torch

    return torch.get_device_module(device)
