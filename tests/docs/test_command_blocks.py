"""Every command block of the pages that somebody begins with is run from the page's own text, or has a reason.

- SCENES says for each page what lies in the folder of its reader, and which commands run on beside the next ones.
- A block is named by its first command. A new one is run by nobody until its page's scene names it, and a test says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from chat_folders import make
from command_blocks import ROOT, Reader, blocks, files_of, to_type

FOLLOWED = {"your-run.md": "test_your_run.py", "from-a-folder.md": "test_from_a_folder.py"}
SHORT = ("learner.trigger.n_min=2", "generation.max_new_tokens=8", "limits.idle_groups=0", "groups.size=2")
QUICK = ("learner.trigger.n_min=8", "learner.warmup_groups=0", "validation.samples=32")
MATH = 'validation.set=[{name="math", data="held-out.jsonl"}]'
ENDLESS = "run.max_steps=1000000"
EVERY_MODEL = (ENDLESS, "learner.checkpoint_every=1", "learner.keep_last=10000")


@dataclass(frozen=True)
class Beside:
    """A command that goes on while the next ones are typed, from when its file has a line.
    `ends`: "itself" with 0; "interrupted" by Ctrl-C after its block; "stopped" by a command of its block; or
    "with the page"."""

    until: str
    ends: str


@dataclass(frozen=True)
class Step:
    """Needs of a block: commands before it, those that go on beside others, and keys beside its scene's."""

    before: tuple[str, ...] = ()
    beside: Mapping[str, Beside] = field(default_factory=dict)
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scene:
    """A page's reader: files as (page, name or language) there, keys of topologies, and its blocks by first command."""

    steps: Mapping[str, Step]
    keys: tuple[str, ...] = SHORT
    files: Mapping[str, tuple[str, str]] = field(default_factory=lambda: OWN_RUN)


OWN_RUN = {name: ("your-run.md", name) for name in ("train.jsonl", "held-out.jsonl", "judge.py", "my.toml")}
README_RUN = {
    "my.toml": ("README.md", "toml"), "prompts.jsonl": ("your-run.md", "train.jsonl"),
    "validation.jsonl": ("your-run.md", "held-out.jsonl"), "my_reward.py": ("your-run.md", "judge.py"),
}
LAUNCH = "busrl launch my.toml --run-dir runs/my"
STARTED, FIRST_MODEL = "runs/my/metrics.jsonl", "runs/my/checkpoints/global_step_1/model/config.json"
WORKED = "busrl launch configs/{0}.toml --run-dir runs/{1} --set process.reward.count=0".format
SERVE = "busrl launch configs/serve.toml --run-dir runs/serve"

SCENES = {
    "README.md": Scene({
        "busrl quickstart": Step(keys=("run.max_steps=2",)),
        "busrl check my.toml": Step(keys=EVERY_MODEL, beside={
            LAUNCH: Beside(FIRST_MODEL, "with the page"), "busrl monitor runs/my": Beside("", "interrupted"),
        }),
    }, (*SHORT, "validation.samples=4"), README_RUN),
    "agents.md": Scene({"busrl init agents --model /models/my-model": Step()}, (*QUICK, "run.max_steps=2"), {}),
    "serve.md": Scene({SERVE: Step(beside={SERVE: Beside("runs/serve/run.json", "itself")})},
                      (*QUICK, "run.max_steps=2"), {}),
    "rewards.md": Scene({"busrl check my.toml": Step()}),
    "evaluation.md": Scene({
        "busrl evaluate runs/my": Step((LAUNCH,), {LAUNCH: Beside(FIRST_MODEL, "with the page")}),
        "busrl validate runs/my": Step(),
    }, (*SHORT, *EVERY_MODEL, MATH, "validation.samples=4")),
    "write-an-actor.md": Scene({
        WORKED(name, folder): Step(beside={WORKED(name, folder): Beside(f"runs/{folder}/run.json", "itself")})
        for name, folder in (("quickstart", "mine"), ("scripted", "dry"))
    }, (*QUICK, "run.max_steps=2"), {"my_reward.py": ("write-an-actor.md", "python")}),
    "operating.md": Scene({
        LAUNCH: Step(beside={LAUNCH: Beside(STARTED, "stopped")}),
        "busrl pause runs/my": Step((LAUNCH, "busrl resume runs/my"), {LAUNCH: Beside("runs/my/run.json", "stopped")}),
    }, (*SHORT, ENDLESS, "validation.samples=4")),
}


def shown(name: str, part: str) -> str:
    """The file of a page with that name, or its blocks of that language one after another."""
    return files_of(name).get(part) or "\n".join(block.text for block in blocks(name) if block.language == part)


@pytest.mark.parametrize("name", SCENES)
def test_every_block_of_a_page_has_a_scene_or_a_reason(name: str) -> None:
    firsts = [commands[0] for _, commands in to_type(name)]
    assert firsts == list(SCENES[name].steps), "say in SCENES what the block needs, or in REASONS why it is not run"


@pytest.mark.parametrize("name", [*SCENES, *FOLLOWED])
def test_every_block_with_commands_says_that_it_is_for_a_shell(name: str) -> None:
    hidden = [block.text for block in blocks(name) if not block.language and re.search(
        r"^(\w+=\S+ )?(\S*/)?(busrl|make|pip|python3?) ", block.text, flags=re.M)]
    assert not hidden, "write ```sh before it"


@pytest.fixture
def reader(name: str, tmp_path: Path, quickstart: None) -> Iterator[Reader]:
    scene = SCENES[name]
    model = make(tmp_path / "model", positions=2048)  # the prompts of `busrl init` are long
    someone = Reader(tmp_path, {"/models/my-model": str(model)}, scene.keys)
    for folder in ("configs", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    someone.write({file: shown(*place) for file, place in scene.files.items()})
    yield someone
    someone.leave()


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
def test_every_command_of_a_page_works_as_it_stands(name: str, reader: Reader) -> None:
    for _, commands in to_type(name):
        step = SCENES[name].steps[commands[0]]
        reader.keys = [*SCENES[name].keys, *step.keys]
        for command in [*step.before, *commands]:
            if command in step.beside:
                reader.start(command, step.beside[command].until)
            else:
                reader.run(command)
        for command, beside in step.beside.items():
            if beside.ends != "with the page":
                reader.end(command, beside.ends)
