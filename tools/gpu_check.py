"""What works on this machine's accelerator, and how fast: one command, no network, a report in JSON and Markdown.

    python tools/gpu_check.py [--minutes 9] [--out DIR] [--only NAME,NAME] [--list]
    python tools/gpu_check.py --cpu        the same logic on a CPU, with tiny shapes

Each check is a process with a deadline of its own: one that fails or hangs stops no other. Needs torch and
transformers; the whole runs need busrl's other packages as well, and say so. Reports go to --out, else to $OUT, else
to docs/reports.

Ends with 0: all that could be checked on the accelerator is right. 1: something is not. 3: there is no accelerator (or
torch can not use it) and nothing was checked. 4: with --cpu, all that a CPU allows is right.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
GOOD, BAD, NO_DEVICE, GOOD_ON_CPU = 0, 1, 3, 4
BUILD_S = 180.0
BRIEF = 240


@dataclass(frozen=True)
class Check:
    """One check: a function of a module of `gpucheck`, the seconds that it may take, arguments after the context."""

    name: str
    title: str
    function: str
    seconds: float
    arguments: tuple[str, ...] = ()


def checks(small: bool) -> list[Check]:
    """In the order of what is worth most, should the time run out."""
    sizes = ("tiny",) if small else ("0.6B", "1.7B", "8B")
    weights = [
        Check(f"{name}-{size}", f"{title}, {size}", f"weight_checks:{function}", seconds, (size,))
        for size, seconds in zip(sizes, (60.0, 75.0, 120.0))
        for name, function, title in (("cuda_ipc", "one_copy", "one copy of the weights for learner and engine"),
                                      ("shm", "shm", "weights through shared memory"))
    ]  # fmt: skip
    return [
        Check("machine", "what this machine is", "machine_checks:machine", 60),
        Check("bandwidth", "plain copies", "machine_checks:bandwidth", 60),
        Check("engine", "the torch engine: log-probabilities and speed", "engine_checks:engine", 150),
        Check("inflight", "new weights between two decoding steps", "engine_checks:inflight", 60),
        *weights[:2],
        Check("quickstart", "a short run", "run_checks:quickstart", 180),
        Check("quickstart-one-copy", "a short run with one copy of the weights", "run_checks:quickstart_one_copy", 90),
        *weights[2:],
        Check("group", "the device's process group", "machine_checks:group", 90),
        Check("ring", "the ring's memory, pinned and pageable", "machine_checks:ring", 45),
        Check("learner", "the trainer: log-probabilities and speed", "engine_checks:learner", 60),
        Check("broadcast", "weights by broadcast on one host", "weight_checks:broadcast", 75, (sizes[0],)),
        Check("vllm", "a short run with vLLM", "run_checks:vllm", 180),
    ]


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--peer"]:
        from gpucheck import peers

        peers.run(arguments[1], arguments[2])
        return GOOD
    if arguments[:1] == ["--one"]:
        return run_one(*arguments[1:])
    options = parse(arguments)
    chosen = select(checks(options.cpu), options.only)
    if options.list:
        print("\n".join(f"{check.name:<22} {check.title} (at most {check.seconds:g} s)" for check in chosen))
        return GOOD
    device = "cpu" if options.cpu else accelerator()
    if not device:
        return NO_DEVICE
    return run_all(options, chosen, device)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog=__doc__.rpartition("\n\n")[2],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything; what does not fit is left out")
    parser.add_argument("--out", type=Path, default=None, help="folder of the reports")
    parser.add_argument("--only", default="", help="names of checks, with commas between")
    parser.add_argument("--list", action="store_true", help="tell the checks and end")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, with tiny shapes: tries the tool")
    parser.add_argument("--no-build", action="store_true", help="do not build the extension modules where they miss")
    return parser.parse_args(arguments)


def select(known: list[Check], only: str) -> list[Check]:
    if not only:
        return known
    names = only.split(",")
    unknown = sorted(set(names) - {check.name for check in known})
    if unknown:
        raise SystemExit(f"no check {unknown[0]!r}; there are {', '.join(check.name for check in known)}")
    return [check for check in known if check.name in names]


def accelerator() -> str:
    """"cuda" or "npu"; empty, with the reasons told, where there is none."""
    try:
        from busrl import device
    except ImportError as problem:
        print(f"gpu_check: {problem}", file=sys.stderr)
        return ""
    why = {kind: device.missing(kind) for kind in ("cuda", "npu")}
    found = next((kind for kind, reason in why.items() if not reason), "")
    if not found:
        told = "\n".join(f"  {kind}: {reason}" for kind, reason in why.items())
        print(f"gpu_check: there is no accelerator here, nothing was checked (--cpu tries the tool):\n{told}",
              file=sys.stderr)  # fmt: skip
    return found


# ------------------------------------------------------------------------------------------------------ all checks


def run_all(options: argparse.Namespace, chosen: list[Check], device: str) -> int:
    began, deadline = time.monotonic(), time.monotonic() + 60 * options.minutes
    notes = [] if options.no_build else build()
    rows: list[dict[str, Any]] = []
    for check in chosen:
        left = deadline - time.monotonic()
        if left < 5:
            row = left_out(check)
        else:
            row = in_a_process(check, device, options.cpu, min(check.seconds, left), figures_of(rows, "bandwidth"))
        rows.append(row)
        print(f"{check.name:<22} {row['status']:<8} {row['seconds']:6.1f} s  {row['why']}", flush=True)
    failed = [row["name"] for row in rows if row["status"] == "failed"]
    skipped = [row["name"] for row in rows if row["status"] == "skipped"]
    verdict = f"{len(rows) - len(failed) - len(skipped)} checks passed"
    verdict += "".join(f", {len(n)} {w} ({', '.join(n)})" for n, w in ((failed, "failed"), (skipped, "skipped")) if n)
    found: dict[str, Any] = {
        "when": time.strftime("%Y-%m-%d %H:%M:%S"), "device": device_name(rows, device), "verdict": verdict + ".",
        "seconds": time.monotonic() - began, "minutes": options.minutes, "cpu": options.cpu, "notes": notes,
        "checks": rows,
    }  # fmt: skip
    tell(options, found)
    return BAD if failed else (GOOD_ON_CPU if options.cpu else GOOD)


def figures_of(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """What a check has found already."""
    return next((dict(row["figures"]) for row in rows if row["name"] == name), {})


def device_name(rows: list[dict[str, Any]], device: str) -> str:
    return str(figures_of(rows, "machine").get("device", device))


def tell(options: argparse.Namespace, found: dict[str, Any]) -> None:
    from gpucheck import report

    folder = options.out or Path(os.environ.get("OUT") or ROOT / "docs" / "reports")
    kind = "".join(c if c.isalnum() else "-" for c in found["device"].lower())
    data, page = report.write(folder, f"gpu-{kind}-{time.strftime('%Y%m%d-%H%M%S')}", found)
    print(f"{found['verdict']} {page} and {data.name}")


def left_out(check: Check) -> dict[str, Any]:
    return row_of(check, "skipped", "no time is left; see --minutes", 0.0, {})


def row_of(check: Check, status: str, why: str, seconds: float, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": check.name, "title": check.title, "status": status, "why": why, "seconds": seconds,
        "figures": found.get("figures", {}), "bars": found.get("bars", []), "notes": found.get("notes", []),
    }  # fmt: skip


def in_a_process(
    check: Check, device: str, small: bool, seconds: float, bandwidth: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run one check, and end it and all that it started at its deadline; what it had found by then is kept."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpucheck-") as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, __file__, "--one", check.name, device, str(int(small)), str(file), str(seconds),
                   json.dumps(bandwidth or {})]  # fmt: skip
        with open(Path(folder) / "words", "w+b") as words:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=words, stderr=words, cwd=ROOT,
                                     start_new_session=True, env=environment(folder))  # fmt: skip
            code = wait(child, seconds)
            words.seek(0)
            said = words.read().decode(errors="replace")
        found = json.loads(file.read_text()) if file.exists() else {}
        clear(child.pid, Path(folder))
    status, why = judge(code, found, said, seconds)
    if status == "failed" and said.strip():
        found.setdefault("notes", []).append("its last words: " + " / ".join(said.strip().splitlines()[-4:])[-1500:])
    return row_of(check, status, why, time.monotonic() - began, found)


def clear(pid: int, folder: Path) -> None:
    """Remove what a check that was ended left in shared memory; its names carry its pid, or its run's directory."""
    from busrl.paths import RunPaths

    paths = RunPaths.of(folder / "run")
    left = [*Path("/dev/shm").glob(f"busrl*gpucheck*{pid}*"), paths.ring_file, paths.weights_file]
    for path in left:
        path.unlink(missing_ok=True)
    shutil.rmtree(paths.runtime_dir, ignore_errors=True)


def environment(folder: str) -> dict[str, str]:
    known = os.environ.get("PYTHONPATH")
    path = f"{ROOT}{os.pathsep}{known}" if known else str(ROOT)
    return {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1", "TMPDIR": folder}  # fmt: skip


def wait(child: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Its exit code, None if it had to be ended. Runs that it started have sessions of their own and die with it."""
    code: int | None
    try:
        code = child.wait(seconds)
    except subprocess.TimeoutExpired:
        code = None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    return code


def judge(code: int | None, found: dict[str, Any], said: str, seconds: float) -> tuple[str, str]:
    if code is None:
        return "failed", f"not done after {seconds:.0f} s, ended"
    if why := found.get("skipped"):
        return "skipped", str(why)
    missed = [bar["what"] for bar in found.get("bars", []) if not bar["kept"]]
    if code != 0:
        last = (said.strip().splitlines() or [""])[-1]
        return "failed", f"exit code {code}: {last[:BRIEF]}" if code > 0 else f"signal {signal.Signals(-code).name}"
    return ("failed", f"missed: {missed[0]}") if missed else ("passed", "")


def build() -> list[str]:
    """Build the extension modules where they are missing; what went wrong, if anything."""
    if all(list((ROOT / "busrl").glob(f"{name}.*.so")) for name in ("_ring", "_wire")) and importable("busrl._ring"):
        return []
    try:
        done = subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=ROOT, capture_output=True,
                              text=True, timeout=BUILD_S, stdin=subprocess.DEVNULL)  # fmt: skip
    except subprocess.TimeoutExpired:
        return [f"the extension modules were not built within {BUILD_S:g} s"]
    return [] if done.returncode == 0 else [f"the extension modules were not built: {done.stderr.strip()[-400:]}"]


def importable(name: str) -> bool:
    """In a process of its own: a module of another Python's may end it."""
    return subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True).returncode == 0


# ------------------------------------------------------------------------------------------------------- one check


def run_one(name: str, device: str, small: str, file: str, seconds: str, bandwidth: str) -> int:
    """The process of one check."""
    from gpucheck.frame import Context, Skipped

    check = next(one for one in checks(bool(int(small))) if one.name == name)
    context = Context(device, bool(int(small)), Path(file), float(seconds), json.loads(bandwidth))
    module, _, function = check.function.partition(":")
    try:
        getattr(importlib.import_module(f"gpucheck.{module}"), function)(context, *check.arguments)
    except Skipped as why:
        context.found["skipped"] = str(why)
        context.note(str(why))
    except Exception as problem:
        traceback.print_exc()
        print(f"{type(problem).__name__}: {problem}", file=sys.stderr)
        return BAD
    return GOOD


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
