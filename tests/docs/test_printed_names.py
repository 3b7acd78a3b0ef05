"""Texts of busrl outside a clone name no page and no file that is not there, and a first run needs neither.

The package is copied as a wheel would bring it, without docs/, configs/ and pyproject.toml beside it.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import commands
import pytest

from busrl.pages import CONFIGS, SITE, SOURCE, addressed, opened, published

ROOT = Path(__file__).resolve().parents[2]
NAMES = re.compile(r"(?<![\w/])(?:docs|configs|examples)/[\w-]")
ADDRESSES = re.compile(rf"{re.escape(SITE)}([a-z0-9/-]*[a-z0-9])")
HELP = """
import argparse
from busrl.cli.command import parser

def helps(one):
    yield one.format_help()
    for action in one._actions:
        for verb in (action.choices or {}).values() if isinstance(action, argparse._SubParsersAction) else ():
            yield from helps(verb)

for text in helps(parser()):
    print(text)
for verb in ("host", "report", "simulate", "monitor"):
    for text in helps(parser([verb])):
        print(text)
"""
FOREIGN = """[model]
path = "tiny:sort"
[data]
train = "tiny:sort"
[learner]
lr = 1e-4
[trainer]
reward_funcs = 1
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(ROOT / "busrl", folder / "busrl", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder / "busrl/configs").glob("*.toml"):
        path.write_text(addressed(path.read_text()))
    return folder


def python(site: Path, *arguments: str, code: int = 0, within: tuple[str, ...] = ()) -> str:
    """Run a Python with this copy of busrl, in a folder that holds nothing of busrl; all that it printed."""
    here = site / "elsewhere"
    here.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "70"}
    done = subprocess.run(
        [*within, sys.executable, *arguments], cwd=here, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def busrl(site: Path, *arguments: str, code: int = 0) -> str:
    """The same of a verb, in a process that has imported this copy already."""
    (here := site / "elsewhere").mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "70"}
    done = commands.busrl(*arguments, cwd=here, env=environment, root=site)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [["-c", HELP], *(["-m", "busrl.cli", verb] for verb in ("schema", "recipes"))],
                         ids=["help", "schema", "recipes"])
def test_an_installation_prints_addresses_of_pages_that_exist(site: Path, arguments: list[str]) -> None:
    text = python(site, *arguments)
    assert not NAMES.findall(text)
    pages = ADDRESSES.findall(text)
    assert pages and not [page for page in pages if not (ROOT / "docs" / f"{page}.md").is_file()]


def test_an_error_names_an_address_and_a_file_that_is_there(site: Path) -> None:
    topology = site / "foreign.toml"
    topology.write_text(FOREIGN)
    text = busrl(site, "check", str(topology), code=2)
    assert not NAMES.findall(text)
    assert (site / "busrl/configs/reference.toml").is_file() and f"{site}/busrl/configs/reference.toml" in text


def test_a_text_stays_as_it_is_in_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "see docs/engines.md#vllm and configs/reference.toml"
    assert opened(text) == text
    assert opened(text, is_clone=False) == f"see {SITE}engines/#vllm and {CONFIGS}/reference.toml"


@pytest.mark.parametrize("text", ["/home/me/configs/reference.toml: ok", "my/docs/engines.md", "configs/mine.toml: ok"])
def test_a_path_of_the_reader_stays_as_it_is(text: str) -> None:
    assert opened(text, is_clone=False) == text


def test_every_page_that_a_string_names_exists() -> None:
    missing = []
    for path in sorted((ROOT / "busrl").rglob("*.py")):
        texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        text = "\n".join(text for text in texts if isinstance(text, str))
        names = set(re.findall(r"\bdocs/[a-z0-9/-]+\.md", text))
        missing += [(path.name, name) for name in names if not (ROOT / name).is_file()]
    assert not missing


def test_a_copy_of_the_quickstart_checks_and_is_never_overwritten(site: Path) -> None:
    text = busrl(site, "quickstart", "--copy", "mine")
    assert "quickstart.toml, reward.py, README.md" in text
    mine = site / "elsewhere/mine"
    assert not NAMES.findall((mine / "README.md").read_text() + (mine / "quickstart.toml").read_text())
    assert "quickstart.toml: ok" in busrl(site, "check", "mine/quickstart.toml")
    assert "nothing is overwritten" in busrl(site, "quickstart", "--copy", "mine", code=2)


def test_a_topology_of_configs_is_found_unless_the_reader_has_one(site: Path) -> None:
    mine = site / "elsewhere/configs"
    shutil.rmtree(mine, ignore_errors=True)
    assert f"{site}/busrl/configs/scripted.toml: ok" in busrl(site, "check", "configs/scripted.toml")
    mine.mkdir()
    shutil.copy(ROOT / "configs/scripted.jsonl", mine)
    (mine / "scripted.toml").write_text((ROOT / "configs/scripted.toml").read_text())
    assert f"{mine}/scripted.toml: ok" in busrl(site, "check", "configs/scripted.toml")


@pytest.mark.parametrize("name", ["agents", "serve", "atropos", "quickstart"])
def test_each_topology_of_the_package_checks_without_a_clone(site: Path, name: str) -> None:
    assert f"{name}.toml: ok" in busrl(site, "check", f"configs/{name}.toml")


def test_a_readme_elsewhere_links_to_addresses() -> None:
    text = "![look](docs/look.png) [how](docs/serve.md#keys) [own](configs/own.toml) [away](https://a.b/c) [on](#on)"
    assert published(text) == (
        f"![look]({SOURCE}/raw/HEAD/docs/look.png) [how]({SITE}serve/#keys) [own]({SOURCE}/blob/HEAD/configs/own.toml) "
        "[away](https://a.b/c) [on](#on)"
    )


@pytest.mark.long
@pytest.mark.parametrize("start", [["quickstart"], ["launch", "copied/quickstart.toml"]], ids=["package", "copy"])
def test_the_quickstart_runs_where_there_is_no_clone(site: Path, start: list[str]) -> None:
    if start[0] == "launch":
        busrl(site, "quickstart", "--copy", "copied")
    text = python(site, "-m", "busrl.cli", *start, "--run-dir", f"runs/{start[0]}", "--set", "run.max_steps=3")
    assert "finished, the learner has reached the goal" in text
    assert ("busrl quickstart --copy" in text) == (start[0] == "quickstart")
    assert "0 lost, 0 trained twice" in text


@pytest.mark.long
def test_the_quickstart_runs_where_its_package_cannot_be_written_to(site: Path) -> None:
    within: tuple[str, ...] = ()
    if os.getuid() == 0:  # who may write everywhere, but for this
        if shutil.which("setpriv") is None:
            pytest.skip("setpriv, of util-linux, is not here")
        within = ("setpriv", "--bounding-set=-dac_override")
    for path in (site / "busrl").rglob("*.pyc"):  # of other tests of this copy
        path.unlink()
    folders = [path for path in (site / "busrl").rglob("*") if path.is_dir()]
    for folder in (site / "busrl", *folders):
        folder.chmod(0o555)
    try:
        more = ("--run-dir", "runs/read-only", "--set", "run.max_steps=3")
        text = python(site, "-m", "busrl.cli", "quickstart", *more, within=within)
    finally:
        for folder in (site / "busrl", *folders):
            folder.chmod(0o755)
    assert "0 lost, 0 trained twice" in text and not list((site / "busrl").rglob("*.pyc"))
