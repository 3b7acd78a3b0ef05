"""The tool that tells what works on an accelerator, tried where there is none: its logic is the same on a CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from busrl.engines import vllm_versions
from busrl.system import device

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "gpu_check.py"
sys.path.insert(0, str(TOOL.parent))
import gpu_check  # noqa: E402
from gpucheck import report, shapes  # noqa: E402

HAS_ACCELERATOR = not device.missing("cuda") or not device.missing("npu")


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=170,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **env})


@pytest.mark.skipif(HAS_ACCELERATOR, reason="this machine has an accelerator")
def test_without_an_accelerator_it_says_why_and_ends_with_its_own_code(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path))
    assert done.returncode == gpu_check.NO_DEVICE == 3
    assert "there is no accelerator here, nothing was checked" in done.stderr and "cuda: " in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_cpu_checks_run_and_put_both_reports_at_the_out_path(tmp_path: Path) -> None:
    done = run("--cpu", "--only", "machine,bandwidth,cuda_ipc-tiny", OUT=str(tmp_path))
    assert done.returncode == gpu_check.GOOD_ON_CPU == 4, done.stdout + done.stderr
    data, page = sorted(tmp_path.iterdir())
    results = json.loads(data.read_text())
    assert [(check["name"], check["status"]) for check in results["checks"]] == [
        ("machine", "passed"), ("bandwidth", "passed"), ("cuda_ipc-tiny", "passed"),
    ]
    one_copy = results["checks"][2]
    assert one_copy["figures"]["tiny cuda_ipc: copied inside the fence / device to device"] > 0
    assert all(bar["kept"] for bar in one_copy["bars"]) and len(one_copy["bars"]) == 2
    text = page.read_text()
    assert "3 checks passed." in text and "the owner has what was changed here" in text
    assert not list(Path("/dev/shm").glob("busrl.gpucheck.*"))


def check(function: str, seconds: float = 60.0) -> gpu_check.Check:
    return gpu_check.Check("tried", "a check", function, seconds)


@pytest.mark.long
def test_a_check_that_fails_or_hangs_stops_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gpucheck_tried.py").write_text(
        "import time\n"
        "def fails(context):\n    context.figure('seen', 1.0)\n    raise ValueError('no such thing')\n"
        "def misses(context):\n    context.bar('enough', 1.0, at_least=3.0)\n"
        "def hangs(context):\n    context.figure('before', 2)\n    time.sleep(600)\n"
        "def absent(context):\n    from gpucheck.frame import Skipped\n    raise Skipped('nothing to see')\n"
    )
    rows = []
    for function, seconds in (("fails", 60.0), ("misses", 60.0), ("hangs", 10.0), ("absent", 60.0)):
        script = tmp_path / "tool.py"  # the tool as it is, with one check more
        script.write_text(
            f"import sys\nsys.path[:0] = [{str(TOOL.parent)!r}, {str(tmp_path)!r}]\n"
            "import gpucheck, gpucheck_tried, gpu_check\nsys.modules['gpucheck.tried'] = gpucheck_tried\n"
            f"gpu_check.checks = lambda small: [gpu_check.Check('tried', 'a check', 'tried:{function}', {seconds})]\n"
            "gpu_check.learner_checks = lambda small: []\n"
            "sys.exit(gpu_check.main(sys.argv[1:]))\n"
        )
        monkeypatch.setattr(gpu_check, "__file__", str(script))
        rows.append(gpu_check.in_a_process(check(f"tried:{function}", seconds), "cpu", True, seconds))
    assert [(row["status"], row["why"]) for row in rows] == [
        ("failed", "exit code 1: ValueError: no such thing"),
        ("failed", "missed: enough"),
        ("failed", "not done after 10 s, ended"),
        ("skipped", "nothing to see"),
    ]
    assert rows[0]["figures"] == {"seen": 1.0} and rows[2]["figures"] == {"before": 2}
    assert "ValueError" in rows[0]["notes"][-1]


def test_checks_beyond_the_minutes_are_left_out_and_zero_checks_fail(tmp_path: Path) -> None:
    done = run("--cpu", "--minutes", "0.01", "--out", str(tmp_path), "--no-build")
    assert done.returncode == gpu_check.NOTHING == 5 and "0 checks passed, 13 skipped" in done.stdout
    assert "no time is left; see --minutes" in next(tmp_path.glob("*.md")).read_text()


@pytest.mark.skipif(bool(vllm_versions.vllm_installed()[0]), reason="this Python has vLLM")
def test_the_vllm_check_is_skipped_without_vllm_despite_a_namesake_folder(tmp_path: Path) -> None:
    done = run("--cpu", "--only", "vllm", "--out", str(tmp_path), "--no-build")
    assert "0 checks passed, 1 skipped (vllm)." in done.stdout and done.returncode == gpu_check.NOTHING
    assert "this Python has no vLLM" in done.stdout


def test_a_folder_that_takes_no_report_is_told_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("--cpu", "--only", "machine", "--out", str(tmp_path / "file"), "--no-build")
    assert done.returncode == gpu_check.USAGE == 2 and done.stdout == ""
    assert f"no report can be written to {tmp_path / 'file'}" in done.stderr and "--out" in done.stderr
    assert "give minutes above 0" in run("--cpu", "--minutes", "0").stderr


def test_runs_of_one_second_get_two_reports_that_name_devices_later(tmp_path: Path) -> None:
    results = {"device": "cuda", "when": "now", "verdict": "", "seconds": 1.0, "minutes": 9.0, "checks": []}
    first, second = (report.Report(tmp_path, stamp="20260101-000000") for _ in range(2))
    for pair in (first, second):
        pair.write(results)
    assert first.data.name == "gpu-cuda-20260101-000000.json" and second.page.name == "gpu-cuda-20260101-000000-2.md"
    for pair in (first, second):
        pair.write(results | {"device": "Some H100"})
    stem = "gpu-some-h100-20260101-000000"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"{stem}{more}" for more in ("-2.json", "-2.md", ".json", ".md")
    )


SLEEPER = """
import os, sys
from pathlib import Path
sys.path[:0] = [{tools!r}]
import gpu_check
from gpucheck import machine_checks
def quick(context):
    context.figure("device", "none")
def sleeps(context):
    from gpucheck.stop import dies_with_parent
    import subprocess
    child = subprocess.Popen(dies_with_parent("sh", "-c", "sleep 600"))
    os.write(int(os.environ["TOLD"]), f"{{os.getpid()}} {{child.pid}}\\n".encode())
    child.wait()
machine_checks.quick, machine_checks.sleeps = quick, sleeps
named = lambda name, function: gpu_check.Check(name, name, f"machine_checks:{{function}}", 60.0)
gpu_check.checks = lambda small: [named("machine", "quick"), named("long", "sleeps"), named("later", "quick")]
gpu_check.__file__ = __file__
popen = gpu_check.subprocess.Popen
gpu_check.subprocess.Popen = lambda *a, **k: popen(*a, **k, pass_fds=(int(os.environ["TOLD"]),))
sys.exit(gpu_check.main(sys.argv[1:]))
"""


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """The tool in the middle of a check that sleeps, and the pids of that check and of what it has started."""
    (tmp_path / "tool.py").write_text(SLEEPER.format(tools=str(TOOL.parent)))
    (tmp_path / "tmp").mkdir()
    read, write = os.pipe()
    command = [sys.executable, str(tmp_path / "tool.py"), "--cpu", "--no-build", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "TOLD": str(write), "TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"}
    tool = subprocess.Popen(command, env=environment, pass_fds=(write,))
    os.close(write)
    with os.fdopen(read) as told:
        yield tool, [int(word) for word in told.readline().split()]
        tool.kill()
        tool.wait()


def gone(pid: int) -> bool:
    """Wait until that process, which is not ours, is dead."""
    for _ in range(600):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        threading.Event().wait(0.1)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_tool_ends_its_check_and_reports_what_was_done(
    sleeper: tuple[subprocess.Popen[bytes], list[int]], tmp_path: Path, number: signal.Signals
) -> None:
    tool, pids = sleeper
    tool.send_signal(number)
    assert tool.wait(60) == 128 + number
    assert len(pids) == 2 and all(gone(pid) for pid in pids)
    assert not list((tmp_path / "tmp").glob("gpucheck-*"))
    results = json.loads(next((tmp_path / "out").glob("*.json")).read_text())
    assert results["verdict"] == "1 checks passed, 1 stopped (long), 1 skipped (later)."
    assert results["checks"][1]["why"].startswith(number.name)
    assert results["checks"][2]["why"] == f"not begun: {number.name}"


@pytest.mark.slow
def test_a_killed_tool_takes_its_check_along_and_leaves_a_report(
    sleeper: tuple[subprocess.Popen[bytes], list[int]], tmp_path: Path
) -> None:
    tool, pids = sleeper
    tool.kill()
    assert len(pids) == 2 and all(gone(pid) for pid in pids)
    results = json.loads(next((tmp_path / "out").glob("gpu-none-*.json")).read_text())
    assert results["verdict"] == "1 checks passed, 2 still to come (long, later)."


def test_an_unknown_check_is_refused_with_the_names() -> None:
    with pytest.raises(SystemExit, match="no check 'speed'; there are machine, bandwidth"):
        gpu_check.select(gpu_check.checks(True), "machine,speed")
    assert sum(check.seconds for check in gpu_check.checks(False)[:6]) < 9 * 60  # what matters most fits in any case


@pytest.mark.parametrize(("size", "billions"), [("0.6B", 0.596), ("1.7B", 1.72), ("8B", 8.19)])
def test_the_shapes_are_those_of_the_published_models(size: str, billions: float) -> None:
    import torch

    tensors = shapes.checkpoint_shapes(size)
    assert shapes.nbytes(tensors, torch.bfloat16) / 2e9 == pytest.approx(billions, rel=0.01)
    fused = shapes.fused_shapes(tensors)
    assert shapes.nbytes(fused, torch.bfloat16) == shapes.nbytes(tensors, torch.bfloat16)
    assert "model.layers.0.self_attn.qkv_proj.weight" in fused and "model.layers.0.mlp.gate_up_proj.weight" in fused
    assert ("lm_head.weight" in tensors) == (size == "8B")


def test_the_page_marks_what_was_missed() -> None:
    row = gpu_check.row_of(check("x:y"), "failed", "missed: speed", 1.0, {"bars": [
        {"what": "speed", "wanted": ">= 3", "found": 2.5, "kept": False}], "figures": {"a": 1234567.0}})
    page = report.markdown({"device": "X", "when": "now", "verdict": "0 passed.", "seconds": 1.0, "minutes": 9.0,
                            "checks": [row], "notes": ["the extension modules were not built"]})
    assert "the extension modules were not built" in page
    assert "| speed | >= 3 | 2.5 | **missed** |" in page and "| a | 1.235e+06 |" in page


@pytest.mark.parametrize(("function", "arguments", "figure"), [
    ("memory", ("full",), "tiny, 256 tokens: peak / estimate"),
    ("attention", (), "eager, computed as joined rows: tokens/s"),
])
def test_the_learner_s_checks_find_their_figures_on_a_cpu(
    tmp_path: Path, function: str, arguments: tuple[str, ...], figure: str
) -> None:
    from gpucheck import learner_checks
    from gpucheck.frame import Context

    context = Context("cpu", True, tmp_path / "found.json", 60.0)
    getattr(learner_checks, function)(context, *arguments)
    results = json.loads((tmp_path / "found.json").read_text())
    assert all(bar["kept"] for bar in results["bars"]) and results["figures"][figure] > 0


def test_memory_is_judged_on_an_accelerator_from_both_sides(tmp_path: Path) -> None:
    from gpucheck.frame import Context

    device = Context("cuda", False, tmp_path / "found.json", 60.0)
    for value in (0.8, 1.0, 1.2):
        device.judged("peak / estimate", value, at_least=0.85, at_most=1.15)
    assert [bar["kept"] for bar in device.found["bars"]] == [False, True, False]
    assert device.found["bars"][0]["wanted"] == ">= 0.85 and <= 1.15"


def test_learner_checks_fit_ten_minutes_except_for_the_largest_updates() -> None:
    checks = gpu_check.learner_checks(False)
    assert [check.name for check in checks if check.name.startswith("learner-")] == [
        "learner-memory", "learner-again", "learner-attention", "learner-optimizers"]
    assert {"cuda_ipc-0.6B", "shm-1.7B", "cuda_ipc-8B"} <= {check.name for check in checks}
    assert sum(check.seconds for check in checks if check.name.startswith("learner-")) < 9 * 60
    assert not {check.name for check in gpu_check.checks(False)} & {"learner-memory"}


@pytest.mark.slow
def test_the_whole_check_of_the_learner_is_tried_on_a_cpu(tmp_path: Path) -> None:
    done = run("--cpu", "--learner", "--no-build", "--out", str(tmp_path))
    assert done.returncode == gpu_check.GOOD_ON_CPU, done.stdout + done.stderr
    results = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert results["verdict"] == "8 checks passed."
    figures = next(check["figures"] for check in results["checks"] if check["name"] == "learner-optimizers")
    # It has learned something, so that the comparison says something.
    assert figures["adamw: loss after 50 steps"] < 0.8 * figures["adamw: loss before"]
