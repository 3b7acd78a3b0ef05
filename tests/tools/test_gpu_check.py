"""The tool that tells what works on an accelerator, tried where there is none: its logic is the same on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from busrl import device

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "gpu_check.py"
sys.path.insert(0, str(TOOL.parent))
import gpu_check  # noqa: E402
from gpucheck import report, shapes  # noqa: E402

HAS_ACCELERATOR = not device.missing("cuda") or not device.missing("npu")


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=170,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **env})  # fmt: skip


@pytest.mark.skipif(HAS_ACCELERATOR, reason="this machine has an accelerator")
def test_without_an_accelerator_it_says_why_and_ends_with_its_own_code(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path))
    assert done.returncode == gpu_check.NO_DEVICE == 3
    assert "there is no accelerator here, nothing was checked" in done.stderr and "cuda: " in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_on_a_cpu_the_checks_run_and_both_reports_are_where_out_says(tmp_path: Path) -> None:
    done = run("--cpu", "--only", "machine,bandwidth,cuda_ipc-tiny", OUT=str(tmp_path))
    assert done.returncode == gpu_check.GOOD_ON_CPU == 4, done.stdout + done.stderr
    data, page = sorted(tmp_path.iterdir())
    found = json.loads(data.read_text())
    assert [(check["name"], check["status"]) for check in found["checks"]] == [
        ("machine", "passed"), ("bandwidth", "passed"), ("cuda_ipc-tiny", "passed"),
    ]  # fmt: skip
    one_copy = found["checks"][2]
    assert one_copy["figures"]["tiny cuda_ipc: copied inside the fence / device to device"] > 0
    assert all(bar["kept"] for bar in one_copy["bars"]) and len(one_copy["bars"]) == 2
    text = page.read_text()
    assert "3 checks passed." in text and "the owner has what was changed here" in text
    assert not list(Path("/dev/shm").glob("busrl.gpucheck.*"))


def check(function: str, seconds: float = 60.0) -> gpu_check.Check:
    return gpu_check.Check("tried", "a check", function, seconds)


def test_a_check_that_fails_or_hangs_stops_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gpucheck_tried.py").write_text(
        "import time\n"
        "def fails(context):\n    context.figure('seen', 1.0)\n    raise ValueError('no such thing')\n"
        "def misses(context):\n    context.bar('enough', 1.0, at_least=3.0)\n"
        "def hangs(context):\n    context.figure('before', 2)\n    time.sleep(600)\n"
        "def absent(context):\n    from gpucheck.frame import Skipped\n    raise Skipped('nothing to see')\n"
    )
    rows = []
    for function, seconds in (("fails", 60.0), ("misses", 60.0), ("hangs", 2.0), ("absent", 60.0)):
        script = tmp_path / "tool.py"  # the tool as it is, with one check more
        script.write_text(
            f"import sys\nsys.path[:0] = [{str(TOOL.parent)!r}, {str(tmp_path)!r}]\n"
            "import gpucheck, gpucheck_tried, gpu_check\nsys.modules['gpucheck.tried'] = gpucheck_tried\n"
            f"gpu_check.checks = lambda small: [gpu_check.Check('tried', 'a check', 'tried:{function}', {seconds})]\n"
            "sys.exit(gpu_check.main(sys.argv[1:]))\n"
        )
        monkeypatch.setattr(gpu_check, "__file__", str(script))
        rows.append(gpu_check.in_a_process(check(f"tried:{function}", seconds), "cpu", True, seconds))
    assert [(row["status"], row["why"]) for row in rows] == [
        ("failed", "exit code 1: ValueError: no such thing"),
        ("failed", "missed: enough"),
        ("failed", "not done after 2 s, ended"),
        ("skipped", "nothing to see"),
    ]
    assert rows[0]["figures"] == {"seen": 1.0} and rows[2]["figures"] == {"before": 2}
    assert "ValueError" in rows[0]["notes"][-1]


def test_what_does_not_fit_into_the_minutes_is_left_out_and_told(tmp_path: Path) -> None:
    done = run("--cpu", "--minutes", "0.01", "--out", str(tmp_path), "--no-build")
    assert done.returncode == 4 and "0 checks passed, 13 skipped" in done.stdout
    assert "no time is left; see --minutes" in next(tmp_path.glob("*.md")).read_text()


def test_an_unknown_check_is_refused_with_the_names() -> None:
    with pytest.raises(SystemExit, match="no check 'speed'; there are machine, bandwidth"):
        gpu_check.select(gpu_check.checks(True), "machine,speed")
    assert sum(one.seconds for one in gpu_check.checks(False)[:6]) < 9 * 60  # what matters most fits in any case


@pytest.mark.parametrize(("size", "billions"), [("0.6B", 0.596), ("1.7B", 1.72), ("8B", 8.19)])
def test_the_shapes_are_those_of_the_published_models(size: str, billions: float) -> None:
    import torch

    own = shapes.checkpoint_shapes(size)
    assert shapes.nbytes(own, torch.bfloat16) / 2e9 == pytest.approx(billions, rel=0.01)
    fused = shapes.fused_shapes(own)
    assert shapes.nbytes(fused, torch.bfloat16) == shapes.nbytes(own, torch.bfloat16)
    assert "model.layers.0.self_attn.qkv_proj.weight" in fused and "model.layers.0.mlp.gate_up_proj.weight" in fused
    assert ("lm_head.weight" in own) == (size == "8B")


def test_the_page_marks_what_was_missed() -> None:
    row = gpu_check.row_of(check("x:y"), "failed", "missed: speed", 1.0, {"bars": [
        {"what": "speed", "wanted": ">= 3", "found": 2.5, "kept": False}], "figures": {"a": 1234567.0}})  # fmt: skip
    page = report.markdown({"device": "X", "when": "now", "verdict": "0 passed.", "seconds": 1.0, "minutes": 9.0,
                            "checks": [row], "notes": ["the extension modules were not built"]})  # fmt: skip
    assert "the extension modules were not built" in page
    assert "| speed | >= 3 | 2.5 | **missed** |" in page and "| a | 1.235e+06 |" in page
