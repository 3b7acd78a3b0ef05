"""What works on this machine's accelerator, and how fast: one command, no network, a report in JSON and Markdown.

    python tools/gpu_check.py [--minutes 9] [--out DIR] [--only NAME,NAME] [--list]
    python tools/gpu_check.py --learner    the trainer at a real size: memory, speed, attention, optimisers, updates
    python tools/gpu_check.py --cpu        the same logic on a CPU, with tiny shapes

Each check is a process with a deadline: one that fails or hangs stops no other. Needs torch and
transformers; the whole runs need busrl's other packages as well, and say so. Reports go to --out, else to $OUT, else
to docs/reports; they are written again after each check, so a tool that is stopped has reported what it found.

Ends with 0: all that could be checked on the accelerator is right. 1: something is not. 2: the arguments are wrong, or
no report can be written. 3: there is no accelerator (or torch cannot use it) and nothing was checked. 4: with --cpu,
all that a CPU allows is right. 5: every check was skipped. 129, 130, 143: stopped by SIGHUP, SIGINT or SIGTERM.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
from gpucheck.report import Report  # noqa: E402
from gpucheck.stop import Stop, become, dies_with_parent  # noqa: E402

GOOD, BAD, USAGE, NO_DEVICE, GOOD_ON_CPU, NOTHING = range(6)
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


def learner_checks(small: bool) -> list[Check]:
    """Those of --learner."""
    def trained(name: str, title: str, function: str, seconds: float, *arguments: str) -> Check:
        return Check(f"learner-{name}", title, f"learner_checks:{function}", seconds, arguments)

    first, second, *_ = checks(small)
    return [
        first,
        trained("memory", "a step of 16k tokens: memory and speed", "memory", 120, "none"),
        trained("again", "the same with activation checkpointing", "memory", 120, "full"),
        trained("attention", "implementations of attention", "attention", 150),
        trained("optimizers", "8-bit states of AdamW", "optimizers", 120),
        second, *weight_checks(small),
    ]


def weight_checks(small: bool) -> list[Check]:
    """Updates of the weights of models of each size."""
    sizes = ("tiny",) if small else ("0.6B", "1.7B", "8B")
    return [
        Check(f"{name}-{size}", f"{title}, {size}", f"weight_checks:{function}", seconds, (size,))
        for size, seconds in zip(sizes, (60.0, 75.0, 120.0))
        for name, function, title in (("cuda_ipc", "one_copy", "one copy of the weights for learner and engine"),
                                      ("shm", "shm", "weights through shared memory"))
    ]


def checks(small: bool) -> list[Check]:
    """In the order of what is worth most, should the time run out."""
    weights = weight_checks(small)
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
        Check("broadcast", "weights by broadcast on one host", "weight_checks:broadcast", 75, weights[0].arguments),
        Check("vllm", "a short run with vLLM", "run_checks:vllm", 180),
    ]


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--child-of"]:
        become(int(arguments[1]), list(arguments[2:]))
        return BAD
    if arguments[:1] == ["--peer"]:
        from gpucheck import peers

        peers.run(arguments[1], arguments[2])
        return GOOD
    if arguments[:1] == ["--one"]:
        return run_one(*arguments[1:])
    options = parse(arguments)
    chosen = select((learner_checks if options.learner else checks)(options.cpu), options.only)
    if options.list:
        print("\n".join(f"{check.name:<22} {check.title} (at most {check.seconds:g} s)" for check in chosen))
        return GOOD
    device = "cpu" if options.cpu else accelerator()
    if not device:
        return NO_DEVICE
    return run_all(options, chosen, device)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog=__doc__.rpartition("\n\n")[2],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=minutes, default=9.0, help="for everything; what does not fit is left out")
    parser.add_argument("--out", type=Path, default=None, help="folder of the reports")
    parser.add_argument("--only", default="", help="names of checks, with commas between")
    parser.add_argument("--learner", action="store_true", help="the checks of the trainer at a real size")
    parser.add_argument("--list", action="store_true", help="tell the checks and end")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, with tiny shapes: tries the tool")
    parser.add_argument("--no-build", action="store_true", help="do not build the extension modules where they miss")
    return parser.parse_args(arguments)


def minutes(text: str) -> float:
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time to work in; give minutes above 0")
    return value


def select(known: list[Check], only: str) -> list[Check]:
    if not only:
        return known
    names = only.split(",")
    unknown = sorted(set(names) - {check.name for check in known})
    if unknown:
        raise SystemExit(f"no check {unknown[0]!r}; there are {', '.join(check.name for check in known)}")
    return [check for check in known if check.name in names]


def accelerator() -> str:
    """"cuda" or "npu"; empty, with the reasons on standard error, if there is none."""
    try:
        from busrl.system import device
    except ImportError as problem:
        print(f"gpu_check: {problem}", file=sys.stderr)
        return ""
    why = {kind: device.missing(kind) for kind in ("cuda", "npu")}
    found = next((kind for kind, reason in why.items() if not reason), "")
    if not found:
        text = "\n".join(f"  {kind}: {reason}" for kind, reason in why.items())
        print(f"gpu_check: there is no accelerator here, nothing was checked (--cpu tries the tool):\n{text}",
              file=sys.stderr)
    return found


# ------------------------------------------------------------------------------------------------------ all checks


@dataclass
class Findings:
    """What is known so far, and the report that says it."""

    options: argparse.Namespace
    device: str
    chosen: list[Check]
    report: Report
    notes: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        return 60.0 * float(self.options.minutes) - (time.monotonic() - self.began)

    def add(self, row: dict[str, Any]) -> None:
        """A full disk costs the report, not the remaining checks: the line is printed in any case."""
        self.rows.append(row)
        print(f"{row['name']:<22} {row['status']:<8} {row['seconds']:6.1f} s  {row['why']}", flush=True)
        with contextlib.suppress(OSError):
            self.write()

    def of(self, name: str) -> dict[str, Any]:
        """The figures of a check that is done."""
        return next((dict(row["figures"]) for row in self.rows if row["name"] == name), {})

    def names(self, status: str) -> list[str]:
        return [row["name"] for row in self.rows if row["status"] == status]

    def verdict(self) -> str:
        done = {row["name"] for row in self.rows}
        others = {word: self.names(word) for word in ("failed", "stopped", "skipped")}
        others["still to come"] = [check.name for check in self.chosen if check.name not in done]
        text = "".join(f", {len(names)} {word} ({', '.join(names)})" for word, names in others.items() if names)
        return f"{len(self.names('passed'))} checks passed{text}."

    def write(self) -> None:
        self.report.write({
            "when": time.strftime("%Y-%m-%d %H:%M:%S"), "device": str(self.of("machine").get("device", self.device)),
            "verdict": self.verdict(), "seconds": time.monotonic() - self.began, "minutes": self.options.minutes,
            "cpu": self.options.cpu, "notes": self.notes, "checks": self.rows,
        })

    def code(self, stop: Stop) -> int:
        if stop.number:
            return 128 + stop.number
        if self.names("failed"):
            return BAD
        if not self.names("passed"):
            return NOTHING
        return GOOD_ON_CPU if self.options.cpu else GOOD


def run_all(options: argparse.Namespace, chosen: list[Check], device: str) -> int:
    folder = options.out or Path(os.environ.get("OUT") or ROOT / "docs" / "reports")
    findings, stop = Findings(options, device, chosen, Report(folder)), Stop()
    if not written(findings, folder):  # before minutes are spent on what could not be reported
        return USAGE
    stop.listen()
    findings.notes += [] if options.no_build else build(stop)
    for check in chosen:
        findings.add(one_row(check, findings, stop))
    if not written(findings, folder):
        return USAGE
    print(f"{findings.verdict()} {findings.report.page} and {findings.report.data.name}")
    return findings.code(stop)


def written(findings: Findings, folder: Path) -> bool:
    try:
        findings.write()
    except OSError as problem:
        print(f"gpu_check: no report can be written to {folder}: {problem}; name another folder with --out",
              file=sys.stderr)
        return False
    return True


def one_row(check: Check, findings: Findings, stop: Stop) -> dict[str, Any]:
    left = findings.left_s
    if stop.number:
        return row_of(check, "skipped", f"not begun: {stop.name}", 0.0, {})
    if left < 5:
        return row_of(check, "skipped", "no time is left; see --minutes", 0.0, {})
    options, bandwidth = findings.options, findings.of("bandwidth")
    return in_a_process(check, findings.device, options.cpu, min(check.seconds, left), bandwidth, stop)


def row_of(check: Check, status: str, why: str, seconds: float, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": check.name, "title": check.title, "status": status, "why": why, "seconds": seconds,
        "figures": found.get("figures", {}), "bars": found.get("bars", []), "notes": found.get("notes", []),
    }


def in_a_process(
    check: Check, device: str, small: bool, seconds: float, bandwidth: dict[str, Any] | None = None,
    stop: Stop | None = None,
) -> dict[str, Any]:
    """Run one check; at its deadline end it and all that it started, and keep what it has found."""
    began, stop = time.monotonic(), stop or Stop()
    with tempfile.TemporaryDirectory(prefix="gpucheck-", ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "found.json"
        command = dies_with_parent(sys.executable, __file__, "--one", check.name, device, str(int(small)), str(file),
                                   str(seconds), json.dumps(bandwidth or {}))
        with open(Path(folder) / "words", "w+b") as words:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=words, stderr=words, cwd=ROOT,
                                     start_new_session=True, env=environment(folder))
            code = wait(child, seconds, stop)
            words.seek(0)
            output = words.read().decode(errors="replace")
        found = json.loads(file.read_text()) if file.exists() else {}
        clear(child.pid, Path(folder))
    took = time.monotonic() - began
    if stop.number:
        return row_of(check, "stopped", f"{stop.name} after {took:.0f} s", took, found)
    status, why = judge(code, found, output, seconds)
    if status == "failed" and output.strip():
        found.setdefault("notes", []).append("its last output: " + " / ".join(output.strip().splitlines()[-4:])[-1500:])
    return row_of(check, status, why, took, found)


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
            "HF_HUB_OFFLINE": "1", "TMPDIR": folder}


def wait(child: subprocess.Popen[bytes], seconds: float, stop: Stop) -> int | None:
    """Its exit code, None if it had to be ended. Runs that it started have sessions of their own and die with it."""
    code: int | None
    stop.runs(child.pid)
    try:
        code = child.wait(seconds)
    except subprocess.TimeoutExpired:
        code = None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    stop.runs(0)
    return code


def judge(code: int | None, found: dict[str, Any], output: str, seconds: float) -> tuple[str, str]:
    if code is None:
        return "failed", f"not done after {seconds:.0f} s, ended"
    if why := found.get("skipped"):
        return "skipped", str(why)
    missed = [bar["what"] for bar in found.get("bars", []) if not bar["kept"]]
    if code != 0:
        last = (output.strip().splitlines() or [""])[-1]
        return "failed", f"exit code {code}: {last[:BRIEF]}" if code > 0 else f"signal {signal.Signals(-code).name}"
    return ("failed", f"missed: {missed[0]}") if missed else ("passed", "")


def build(stop: Stop) -> list[str]:
    """Build the extension modules where they are missing; what went wrong, if anything."""
    if all(list((ROOT / "busrl").glob(f"{name}.*.so")) for name in ("_ring", "_wire")) and importable("busrl._ring"):
        return []
    command = dies_with_parent(sys.executable, "setup.py", "build_ext", "--inplace")
    with tempfile.TemporaryFile() as words:
        child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=words,
                                 start_new_session=True)
        code = wait(child, BUILD_S, stop)
        words.seek(0)
        output = words.read().decode(errors="replace").strip()[-400:]
    if code is None:
        return [f"the extension modules were not built within {BUILD_S:g} s"]
    return [] if code == 0 else [f"the extension modules were not built: {output or 'ended by a signal'}"]


def importable(name: str) -> bool:
    """In a separate process: a module built for another Python may end it."""
    return subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True).returncode == 0


# ------------------------------------------------------------------------------------------------------- one check


def run_one(name: str, device: str, small: str, file: str, seconds: str, bandwidth: str) -> int:
    """The process of one check."""
    from gpucheck.frame import Context, Skipped

    known = [*checks(bool(int(small))), *learner_checks(bool(int(small)))]
    check = next(one for one in known if one.name == name)
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
