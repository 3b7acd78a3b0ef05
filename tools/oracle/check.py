"""Recomputes a run step by step and collects what differs from what the run said of itself.

Joins the files of a run, the formulas and the model. What can not be recomputed (a step whose weights nobody kept) is
listed as left out, never passed over in silence.

Checked per step: what the answers say (tokens drawn by the weights and random numbers that they name, log-probabilities
at the sampling temperature, ends, rewards with truncation, ages), what the metrics say, and the weights that came out.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tools.oracle import maths
from tools.oracle.files import EOS, LENGTH, RunFiles, Sample, Step, read
from tools.oracle.model import padded
from tools.oracle.training import Terms, Tokens, Training, joined

EXACT = 2e-4  # nats: an engine's float32 log-probability against float64
NEAR = 1e-4  # a random number so close to an edge may fall on either side in float32
UPDATE = 2e-3  # of the length of the update: float32 against float64, where a gradient is all but zero
ROUNDING = 3e-7  # of the length of the weights: a few roundings to float32
VALIDATE = 1 << 62
MOST = 20  # wrong things of one kind that are listed


@dataclass
class Found:
    """`wrong`: what differs, as text; `left_out`: what could not be looked at; `done`: how often each thing was."""

    wrong: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    widest: dict[str, float] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)

    def error(self, kind: str, text: str) -> None:
        self.kinds[kind] += 1
        if self.kinds[kind] <= MOST:
            self.wrong.append(f"{kind}: {text}")

    def compare(self, step: int, name: str, said: Any, expected: Any, tolerance: float) -> None:
        """One number of a step; None only equals None."""
        self.done[name] += 1
        if said is None or expected is None:
            if said is not expected:
                self.error(name, f"step {step} says {said}, recomputed {expected}")
            return
        gap = abs(float(said) - float(expected)) / max(1.0, abs(float(expected)))
        self.widest[name] = max(self.widest.get(name, 0.0), gap if math.isfinite(gap) else math.inf)
        if maths.mismatched(float(said), float(expected), tolerance):
            self.error(name, f"step {step} says {said}, recomputed {expected}")

    def text(self) -> str:
        lines = [f"{name:24} {count:7}  {self.widest.get(name, 0.0):.1e}" for name, count in sorted(self.done.items())]
        lines = ["checked                    times  widest difference", *lines]
        lines += [f"left out: {text}" for text in self.left_out]
        lines += [f"WRONG {text}" for text in self.wrong]
        return "\n".join([*lines, f"{sum(self.kinds.values())} wrong" if self.wrong else "all numbers are right"])


def check(root: Path, tolerance: float = 1e-5, dtype: str = "float64") -> Found:
    """Look at a whole run directory."""
    torch.set_num_threads(1)
    return _Check(read(Path(root)), tolerance, dtype).all()


# What the formulas of `maths` are of: dotted key -> the values that they know; the first where a run has no such key.
KNOWN = {
    "learner.loss": ("ppo_clip", "decoupled", "reinforce"),
    "learner.advantage": ("group_std", "group_mean", "gae", "ema"),
    "learner.aggregation": ("token-mean",), "learner.ratio": ("behaviour", "proximal"),
    "learner.newest_ratio": ("recorded",), "learner.passes_per_batch": (1,),
    "learner.correction": ("none", *maths.BOUNDS), "learner.kl": ("none", "k1", "k2", "k3", "k3_is"),
    "learner.credit": ("episode", "turn"), "learner.unit": ("episode",), "learner.teacher_coef": (0.0,),
    "learner.optimizer": ("adamw",), "learner.train_layers": ("",), "lora.dropout": (0.0,),
}


def _only_what_is_known(topology: dict[str, Any]) -> None:
    """A ValueError for a run of an algorithm that is not recomputed here; a key of a later busrl may be missing."""
    for key, values in KNOWN.items():
        table, name = key.split(".")
        if (value := topology.get(table, {}).get(name, values[0])) not in values:
            raise ValueError(
                f"{key} = {value!r}: the oracle recomputes runs with {', '.join(map(repr, values))} alone; the "
                "formulas of the others are tested against vectors (tests/algorithms)"
            )


class _Check:
    def __init__(self, files: RunFiles, tolerance: float, dtype: str) -> None:
        self.files, self.tolerance = files, tolerance
        topology = files.topology
        _only_what_is_known(topology)
        self.learner, self.run, self.segments = topology["learner"], topology["run"], topology["segments"]
        self.generation, self.experiments = topology["generation"], topology["experiments"]
        self.worth = topology["reward"]
        self.found = Found()
        self.step_of = maths.VersionSteps(_newest_before(files))
        self.training = Training(files, dtype, self.step_of)
        self.model, self.lora = self.training.model, self.training.lora
        elsewhere = bool(self.learner.get("start_from"))  # it began with weights that are not those of model.path
        # The step whose weights `training` holds; -1: none, for an adapter where there is no peft to draw it.
        self.at = 0 if self.training.trained.leaves and not elsewhere else -1
        self.replayed = 0  # updates since the weights were the run's own: a gradient norm drifts most
        self.kept: dict[int, dict[str, Tensor]] = {} if elsewhere else {0: self.model.weights()}  # weights by step
        self.prompts = _Prompts(topology)

    # -- the run --------------------------------------------------------------------------------------------------

    def all(self) -> Found:
        self.steps_are_whole()
        trained = self.trained_before()
        for step in self.files.steps:
            if self.weights_before(step.step):
                self.answers(step)
                self.ages(step)
                self.step(step, trained)
            else:
                self.found.left_out.append(f"step {step.step}: nobody kept the weights before it")
                self.ages(step)
            trained += len(step.groups)
        self.fates()
        self.validation()
        return self.found

    def trained_before(self) -> int:
        """Groups trained before the first record: by the checkpoint that it follows, none without one."""
        before = self.files.steps[0].step - 1 if self.files.steps else 0
        folder = self.files.checkpoints.get(before)
        if folder is not None:
            return int(json.loads((folder / "meta.json").read_text())["groups"])
        return int(self.files.rows.get(before, {}).get("groups_total", 0))

    def row(self, step: Step) -> dict[str, Any]:
        return self.files.rows.get(step.step, {})

    def steps_are_whole(self) -> None:
        logged, told = {step.step for step in self.files.steps}, set(self.files.rows)
        if missing := sorted(told - logged):
            self.found.left_out.append(f"steps {missing}: their records are no longer in the log")
        for step in sorted(logged - told):
            self.found.error("metrics", f"step {step} is in the log, and not in metrics.jsonl")

    def weights_before(self, step: int) -> bool:
        """Put the weights before `step` in place: those of a checkpoint, or those that we made ourselves."""
        folder = self.files.checkpoints.get(step - 1)
        if folder is not None:
            self.training.load(folder)
            self.at, self.replayed = step - 1, 0
        if self.at != step - 1:
            return False
        self.keep(step - 1)
        return True

    def keep(self, step: int) -> None:
        """What engines ran as the version of that step."""
        self.kept[step] = {name: value.detach().clone() for name, value in self.training.trained.effective().items()}

    # -- a step ---------------------------------------------------------------------------------------------------

    def step(self, step: Step, trained: int) -> None:
        row = self.row(step)
        expected = self.of_the_record(step) | self.of_the_ended(step)
        expected["lr"] = maths.learning_rate(self.learner, self.run, trained, len(step.groups))
        before = {name: value.clone() for name, value in self.training.tensors().items()}
        updates = self.training.step(step, expected["lr"])
        expected |= joined(updates, self.learner)
        expected |= self.mismatch(step, updates[0])
        expected |= self.training.masked(step)
        self.compare(step, row, expected)
        self.at, self.replayed = step.step, self.replayed + len(updates)
        self.came_out(step, before)

    def compare(self, step: Step, row: dict[str, Any], expected: dict[str, Any]) -> None:
        if not row:
            return
        for name, value in expected.items():
            if name not in row:
                if not row.get("replayed"):
                    self.found.error(name, f"step {step.step} does not say it")
            elif isinstance(value, dict):
                for part, one in value.items():
                    self.found.compare(step.step, f"{name}.{part}", row[name][part], one, self.tolerance)
            elif isinstance(value, list):
                for said, one in zip(row[name], value, strict=True):
                    self.found.compare(step.step, name, said, one, self.tolerance)
            elif isinstance(value, tuple):  # a share, which tokens at a bound may move
                low, high = value
                nearest = min(max(float(row[name]), low), high)
                self.found.compare(step.step, name, row[name], nearest, self.tolerance)
            else:
                drift = 1 + self.replayed if name == "grad_norm" else 1
                self.found.compare(step.step, name, row[name], value, drift * self.tolerance)

    def of_the_record(self, step: Step) -> dict[str, Any]:
        """What needs no weights."""
        samples = step.samples
        lengths = np.array([len(sample.tokens) for sample in samples])
        return {
            "groups": len(step.groups), "samples": len(samples),
            "reward_trained": math.fsum(sample.reward for sample in samples) / len(samples),
            "length_mean": float(lengths.mean()), "length_p95": float(np.percentile(lengths, 95)),
            "segments_mean": sum(len(sample.segments) for sample in samples) / len(samples),
            "segments_max": max(len(sample.segments) for sample in samples),
            "cut_share": sum(sample.finish == LENGTH for sample in samples) / len(samples),
        } | self.age_numbers(step)

    def age_numbers(self, step: Step) -> dict[str, Any]:
        members = [step.members(group) for group in step.groups]
        ages = np.array([step.step - 1 - min(step.samples[i].step for i in own) for own in members])
        lengths = np.array([np.mean([len(step.samples[i].tokens) for i in own]) for own in members])
        quarters = np.array_split(np.argsort(lengths, kind="stable"), 4)
        return {
            "age_mean": float(ages.mean()), "age_p95": float(np.percentile(ages, 95)), "age_max": int(ages.max()),
            "age_by_length": [float(ages[own].mean()) if len(own) else 0.0 for own in quarters],
        }

    def of_the_ended(self, step: Step) -> dict[str, Any]:
        """The headline reward: the mean over all samples of all groups that ended since the last step, flat too."""
        ended = self.files.ended.get(step.step)
        if ended is None or (self.row(step).get("replayed") and not self.files.at_once):
            return {}
        rewards = [reward for group in ended["rewards"] for reward in group]
        lengths = [length for group in ended["lengths"] for length in group]
        own = {group: [step.samples[i].reward for i in step.members(group)] for group in step.groups}
        for draw, fate, given in zip(ended["draws"], ended["fates"], ended["rewards"]):
            if fate == "T" and given != own.get(draw):
                self.found.error("ended", f"step {step.step}: group {draw} has other rewards in groups.jsonl")
            if fate == "f" and min(given) != max(given):
                self.found.error("ended", f"step {step.step}: group {draw} counts as flat, its rewards are {given}")
        return {
            "groups_ended": len(ended["draws"]), "samples_ended": len(rewards),
            "reward": math.fsum(rewards) / len(rewards),
            "flat_share": ended["fates"].count("f") / len(ended["draws"]), "length_ended": sum(lengths) / len(lengths),
        }

    def mismatch(self, step: Step, first: list[Tokens]) -> dict[str, Any]:
        """Mean |log ratio| of the tokens that the very weights of this step drew: before its first update, and only
        where the newest version is of the step before. `begun`: of answers whose turns all begin with it, too."""
        exact = self.step_of(step.version) == step.step - 1 and not self.experiments["forced_age"]
        drawn = first if exact else []
        gaps = [one.log_ratio[one.versions == step.version].abs() for one in drawn]
        begun = [gap for one, gap in zip(drawn, gaps) if one.begun == step.version]
        return {"mismatch": _mean_of(gaps), "mismatch_begun": _mean_of(begun)}

    def came_out(self, step: Step, before: dict[str, Tensor]) -> None:
        """The weights after the step, against those that the run wrote down."""
        self.keep(step.step)
        folder = self.files.checkpoints.get(step.step)
        if folder is None:
            return
        mine = self.training.tensors()
        self.training.load(folder)
        theirs = self.training.tensors()
        self.moved(step, "weights", before, mine, theirs)
        if self.training.value is not None:
            self.moved(step, "value head", before, mine, theirs)
        self.keep(step.step)

    def moved(
        self, step: Step, what: str, before: dict[str, Tensor], mine: dict[str, Tensor], theirs: dict[str, Tensor]
    ) -> None:
        """How far from theirs what we made is, as a share of the update."""
        names = [name for name in mine if name.startswith("value.") == (what == "value head")]
        moved, apart, size = (math.sqrt(sum(float(one.square().sum()) for one in parts)) for parts in (
            [mine[name] - before[name] for name in names], [mine[name] - theirs[name] for name in names],
            [theirs[name] for name in names]))
        share = max(0.0, apart - ROUNDING * size) / max(moved, 1e-12)
        self.found.done[what] += 1
        self.found.widest[what] = max(self.found.widest.get(what, 0.0), share)
        if share > UPDATE:
            self.found.error(what, f"step {step.step} moved {moved:.3g}, the checkpoint is {share:.3g} of it away")

    # -- answers --------------------------------------------------------------------------------------------------

    def answers(self, step: Step) -> None:
        for sample in step.samples:
            self.found.done["answers"] += 1
            if not sample.is_episode:
                self.end(sample.uid, sample.tokens, sample.finish, len(sample.prompt))
                self.reward(sample)
            if abs(sample.temperature - self.generation["temperature"]) > 1e-6:
                self.found.error("temperature", f"sample {sample.uid} has {sample.temperature} in the log")
            self.versions(step, sample)
        self.drawn(step)

    def end(self, uid: int, tokens: np.ndarray, finish: int, prompt: int) -> None:
        """An answer ends with its first end token, and only there; or at the limit, without one."""
        ends = [i for i, token in enumerate(tokens.tolist()) if token in self.model.ends]
        limit = self.segments["global_max_length"] or self.generation["max_new_tokens"]
        if finish == EOS and ends != [len(tokens) - 1]:
            self.found.error("end", f"sample {uid} of {len(tokens)} tokens has end tokens at {ends}")
        if finish == LENGTH and (ends or len(tokens) > limit):
            self.found.error("end", f"sample {uid} was cut after {len(tokens)} of {limit} tokens, ends at {ends}")

    def reward(self, sample: Sample) -> None:
        judged = self.prompts.reward(sample.prompt_crc, sample.tokens, sample.finish, self.model.ends)
        if sample.finish == LENGTH and self.worth["truncated"] not in ("reward", "mask"):
            judged = float(self.worth["truncated"])
        elif judged is None:
            return
        else:
            judged -= self.worth["truncated_penalty"] if sample.finish == LENGTH else 0.0
            if buffer := self.worth.get("overlong_tokens", 0):
                past = len(sample.tokens) - (self.generation["max_new_tokens"] - buffer)
                judged -= self.worth["overlong_penalty"] * min(1.0, max(0.0, past / buffer))
        self.found.done["rewards"] += 1
        if abs(judged - sample.reward) > 1e-6:
            self.found.error("reward of a sample", f"{sample.uid}: {sample.reward} in the log, recomputed {judged}")

    def versions(self, step: Step, sample: Sample) -> None:
        """Within a segment they only grow, none is newer than the newest published one."""
        begin = 0
        for length in (sample.turns[:, 2] - sample.turns[:, 1]).tolist() if sample.is_episode else sample.segments:
            part = sample.versions[begin : begin + length]
            begin += length
            if (np.diff(part) < 0).any() or part.max() > step.version:
                self.found.error("versions", f"sample {sample.uid}: {part.tolist()} with version {step.version} newest")

    def drawn(self, step: Step) -> None:
        """Each token was drawn by the weights, the temperature and the random numbers that it names. Looked at where
        all keys and values were of these weights: up to the first change of version within a segment."""
        engines = {one["engine"] for one in self.files.topology["process"] if one["role"] == "rollout"}
        if engines != {"torch"} or self.lora:
            return
        for version in sorted({version for sample in step.samples for version in sample.versions.tolist()}):
            own = [one for one in step.samples if not one.is_episode and (one.versions == version).any()]
            if not own or (weights := self.kept.get(self.step_of(version))) is None:
                continue
            logits = self.model.logits(weights, padded([np.concatenate([s.prompt, s.tokens]) for s in own])).numpy()
            for row, sample in enumerate(own):
                self.drawn_one(sample, version, logits[row, len(sample.prompt) - 1 :])

    def drawn_one(self, sample: Sample, version: int, logits: np.ndarray) -> None:
        begin, recompute = 0, self.generation["on_update"] == "recompute"
        for segment, length in enumerate(sample.segments):
            numbers = maths.uniforms(self.run["seed"], sample.uid, segment, length)
            for i in range(length):
                at, first = begin + i, sample.versions[begin]
                if sample.versions[at] != version or (first != version and not recompute):
                    continue
                self.drawn_token(sample.uid, at, logits[at], sample.temperature, numbers[i], int(sample.tokens[at]))
                scores = logits[at] / sample.temperature
                logp = scores[sample.tokens[at]] - scores.max() - math.log(np.exp(scores - scores.max()).sum())
                gap = abs(logp - sample.logprobs[at])
                self.found.done["behaviour log-prob"] += 1
                self.found.widest["behaviour log-prob"] = max(self.found.widest.get("behaviour log-prob", 0.0), gap)
                if gap > EXACT:
                    text = f"sample {sample.uid}, token {at}: {sample.logprobs[at]:.6f}, version {version} gives"
                    self.found.error("behaviour log-prob", f"{text} {logp:.6f}")
            begin += length

    def drawn_token(
        self, uid: int, at: int, logits: np.ndarray, temperature: float, number: float, token: int
    ) -> None:
        chosen, room = maths.drawn(logits, temperature, number)
        self.found.done["tokens drawn"] += 1
        if chosen != token and room > NEAR:
            text = f"sample {uid}, token {at}: {token}, its random number draws {chosen} at temperature {temperature}"
            self.found.error("tokens drawn", text)

    # -- ages -----------------------------------------------------------------------------------------------------

    def ages(self, step: Step) -> None:
        """The step that a sample's age counts from is that of its oldest version, and no group is over the bound."""
        terms = Terms.of(step, self.files.topology)
        for sample in step.samples:
            self.found.done["ages"] += 1
            begin = sample.last_begins if terms.last_segment else 0
            versions = sample.versions[sample.trained] if sample.trained.any() else sample.versions
            oldest = min(self.step_of(version) for version in versions[begin:].tolist())
            # Admitted while a version was published: its step may be read before, the version after that.
            earliest = self.step_of(sample.version) - self.learner["publish_every"]
            if not earliest <= sample.step <= oldest:
                text = f"sample {sample.uid} counts from step {sample.step} (version {sample.version})"
                self.found.error("age", f"{text}, its oldest token is of step {oldest}")
        for group in step.groups:
            age = step.step - 1 - min(step.samples[i].step for i in step.members(group))
            if terms.bound is not None and age > terms.bound:
                text = f"group {group} is {age} steps old, max_staleness is {terms.bound}"
                self.found.error("age", f"step {step.step}: {text}")

    # -- the whole run --------------------------------------------------------------------------------------------

    def fates(self) -> None:
        """Every group of the log is T in the table, and groups.jsonl names the same ends."""
        size = self.files.topology["groups"]["size"]
        for step in self.files.steps:
            for sample in step.samples:
                if self.files.fates[sample.uid : sample.uid + 1] != b"T":
                    self.found.error("fates", f"sample {sample.uid} of step {step.step} is not T")
        for number, ended in self.files.ended.items():
            for draw, fate, rewards in zip(ended["draws"], ended["fates"], ended["rewards"]):
                codes = self.files.fates[draw * 2 * size : (draw + 1) * 2 * size]
                self.found.done["fates"] += 1
                if codes.count(fate.encode()) != len(rewards):
                    text = f"group {draw} ended as {fate} with {len(rewards)} samples in step {number}, its fates are"
                    self.found.error("fates", f"{text} {codes!r}")
        self.left_unnamed(size)

    def left_unnamed(self, size: int) -> None:
        """A group that the table calls flat and no line names was in no step's reward. What ended after the last step
        of an older run has no line: that is no older than the window of that step."""
        in_order = self.files.topology["scheduler"]["policy"] == "fifo" and self.files.steps
        replayed = any(row.get("replayed") for row in self.files.rows.values())
        if not in_order or not self.files.ended or (replayed and not self.files.at_once):
            return
        named = {draw for ended in self.files.ended.values() for draw in ended["draws"]} | self.files.uncounted
        codes = np.frombuffer(self.files.fates, np.uint8)
        flat = {int(uid) // (2 * size) for uid in np.flatnonzero(codes == ord("f"))} - named
        anchor = max(self.files.steps[-1].groups) - self.files.topology["derived"]["W"]
        early = sorted(draw for draw in flat if draw < anchor)
        if early and self.files.learner_died and not self.files.at_once:
            self.found.left_out.append(f"groups {early}: set aside by a learner that died before its next step")
        elif early:
            self.found.error("fates", f"groups {early} are flat, and in no step's reward")

    def validation(self) -> None:
        """Each validated answer is drawn again at the validation temperature, and judged; then the means."""
        for row in self.files.rounds:
            name = row.get("set", "")
            own = [
                one for one in self.files.validation if one["round"] == row["round"] and one.get("set", "") == name
            ]
            spread = sorted({one["version"] for one in own} | {one["oldest"] for one in own})
            self.found.done["validation rounds"] += 1
            name = f"round {row['round']}{f' of {name}' if name else ''}"
            if own and abs(row["val/reward"] - self.mean_of_prompts(own)) > 1e-9:
                self.found.error("validation", f"{name}: {row['val/reward']} is not the mean of its prompts' means")
            if bool(row["mixed"]) != (len(spread) > 1):
                self.found.error("validation", f"{name} says mixed {row['mixed']}, its versions are {spread}")
        for one in self.files.validation:
            self.validated(one)

    def mean_of_prompts(self, own: list[dict[str, Any]]) -> float:
        of_line: dict[bytes | None, list[float]] = {}
        for one in own:
            of_line.setdefault(self.prompts.validation_line(one, self.files.topology), []).append(one["reward"])
        return sum(sum(rewards) / len(rewards) for rewards in of_line.values()) / len(of_line)

    def validated(self, one: dict[str, Any]) -> None:
        weights = self.kept.get(self.step_of(one["version"])) if one["version"] == one["oldest"] else None
        line = self.prompts.validation_line(one, self.files.topology)
        if weights is None or line is None or self.lora:
            return
        prompt = self.prompts.ids(line)
        asked, _ = asked_set(one, self.files.topology)
        if asked["top_p"] < 1 or asked["max_new_tokens"] < self.files.topology["generation"]["max_new_tokens"]:
            return
        tokens, near = self.again(weights, prompt, one["uid"], asked["temperature"])
        if near:
            return
        finish = EOS if tokens[-1] in self.model.ends else LENGTH
        judged = self.prompts.judge(line, np.array(tokens), finish, self.model.ends)
        self.found.done["validation samples"] += 1
        if len(tokens) != one["tokens"] or (judged is not None and judged != one["reward"]):
            text = f"sample {one['uid'] - VALIDATE} of version {one['version']}: {one['tokens']} tokens, reward"
            self.found.error("validation", f"{text} {one['reward']}; drawn again {len(tokens)} and {judged}")

    def again(
        self, weights: dict[str, Tensor], prompt: list[int], uid: int, temperature: float
    ) -> tuple[list[int], bool]:
        """The answer that these weights draw, and whether a random number was too close to an edge to be sure."""
        limit = self.generation["max_new_tokens"]
        numbers, tokens, near = maths.uniforms(self.run["seed"], uid, 0, limit), [], False
        for number in numbers:
            logits = self.model.logits(weights, torch.tensor([[*prompt, *tokens]]))[0, -1].numpy()
            token, room = maths.drawn(logits, temperature, float(number))
            near |= room < NEAR
            tokens.append(token)
            if token in self.model.ends:
                break
        return tokens, near


def _mean_of(parts: list[Tensor]) -> float | None:
    return float(torch.cat(parts).mean()) if sum(map(len, parts)) else None


def _newest_before(files: RunFiles) -> list[tuple[int, int]]:
    """For each step the newest version before it: by its record, or by what the step before it said."""
    live = {step: row for step, row in files.rows.items() if "version" in row and not row.get("replayed")}
    found = {1: 0} | {step + 1: int(row["version"]) for step, row in live.items()}
    return sorted((found | {step.step: step.version for step in files.steps}).items())


class _Prompts:
    """Lines of the data files by their checksum, and what an answer to one is worth where that is an exact match."""

    def __init__(self, topology: dict[str, Any]) -> None:
        from transformers import AutoTokenizer

        self.topology, self.data, self.settings = topology, topology["data"], topology["reward"]
        self.train = _read_lines(Path(self.data["train"]))
        self.held_out = _read_lines(Path(topology["validation"]["data"] or self.data["train"]))
        self.of_set: dict[str, list[bytes]] = {}
        self.by_crc = {zlib.crc32(line): line for line in (*self.train, *self.held_out)}
        self.tokenizer = AutoTokenizer.from_pretrained(topology["model"]["path"], local_files_only=True)

    def reward(self, crc: int, tokens: np.ndarray, finish: int, ends: set[int]) -> float | None:
        line = self.by_crc.get(crc)
        return None if line is None else self.judge(line, tokens, finish, ends)

    def judge(self, line: bytes, tokens: np.ndarray, finish: int, ends: set[int]) -> float | None:
        """None if the reward is not an exact match."""
        if self.settings["kind"] != "exact_match":
            return None
        ids = tokens.tolist()
        if finish == EOS and ids[-1] in ends:
            ids = ids[:-1]
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        right = str(json.loads(line)[self.settings["answer_key"] or self.data["answer_key"]]).strip()
        if not self.settings["extract"]:
            return float(text.strip() == right)
        found = list(re.finditer(self.settings["extract"], text))
        if not found:
            return 0.0
        if found[-1].re.groups:
            return float((found[-1].group(1) or "").strip() == right)
        last = next((one for one in reversed(found) if one.group()), found[0])
        return float(text[last.end() :].strip() == right)

    def ids(self, line: bytes) -> list[int]:
        """The prompt's token ids, where it stands as it is."""
        return [int(one) for one in self.tokenizer.encode(json.loads(line)[self.data["prompt_key"]])]

    def validation_line(self, one: dict[str, Any], topology: dict[str, Any]) -> bytes | None:
        """The prompt of a validated sample; None where a template would have to be applied to it."""
        if self.data["template"] != "none":
            return None
        asked, place = asked_set(one, topology)
        name, held_out = asked["name"], self.held_out
        if name:
            held_out = self.of_set[name] = self.of_set.get(name) or _read_lines(Path(asked["data"]))
        samples, lines = asked["prompts"], len(held_out)
        place //= asked["k"]
        if samples >= lines:
            return held_out[place % lines]
        edges = np.arange(samples + 1) * lines // samples  # one line of each of so many equal stretches
        return held_out[int(np.random.Generator(np.random.PCG64(0)).integers(edges[:-1], edges[1:])[place])]


def asked_set(one: dict[str, Any], topology: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The set of validation that a sample is of, and its place in a round of it."""
    answers, own = topology["derived"]["val_samples"], topology["validation"]
    only = {
        "name": "", "prompts": answers, "k": 1, "first": 0, "temperature": own["temperature"], "top_p": 1.0,
        "max_new_tokens": topology["generation"]["max_new_tokens"],
    }
    place = (one["uid"] - VALIDATE) % answers
    asked = [one for one in topology["derived"].get("sets") or [only] if one["first"] <= place][-1]
    return asked, place - asked["first"]


def _read_lines(path: Path) -> list[bytes]:
    return path.read_bytes().removesuffix(b"\n").split(b"\n") if path.exists() else []
