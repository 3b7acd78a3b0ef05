"""A run whose prompts come from several sources: the mixture that was asked for, before and after a kill."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from checks import check_end
from harness import ROOT, Run, running

from busrl.data import training_stream
from busrl.quickstart import paths
from busrl.topology import Topology

SOURCES = """
[[data.source]]
path = "long.jsonl"
weight = 3
tag = "long"
[[data.source]]
function = "rows.py:rows"
where = "answer != null"
tag = "short"
"""


def make_all(folder: Path) -> Path:
    """The quickstart with its prompts in two sources, one of them a function."""
    files = paths("tiny:sort")
    assert files is not None
    lines = files.train.read_text().splitlines()
    folder.mkdir()
    (folder / "long.jsonl").write_text("\n".join(lines[:50]) + "\n")
    (folder / "short.jsonl").write_text("\n".join(lines[50:70]) + "\n")
    (folder / "rows.py").write_text(
        "import json, pathlib\n\n\ndef rows():\n"
        "    for line in open(pathlib.Path(__file__).parent / 'short.jsonl'):\n        yield json.loads(line)\n"
        "    yield {'prompt': 'none', 'answer': None}\n"
    )
    text = (ROOT / "configs" / "quickstart.toml").read_text()
    kept = "\n".join(line for line in text.splitlines() if not line.startswith("train ="))
    (folder / "mine.toml").write_text(kept + SOURCES)
    return folder / "mine.toml"


@pytest.mark.long
def test_a_mixture_resumes_at_the_exact_draw_and_cannot_be_another(
    tmp_path: Path, quickstart: None
) -> None:
    config = make_all(tmp_path / "mine")
    run = Run(tmp_path / "run", "log.samples=all", config=config, steps=8)
    with running(run):
        run.until_step(3)
        run.kill_launch()
        code = run.start().wait()
        check_end(run, code)
    assert "prompts of short: 20 of 21 rows, 1 left out by where" in run.text()
    (data,) = (run.directory / "data").iterdir()
    topology = Topology.from_json(run.paths.topology.read_text())
    assert Path(topology.data.train) == data
    draws = sorted({uid // (2 * topology.groups.size) for uid, _ in trained(run)})
    with training_stream(topology) as stream:
        tags = Counter(json.loads(stream.item(draw).line)["tag"] for draw in draws)
        assert {crc for _, crc in trained(run)} <= {stream.item(draw).crc for draw in draws}
    assert len(draws) >= 64 and 0.6 < tags["long"] / len(draws) < 0.9
    by = [row["by"] for row in run.metrics() if "replayed" not in row]
    assert len(by) >= 6 and set().union(*by) == {"long", "short"}
    assert all({"reward", "pass_rate", "length"} <= set(figures) for row in by for figures in row.values())
    rows = [json.loads(line) for line in run.paths.samples.read_text().splitlines()]
    assert {row["record"]["tag"] for row in rows} == {"long", "short"}
    config.write_text(config.read_text().replace("weight = 3", "weight = 2"))
    assert run.start("--set", "run.max_steps=9").wait() == 2
    assert "holds a run whose draws come from long (50, 750), short (20, 250), the topology says" in run.text()


def trained(run: Run) -> list[tuple[int, int]]:
    """uid and crc of every trained sample."""
    lines = [json.loads(line) for line in run.paths.train_log.read_text().splitlines()]
    return [(uid, crc) for line in lines for uid, _, crc in line["samples"]]


@pytest.mark.slow
def test_a_moved_run_is_audited_with_its_own_prompts(tmp_path: Path, quickstart: None) -> None:
    config = make_all(tmp_path / "mine")
    run = Run(tmp_path / "run", config=config, steps=2)
    with running(run):
        check_end(run, run.wait())
    run.directory.rename(tmp_path / "moved")
    (tmp_path / "mine" / "long.jsonl").unlink()
    report = Run(tmp_path / "moved", config=config).audit()
    assert not report.errors and not any(finding.rule == "prompts_unchecked" for finding in report.findings)
