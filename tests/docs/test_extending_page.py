"""docs/extending.md and its neighbours: an addition touches the files of the table, shown on a copy of the code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("extending", "extend-functions", "extend-core", "extend-parts")
PAGE = "\n".join((ROOT / "docs" / f"{name}.md").read_text() for name in NAMES)
ROWS = re.findall(r"^\| an? ([^|]+) \| (\d) \| (.+) \|$", PAGE, re.M)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "busrl", tmp_path / "busrl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tools" / "reference", tmp_path / "tools" / "reference")
    return tmp_path


def example(title: str, number: int) -> str:
    """A code block of a recipe of the page."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.S)[number]


def add(path: Path, before: str, text: str) -> None:
    code = path.read_text()
    assert code.count(before) == 1
    path.write_text(code.replace(before, text + before))


def run(copy: Path, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True,
        text=True, timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_files_of_the_table_match_its_count_and_exist() -> None:
    assert len(ROWS) >= 13
    for name, count, how in ROWS:
        files = set(re.findall(r"`([a-z_/]+\.(?:py|js|html|css))`", how)) if int(count) else []
        new = how.count("a module in") + how.count("a file in")
        assert len(files) + new + how.count("where it is read") + how.count("where it is sent") == int(count), name
        assert all((ROOT / file).is_file() or (ROOT / "busrl" / file).is_file() for file in files), name


def test_a_key_is_one_declaration_that_is_checked_documented_and_read(copy: Path) -> None:
    add(copy / "busrl" / "topology" / "learner.py", "\n\nON_GPUS = ", example("A topology key", 0))
    code = (
        "from busrl.preflight.load import load\n"
        "from busrl.errors import TopologyError\n"
        "from tools.reference.topology_page import text\n"
        f"path = {str(ROOT / 'configs' / 'quickstart.toml')!r}\n"
        "assert load(path).learner.controller.patience == 3\n"
        "assert load(path, ['learner.controller.patience=7']).learner.controller.patience == 7\n"
        "print(text())\n"
        "try:\n"
        "    load(path, ['learner.controller.patience=0'])\n"
        "except TopologyError as refused:\n"
        "    print('refused:', refused)\n"
    )
    page, _, refused = run(copy, code).partition("refused:")
    assert "patience = 3" in page.split("[learner.controller]")[1].split("\n[")[0]
    assert "learner.controller.patience = 0" in refused and "1" in refused


def test_a_message_is_one_class_with_bytes_and_topic_and_page_entry(copy: Path) -> None:
    messages = copy / "busrl" / "protocol" / "messages.py"
    add(messages, "\n\ndef name_of(", "\n\n" + example("A bus message", 0))
    add(messages, "TaskRequest, NewTask, DataGenerated, ", "Paused, ")
    code = (
        "from busrl.protocol import codec, messages as m\n"
        "raw = codec.encode(m.Paused(sender='learner', reason='disk'))\n"
        "assert codec.topic(m.Paused) == 'PAUSED/'\n"
        "print(codec.decode(m.Paused, raw, 1000))\n"
    )
    assert "reason='disk'" in run(copy, code)


HEARS = """
import tempfile, threading
from busrl.bus import Endpoint
from busrl.bus.broker import StopRequest, run_broker
from busrl.launcher.run import SUBSCRIBED
from busrl.launcher.summary import Progress
from busrl.protocol import messages as m
from busrl.protocol.codec import topic
from busrl.ring import OfdLock
from busrl.status.state import RunState

place = tempfile.mkdtemp(prefix="brl")
ends, stop, is_ready = (f"ipc://{place}/pub", f"ipc://{place}/sub"), StopRequest(), threading.Event()
broker = threading.Thread(
    target=run_broker, args=(*ends, OfdLock(f"{place}/lock"), stop), kwargs={"on_ready": is_ready.set}, daemon=True
)
broker.start()
assert is_ready.wait(30), "the broker is not ready"
progress = Progress(RunState(), [], 0.0)
with Endpoint("launch", *ends, subscribe=[topic(kind) for kind in SUBSCRIBED]) as launch:
    launch.ready(30)  # first: a sender that connects after it knows of all that it subscribes to
    with Endpoint("w", *ends) as worker:
        worker.ready(30)
        worker.send(m.Paused(reason="disk"))
        worker.send(m.Error(severity="warning", where="w", text="the last one"))
        while not isinstance(message := launch.recv(30), m.Error):
            assert message is not None, "launch got nothing"
            progress.handle(message, 0.0)
print(progress.run.waiting)
stop.set()
broker.join(30)
"""


@pytest.mark.parametrize("subscribes", [True, False])
def test_launch_shows_a_message_that_it_subscribes_to(copy: Path, subscribes: bool) -> None:
    messages, state = copy / "busrl" / "protocol" / "messages.py", copy / "busrl" / "status" / "state.py"
    add(messages, "\n\ndef name_of(", "\n\n" + example("A bus message", 0))
    add(messages, "TaskRequest, NewTask, DataGenerated, ", "Paused, ")
    add(state, "            case m.ValidationStarted():\n", "            case m.Paused():\n"
        "                self.waiting = message.reason\n")
    if subscribes:
        add(copy / "busrl" / "launcher" / "run.py", "    m.Hello, m.Heartbeat, m.Control,\n", "    m.Paused,\n")
    assert run(copy, HEARS).strip() == ("disk" if subscribes else "")


def test_a_diagnostic_is_a_row_a_name_and_a_field(copy: Path) -> None:
    path = copy / "busrl" / "algorithms" / "diagnostics.py"
    add(path, '"taught", "teacher_kl")', '"certain", ')
    add(path, "    dropped: float = 0.0", "    certain: float = 0.0  # share of tokens above 0.9\n")
    add(path, "    rows += _of_teacher(", "    rows += [inputs.trainer_logprobs.detach() > -0.105]\n")
    add(path, '"entropy", "dropped")', '"certain", ')
    code = (
        "import torch\n"
        "from busrl.algorithms import diagnostics, terms\n"
        "from busrl.algorithms.losses import LossInputs, LossSettings\n"
        "from busrl.roles.learner import metrics\n"
        "from busrl.training.step_stats import RankStats, stats_of\n"
        "drawn = torch.tensor([-0.01, -0.02, -0.03, -5.0])\n"
        "nothing, whole = torch.zeros(4), torch.zeros(4, dtype=torch.int64)\n"
        "inputs = LossInputs(drawn, drawn, drawn, nothing, None, whole, whole, whole, torch.tensor([4]), nothing)\n"
        "row = diagnostics.sums(inputs, terms.Objective(nothing), nothing, None, LossSettings())\n"
        "rank = RankStats(0.0, '', (), tuple(row.tolist()), 4, 1, 0, 4, 4, 1, 0.0, 0.0, 0.0)\n"
        "print(metrics._training(stats_of([rank], 0.0))['certain'])\n"
    )
    assert run(copy, code).strip() == "0.75"


def test_an_engine_is_a_module_and_its_names_in_one_table(copy: Path) -> None:
    (copy / "busrl" / "engines" / "echo.py").write_text(
        "def make(topology, process):\n    return f'echo of {process}'\n"
    )
    kinds = copy / "busrl" / "topology" / "kinds.py"
    add(kinds, '    "torch": EngineKind(', '    "echo": EngineKind("engines.echo", "here"),\n')
    add(kinds, '"torch", "vllm", SCRIPTED)', '"echo", ')
    code = (
        "from busrl.preflight.load import load\n"
        "from busrl.topology.schema import has_model\n"
        "from busrl.engines import make_engine\n"
        "from tools.reference.topology_page import text\n"
        f"path = {str(ROOT / 'configs' / 'quickstart.toml')!r}\n"
        "t = load(path, ['process.rollout.engine=echo'])\n"
        "rollout = next(entry for entry in t.process if entry.role == 'rollout')\n"
        "assert has_model(rollout)\n"
        "print(make_engine(t, 'rollout/0'), '|', text().split('engine = ')[1].splitlines()[0])\n"
    )
    printed, _, page = run(copy, code).partition(" | ")
    assert printed == "echo of rollout/0" and "echo" in page


def test_a_reward_kind_is_a_row_and_a_class(copy: Path) -> None:
    (copy / "busrl" / "rewards" / "digits.py").write_text(
        "class Digits:\n"
        "    def __init__(self, setup):\n        self.pattern = setup.pattern\n"
        "    def __call__(self, record, completion, token_ids):\n        return completion.count(self.pattern)\n"
    )
    row = '    "digits": RewardKind("rewards.digits:Digits", ("pattern",), finder=ANSWER),\n'
    add(copy / "busrl" / "topology" / "rewards.py", '    "regex": RewardKind(', row)
    code = (
        "from busrl.preflight.load import load\n"
        "from busrl.rewards.base import Item\n"
        "from busrl.rewards.pool import RewardPool\n"
        "from tools.reference.topology_page import text\n"
        f"path = {str(ROOT / 'configs' / 'quickstart.toml')!r}\n"
        "reward = load(path, ['reward.extract=', 'reward.part=[{kind=\"digits\", pattern=\"7\"}]']).reward\n"
        "with RewardPool(reward, base_dir='.') as pool:\n"
        "    pool.submit([Item(1, b'{}', '7 and 7', [])])\n"
        "    print(pool.poll(60.0)[0].value, reward.finder[1] == '', '\"digits\"' in text())\n"
    )
    assert run(copy, code).strip() == "2.0 True True"


def test_a_policy_that_predicts_nothing_needs_no_part_of_predictions(copy: Path) -> None:
    shutil.rmtree(copy / "busrl" / "predict")
    dispatch = copy / "busrl" / "scheduling" / "dispatch.py"
    add(dispatch, "def make_policy(", 'class Patient(Fifo):\n    name = "patient"\n\n\n')
    add(dispatch, '        "sjf": lambda', '        "patient": lambda: Patient(horizon),\n')
    add(copy / "busrl" / "topology" / "kinds.py", '"sjf": PolicyKind()', '"patient": PolicyKind(predicts=False), ')
    code = (
        "from busrl.errors import UserError\n"
        "from busrl.preflight.load import load\n"
        "from busrl.roles.scheduler import predictor_of\n"
        "from busrl.scheduling.plan import policy_of\n"
        f"path = {str(ROOT / 'configs' / 'quickstart.toml')!r}\n"
        "topology = load(path, ['scheduler.policy=patient'])\n"
        "print(policy_of(topology, predictor_of(topology, None, None, print).predictor).name)\n"
        "try:\n"
        "    load(path, ['scheduler.policy=sjf'])\n"
        "except UserError as refused:\n"
        "    print(refused)\n"
    )
    policy, refused = run(copy, code).splitlines()
    assert policy == "patient" and "need busrl/predict, which is not part of this installation" in refused


def test_a_role_is_a_row_and_a_module(copy: Path) -> None:
    (copy / "busrl" / "roles" / "echo.py").write_text(
        "from busrl.roles.actor import Actor\n\n\nclass Echo(Actor):\n    def work(self):\n        return False\n"
    )
    add(copy / "busrl" / "capabilities.py", '    Role("validator"', '    Role("echo", "roles.echo:Echo", 3),\n')
    code = (
        "from pathlib import Path\n"
        "from busrl import capabilities\n"
        "from busrl.preflight.load import load\n"
        f"text = Path({str(ROOT / 'configs' / 'quickstart.toml')!r}).read_text()\n"
        "Path('echo.toml').write_text(text + '\\n[[process]]\\nrole = \"echo\"\\ncount = 2')\n"
        "names = [process.name for process in load('echo.toml').processes() if process.role == 'echo']\n"
        "print(names, capabilities.role('echo'))\n"
    )
    assert run(copy, code).strip() == "['echo/0', 'echo/1'] <class 'busrl.roles.echo.Echo'>"


def test_a_rule_between_keys_is_a_line_of_a_table(copy: Path) -> None:
    rules = copy / "busrl" / "preflight" / "learner_rules.py"
    row = '    Clash(("groups.size",), lambda t: t.groups.size == 8, "eight is refused here; take nine"),\n'
    rules.write_text(rules.read_text().replace("\nTABLE = (\n", "\nTABLE = (\n" + row, 1))
    check = (
        "from busrl.preflight.load import load\n"
        "try:\n"
        f"    load({str(ROOT / 'configs' / 'quickstart.toml')!r})\n"
        "except Exception as refused:\n"
        "    print(refused)\n"
    )
    assert "eight is refused here; take nine" in run(copy, check)


def test_a_page_of_the_monitor_is_files_paths_and_a_link(copy: Path) -> None:
    web = copy / "busrl" / "observe" / "monitor" / "web"
    paths = '    "/notes.html": ("notes.html", "text/html"), "/notes.js": ("notes.js", SCRIPT),\n'
    add(web / "server.py", '    "/page.css": ', paths)
    add(web / "page.html", "</body>", '<a href="notes.html">notes</a>')
    (web / "notes.html").write_text('<!doctype html><p id="step"></p><script src="notes.js"></script>')
    (web / "notes.js").write_text('new EventSource("events").onmessage = (event) => event;')
    command = [sys.executable, "-m", "busrl.cli", "monitor", "runs", "--web"]
    (copy / "runs").mkdir()
    (copy / "runs" / "run.json").write_text('{"run_id": "old-1"}')
    child = subprocess.Popen(
        command, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        said = child.stdout.readline()
        url = next(word for word in said.split() if word.startswith("http://"))
        for name in ("notes.html", "notes.js"):
            with urllib.request.urlopen(urllib.parse.urljoin(url, name), timeout=30) as answer:
                assert answer.read() == (web / name).read_bytes()
                assert "script-src 'self'" in answer.headers["content-security-policy"]
    finally:
        child.kill()
        child.communicate()


def test_the_files_of_the_monitor_are_those_of_its_table() -> None:
    folder = ROOT / "busrl" / "observe" / "monitor" / "web"
    table = (folder / "server.py").read_text().split("FILES: Final = {")[1].split("}")[0]
    named = set(re.findall(r'\("([a-z.]+)"', table))
    assert named == {path.name for path in folder.iterdir() if path.suffix in (".html", ".js", ".css")}
