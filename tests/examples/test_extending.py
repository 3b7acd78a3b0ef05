"""The loss, estimator, metric and optimiser of examples/extending: in a step, in a run, and refused by `check`."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from busrl.algorithms.losses import LossInputs, LossSettings, per_token
from busrl.data import pretrained
from busrl.errors import FunctionRefused, TopologyError
from busrl.preflight.load import load
from busrl.roles.learner.step import TrainingStep
from busrl.training import custom

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / "examples" / "extending"
LOSS, ADVANTAGE = f"{OWN}/loss.py:cispo", f"{OWN}/advantage.py:leave_one_out"
METRIC, OPTIMIZER = f"{OWN}/metric.py:diversity", f"{OWN}/optimizer.py:Lion"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"extending_{name}", OWN / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


def test_the_loss_gradient_is_the_clipped_weight_times_the_advantage() -> None:
    behaviour = torch.tensor([-1.0, -1.0, -1.0, float("nan")])
    logprobs = torch.tensor([-1.0, 0.0, -3.0, float("nan")], requires_grad=True)
    inputs = LossInputs(
        logprobs, behaviour, logprobs.detach(), torch.tensor([2.0, 1.0, -1.0, 5.0]),
        torch.tensor([True, True, True, False]), ages=torch.tensor([0, 1, 0, 0]),
    )
    per_token(module("loss").cispo, inputs, LossSettings()).sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([-2.0, -0.5 * 1.28, 0.8, 0.0])


def test_the_estimator_compares_each_reward_with_the_others() -> None:
    found = module("advantage").leave_one_out([1.0, 0.0, 0.0], [4, 4, 4])
    assert found == pytest.approx([1.0, -0.5, -0.5]) and sum(found) == pytest.approx(0)


def test_the_examples_pass_their_trials() -> None:
    custom.try_loss(LOSS, ".")
    custom.try_estimator(ADVANTAGE, ".")
    custom.try_metric(METRIC, ".")


@pytest.mark.parametrize(
    ("attempt", "body", "words"),
    [
        (custom.try_loss, "return inputs.trainer_logprobs.mean()", "returned shape (); return a tensor of shape (15,)"),
        (custom.try_loss, "return 0.0", "returned a float; return a tensor of shape (15,)"),
        (custom.try_loss, "return inputs.advantages", "without gradient; compute it from inputs.trainer_logprobs"),
        (custom.try_loss, "return (inputs.trainer_logprobs - inputs.trainer_logprobs).sqrt()", "both must be finite"),
        (custom.try_loss, "return inputs.logp", "it raised AttributeError"),
        (custom.try_loss, "raise SystemExit(3)", "it raised SystemExit: 3"),
        (custom.try_estimator, "raise SystemExit(3)", "it raised SystemExit: 3"),
        (custom.try_metric, "raise SystemExit(0)", "it raised SystemExit: 0"),
        (custom.try_loss, "return inputs.trainer_logprobs * (inputs.advantages - inputs.advantages.mean())",
         "with the masked tokens taken away"),
        (custom.try_loss, "import random; return inputs.trainer_logprobs * random.random()", "and, with another call,"),
        (custom.try_loss, "pass\nf.streamable = 1", "has streamable = 1; set it to True or False"),
        (custom.try_loss, "pass\nf.uses = ('prox', 'old')", "a tuple of some of prox, entropy, reference, teacher"),
        (custom.try_loss, "return inputs.trainer_logprobs * inputs.entropy\nf.uses = ('prox',)", "it raised TypeError"),
        (custom.try_loss, "m = inputs.trainer_logprobs.new_ones(len(inputs.samples)) if inputs.mask is None else "
         "inputs.mask\n    return inputs.trainer_logprobs * (inputs.advantages * m).sum() / m.sum()\n"
         "f.streamable = True",
         "a loss that depends on other samples is not streamable"),
        (custom.try_estimator, "import random; return [random.random() for _ in inputs]", "at another call"),
        (custom.try_estimator, "return [1.0]", "returned 1 advantages for 4 rewards; return one per sample"),
        (custom.try_estimator, "return 1.0", "returned 1.0; return 4 numbers, one per sample"),
        (custom.try_estimator, "return [float('nan')] * len(inputs)", "return finite numbers"),
        (custom.try_metric, "return 1.0", "returned 1.0; return a dict of names and numbers"),
        (custom.try_metric, "return {'a': float('inf')}", "leave out what is not a finite number"),
        (custom.try_metric, "return settings['no_such_number']", "it raised KeyError: 'no_such_number'"),
    ],
)
def test_a_function_breaking_its_contract_is_refused_with_name_and_remedy(
    tmp_path: Path, attempt: object, body: str, words: str
) -> None:
    path = tmp_path / "own.py"
    path.write_text(f"def f(inputs, settings):\n    {body}\n")
    with pytest.raises(FunctionRefused) as caught:
        attempt(f"{path}:f", ".")  # type: ignore[operator]
    assert f"{path}:f'" in str(caught.value) and words in str(caught.value)


def test_a_loss_over_all_samples_is_held_back_unless_declared_streamable(
    tmp_path: Path, quickstart: None
) -> None:
    text = (
        "def f(inputs, settings):\n    return -inputs.advantages * inputs.trainer_logprobs\n"
        "def g(inputs, settings):\n    assert inputs.entropy is None\n    return f(inputs, settings)\n"
        "g.streamable, g.uses = True, ()\n"
    )
    (tmp_path / "own.py").write_text(text)
    made = {}
    for name in "fg":
        custom.try_loss(f"{tmp_path}/own.py:{name}", ".")
        topology = load(ROOT / "configs" / "quickstart.toml", [f"learner.loss={tmp_path}/own.py:{name}"])
        folder = str(pretrained.model_at(topology.model.path))
        made[name] = TrainingStep(replace(topology, model=replace(topology.model, path=folder)))
    assert (made["f"].models.streamable, made["g"].models.streamable) == (False, True)
    assert made["f"].models.loss_may_read("prox") and not made["g"].models.loss_may_read("prox")


def test_check_names_the_key_the_line_and_the_cause(tmp_path: Path) -> None:
    text = (ROOT / "configs" / "quickstart.toml").read_text()
    named = '[learner]\nloss = "own.py:short"\nadvantage = "own.py:none"\nmetrics = ["own.py:gone"]'
    (tmp_path / "run.toml").write_text(re.sub(r"^\[learner\]$", named, text, flags=re.M))
    (tmp_path / "own.py").write_text(
        "def short(inputs, settings):\n    return inputs.trainer_logprobs.sum()\n"
        "def none(rewards, lengths):\n    return None\n"
    )
    with pytest.raises(TopologyError) as caught:
        load(tmp_path / "run.toml")
    texts = [str(problem) for problem in caught.value.problems]
    assert len(texts) == 3 and all(f"{tmp_path}/run.toml:" in text for text in texts)
    assert "returned shape ()" in texts[0] and "returned None" in texts[1] and "has no 'gone'" in texts[2]


@pytest.mark.long
def test_a_run_trains_with_all_four_and_writes_the_metric(
    quickstart: None, tmp_path: Path
) -> None:
    from checks import check_end
    from harness import Run, running

    settings = (f"learner.loss={LOSS}", f"learner.advantage={ADVANTAGE}", f'learner.metrics=["{METRIC}"]',
                f"learner.optimizer={OPTIMIZER}", "learner.options.weight_decay=0.1")
    run = Run(tmp_path / "run", *settings, steps=4)
    with running(run):
        check_end(run, run.wait())
    rows = run.metrics()
    assert len(rows) == 4 and all(row["loss"] != 0 and not row["skipped"] for row in rows)
    for row in rows:
        assert 0 < row["metrics"]["different_answers"] <= 1 and row["metrics"]["older_tokens"] >= 0
        assert row["metrics"]["reward_per_token"] == pytest.approx(row["reward"] / row["tokens"])
