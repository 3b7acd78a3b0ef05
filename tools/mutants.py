"""Plants mistakes in a copy of the tree, one after the other, and runs the tests that must fail for each.

`python tools/mutants.py [NAME...]`: all, or those whose name contains a word. A mistake that no test notices fails the
program, and so does one whose text is no longer in the code exactly once: the list is kept current with the code.
"""

# ruff: noqa: E501
from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEPS, ANSWERS = "tests/oracle/test_oracle_steps.py", "tests/oracle/test_oracle_answers.py"
WHOLE_RUN = "tests/run/test_oracle_run.py::test_every_number_of_a_run_follows_from_its_log_and_weights"
PLANTED = "tests/ledger/test_ledger_audit_planted.py"
PARTS = "tests/rewards/test_parts.py"
LIMIT_S = 400.0
EACH_S = 60.0  # of the run without a mistake, which has the tests of all


@dataclass(frozen=True)
class Mutant:
    """`old` stands once in `file`; with `new` in its place one of `tests` (pytest arguments) has to fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def fault(self, root: Path = ROOT) -> str:
        """Why it can not be planted; empty if it can."""
        path = root / self.file
        count = path.read_text().count(self.old) if path.exists() else 0
        return "" if count == 1 else f"{self.name}: its text stands {count} times in {self.file}; it must stand once"


def of_step(name: str) -> tuple[str, ...]:
    return (f"{STEPS}::test_the_numbers_of_a_step_are_those_that_log_and_weights_give[{name}]",)


def streamed(name: str) -> tuple[str, ...]:
    return (f"tests/roles/test_training_step.py::{STREAMED}[{name}]",)


STREAMED = "test_every_algorithm_makes_the_same_step_streamed_or_from_the_log"
VECTORS = ("tests/algorithms/test_loss_vectors.py",)
PPO, TWO, THREE = of_step("ppo_clip"), of_step("decoupled in two mini-batches"), of_step("ppo_clip in three mini-batches")
AGAIN = (f"{STEPS}::test_a_learner_that_starts_again_goes_on_with_the_very_numbers",)
DRAWN = (f"{ANSWERS}::test_each_token_is_the_one_that_its_random_number_draws",)
ENDS = (f"{ANSWERS}::test_every_end_token_of_the_generation_config_ends_an_answer",)
RUN = (WHOLE_RUN,)
TEMPLATE, FORKS, FORKED = "busrl/system/template.py", ("tests/launcher/test_forks.py",), ("tests/system/test_template.py",)
RANKS, TEAM = ("tests/training/test_ranks.py",), "tests/training/test_team.py"
TEACHERS = ("tests/teachers/test_teachers.py",)
RANK_READS = ("tests/training/test_team_options.py::test_reference_and_teacher_of_a_rank_have_the_draws_temperature",)
HEAD = "busrl/training/head.py"
OPTIMIZERS, OPTIMISER_TESTS = "busrl/training/optimizers.py", ("tests/training/test_optimizers.py",)
ADVANTAGES, LOSSES = "busrl/algorithms/advantages.py", "busrl/algorithms/losses.py"
DIAGNOSTICS, TRAINER = "busrl/algorithms/diagnostics.py", "busrl/training/trainer.py"
EXTENDING = tuple(f"tests/examples/test_extending.py::test_a_{name}" for name in (
    "function_breaking_its_contract_is_refused_with_name_and_remedy",
    "loss_over_all_samples_is_held_back_unless_declared_streamable"))
VALUES, VALUE_TESTS = "busrl/algorithms/gae.py", ("tests/algorithms/test_gae.py",)
HEAD_TESTS = (
    "tests/roles/test_training_step.py::test_a_value_head_step_gradient_matches_the_plain_formulas",)
REPLAY, REPLAYED = "busrl/routes/replay.py", "tests/training/test_route_replay.py"
CAPTURE = "busrl/engines/vllm/capture.py"
CAPTURED = ("tests/engines/test_vllm_capture.py::test_every_position_has_the_route_that_it_was_first_computed_with",)
EPISODES = ("tests/roles/test_episode_steps.py",)
BY_HAND = ("tests/roles/test_step_by_hand.py",)
REFERRED = ("tests/roles/test_training_step.py::test_a_reference_reads_whole_answers_at_the_temperature_of_their_draw",)
TERMS, BUILDER = "busrl/algorithms/terms.py", "busrl/ranks/builder.py"
AT_ONE = "__import__('dataclasses').replace(flat, temperature=None)"  # of what is scored
STEP, METRICS = "busrl/roles/learner/step.py", "busrl/roles/learner/metrics.py"
ROLLOUT, LEARNER, VALIDATOR = "busrl/roles/rollout.py", "busrl/roles/learner/loop.py", "busrl/roles/validator.py"
SAMPLES_OF, OF_STEPS = "busrl/roles/learner/samples.py", "busrl/roles/learner/advantages.py"
MODELS, TALLY = "busrl/roles/learner/models.py", "busrl/training/step_stats.py"
LEARNING_RATE = "busrl/scheduling/learning_rate.py"
STATE = "busrl/training/state.py"
SCORER = "busrl/training/scorer.py"
FIGURES = "busrl/data/figures.py"
GROUPS, SEGMENTS = "busrl/roles/learner/groups.py", "busrl/roles/answers.py"
ENGINE, SAMPLING = "busrl/engines/torch/engine.py", "busrl/engines/torch/engine.py"

PREFIX, PREFIXES = "busrl/engines/torch/prefix.py", "tests/engines/test_prefix.py"
TREES = f"{PREFIXES}::test_every_answer_of_a_random_turn_tree_matches_a_plain_forward_pass"
SKIPS = ("tests/scheduling/test_pass_rates.py",)
SET_ASIDE = "test_groups_that_a_dead_learner_set_aside_are_counted_once"
MUTANTS = (
    # -- what an engine draws
    Mutant("a rollout asks for temperature 1 whatever the slot says", "busrl/roles/intake.py",
           'cut.tokens, temperature=line["temperature"],', "cut.tokens, temperature=1.0,", RUN),
    Mutant("the engine samples at temperature 1", ENGINE,
           "inverse = 1.0 / np.where(greedy, 1.0, temperature)", "inverse = np.ones_like(temperature)", DRAWN),
    Mutant("the engine draws at temperature 1 and tells log-probabilities of the slot's", SAMPLING,
           "cdf = logprobs.double()", "cdf = torch.log_softmax(logits.float(), dim=-1).double()", DRAWN),
    Mutant("log-probabilities are told before the temperature", SAMPLING,
           "chosen = logprobs.gather(-1, tokens)", "chosen = logits.float().log_softmax(-1).gather(-1, tokens)", DRAWN),
    Mutant("all segments draw from one stream", "busrl/engines/base.py",
           "[0, 0, segment & _MASK, 0]", "[0, 0, 0, 0]", DRAWN),
    Mutant("the seed of the run is not used", "busrl/engines/base.py",
           "[uid & _MASK, seed & _MASK]", "[uid & _MASK, 0]", DRAWN),
    Mutant("only the tokenizer's end token ends an answer", "busrl/engines/tokens.py",
           "for source in sources)", "for source in sources[-1:])", ENDS),
    Mutant("an end token is told as a cut", "busrl/engines/torch/engine.py",
           "Finish.EOS if stopped else Finish.LENGTH", "Finish.LENGTH if stopped else Finish.EOS", ENDS),
    Mutant("tokens carry the version before theirs", ENGINE,
           "ended = seats.record(running, sampled, measured, self.version)",
           "ended = seats.record(running, sampled, measured, max(0, self.version - 1))", RUN),
    Mutant("all tokens of a segment carry the version of its end", SEGMENTS,
           "sampled.logprobs, sampled.versions,", "sampled.logprobs, 0 * sampled.versions + sampled.versions[-1],", RUN),
    # -- rows that are kept
    Mutant("a row is continued by ids that differ in one place", PREFIX,
           "beginning[-1] and bool(np.array_equal(ids[:count], beginning))", "beginning[-1]", (
               f"{PREFIXES}::test_a_row_matches_by_all_its_ids_and_recomputes_after_one_change",)),
    Mutant("a row of the weights before is continued", ENGINE, "        self._kept.clear()\n", "", (
        f"{PREFIXES}::test_recomputed_caches_reuse_no_row_of_an_older_version",)),
    Mutant("a row is given away that somebody waits for", PREFIX, "self._at.values() if not kept.waiting]\n        oldest",
           "self._at.values()]\n        oldest", (TREES,)),
    Mutant("a row is taken away from others that wait for it", PREFIX, "kept.waiting == 1:", "kept.waiting >= 1:",
           (f"{PREFIXES}::test_concurrent_answers_and_forks_share_a_row_and_a_later_fork_recomputes",)),
    Mutant("what is kept in a hole is forgotten when rows are closed up", ENGINE,
           "*self._kept.closed_up(sources, targets)", "*[]", (TREES,)),
    # -- ages
    Mutant("a group is as old as its newest member", METRICS,
           "ages = np.array([record.step - 1 - min(", "ages = np.array([record.step - 1 - max(", PPO),
    Mutant("an age is one step too much", METRICS,
           "ages = np.array([record.step - 1 - min(", "ages = np.array([record.step - min(", PPO),
    Mutant("an answer is as old as its last version", SEGMENTS,
           "int(sampled.versions.min())", "int(sampled.versions[-1])", RUN),
    Mutant("the audit takes the newest member", "busrl/ledger/audit/rules.py",
           "min(least.get(sample.group, sample.step), sample.step)",
           "max(least.get(sample.group, sample.step), sample.step)",
           (f"{PLANTED}::test_the_age_of_a_group_is_that_of_its_oldest_member",)),
    Mutant("the audit allows one step more", "busrl/ledger/audit/rules.py",
           "age <= term.bound:", "age <= term.bound + 1:", (f"{PLANTED}::test_a_group_one_step_above_the_bound_is_found",)),
    Mutant("the audit forgets the bound under which a group was admitted", "busrl/ledger/audit/rules.py",
           "self._timeline.during(first, step - 1)", "self._timeline.during(step - 1, step - 1)",
           ("tests/ledger/test_ledger_audit_inforce.py",)),
    Mutant("the audit takes the last version of an answer", "busrl/ledger/audit/rules.py",
           "step_of(int(versions.min()))", "step_of(int(versions[-1]))",
           (f"{PLANTED}::test_a_sample_that_counts_its_age_from_too_late_is_found",)),
    Mutant("only the first token that is too old is left out", SAMPLES_OF,
           "int(late[-1]) + 1 if", "int(late[0]) + 1 if", of_step("tokens that are too old")),
    Mutant("the bound on age is one step wider", "busrl/scheduling/admission.py",
           "> bound\n        return above", "> bound + 1\n        return above", ("tests/scheduling/test_plan.py",)),
    Mutant("a step may leave groups above the bound behind", "busrl/scheduling/admission.py",
           "self.too_old(oldest_step, step + 1)", "self.too_old(oldest_step, step)", ("tests/scheduling/test_plan.py",)),
    Mutant("a group in the ring is as old as its newest member", "busrl/scheduling/groups.py",
           "np.minimum.at(least,", "np.maximum.at(least,", ("tests/scheduling/test_groups.py",)),
    Mutant("more groups are admitted than the bound allows", "busrl/scheduling/admission.py",
           "total = (staleness + 1) * n_lo + 1", "total = (staleness + 1) * n_lo + 2",
           ("tests/scheduling/test_limits_credit.py",)),
    Mutant("an answer of older weights looks fresh", SEGMENTS,
           "sampled.versions.min())) < version:", "sampled.versions.min())) > version:",
           ("tests/hosts/test_gateway_ring.py",)),
    Mutant("the version is read before its step", "busrl/roles/scheduler.py",
           '"step": ring.header(HeaderWord.VERSION_STEP), "version": ring.header(HeaderWord.VERSION),',
           '"version": ring.header(HeaderWord.VERSION), "step": ring.header(HeaderWord.VERSION_STEP),',
           (f"{ANSWERS}::test_a_sample_admitted_during_a_publication_never_looks_younger",)),
    # -- several seats and models
    Mutant("an unused seat closes its group", "busrl/scheduling/groups.py",
           "_CLOSES[[NONE, DISPATCHED, UNUSED, *ACCIDENTS]] = False", "_CLOSES[[NONE, DISPATCHED, *ACCIDENTS]] = False",
           ("tests/scheduling/test_groups.py",)),
    Mutant("B has no room for the last draw of a step", "busrl/scheduling/admission.py",
           "_admitted(low, high + seats - 1, max_staleness, window)", "_admitted(low, high, max_staleness, window)",
           ("tests/scheduling/test_limits_credit.py",)),
    Mutant("the lead side is opened first", "busrl/several/draws.py",
           "-(group % seats)", "(group % seats)", ("tests/several/test_opening.py",)),
    Mutant("the lead side does not wait for the others", "busrl/several/opening.py",
           "return bool(self._stand(books, draw).all())", "return True", ("tests/several/test_opening.py",)),
    Mutant("a member of the lead side does not wait for the others", "busrl/several/opening.py",
           "ready = self._ready(books, first, members) if _is_lead(books, book, first.draw) else members", "ready = members",
           ("tests/several/test_opening.py",)),
    Mutant("the lead side waits for a group that is over", "busrl/several/draws.py",
           "return there | is_closed(codes)", "return there", ("tests/several/test_opening.py",)),
    Mutant("a token of a version to come is no fault", "busrl/ledger/audit/rules.py",
           '"<u4").max()) > step.version', '"<u4").max()) > step.version + 9', ("tests/ledger/test_ledger_audit_seats.py",)),
    # -- rewards
    Mutant("the reward of a step leaves out flat groups", METRICS,
           "        self.ended.add_line(line)\n        row:", "        self.ended = Ended()\n        self.ended.add_line(line)\n        row:",
           PPO),
    Mutant("rewards of groups set aside are forgotten", METRICS,
           "        self._write_groups(line)\n        self.ended.add_line(line)\n", "        self._write_groups(line)\n", PPO),
    Mutant("rewards of groups that a dead learner set aside are forgotten", METRICS,
           "                self.ended.join(ended)\n", "                pass\n", (f"{STEPS}::{SET_ASIDE}",)),
    Mutant("a group whose drop was cut short is counted twice", METRICS,
           "            self._known[line.draws[0]] = None\n", "", (f"{STEPS}::{SET_ASIDE}",)),
    Mutant("a flat group is not told to the metrics", LEARNER,
           "        self.metrics.set_aside(", "        (lambda *told: None)(", RUN),
    Mutant("flat groups are counted against the trained ones alone", METRICS,
           'self.fates[Fate.FLAT.letter] / self.groups',
           'self.fates[Fate.FLAT.letter] / self.fates[Fate.TRAINED.letter]', PPO),
    Mutant("fates of flat and of old groups are swapped", "busrl/scheduling/trigger.py",
           'else Fate.FLAT if flat[i] else Fate.OLD', 'else Fate.OLD if flat[i] else Fate.FLAT',
           ("tests/scheduling/test_plan.py",)),
    Mutant("the penalty of a cut answer is added", GROUPS,
           'lines["reward"] - penalty', 'lines["reward"] + penalty', ("tests/roles/test_overlong_shaping.py",)),
    Mutant("answers that ended by themselves are worth less", GROUPS,
           '(lines["finish"] == Finish.LENGTH)', '(lines["finish"] != Finish.LENGTH)', ("tests/roles/test_overlong_shaping.py",)),
    Mutant("the learner trains what the judge said of cut answers", GROUPS,
           "self.lines = shaped(lines, self._reward, self._limit)", "self.lines = lines", RUN),
    Mutant("validation is worth less where it is cut", GROUPS,
           '(state == State.TRAINING)) & (lines["cls"] == SampleClass.TRAIN)', "(state == State.TRAINING))",
           ("tests/roles/test_overlong_shaping.py",)),
    # -- advantages and losses
    Mutant("n instead of n - 1 under the root", ADVANTAGES, "centred.std(correction=1)", "centred.std(correction=0)", PPO),
    Mutant("a larger epsilon beside the standard deviation", ADVANTAGES, "EPS = 1e-6", "EPS = 1e-3", PPO),
    Mutant("the mean alone divides nothing", ADVANTAGES, '"group_mean": group_mean', '"group_mean": group_std', THREE),
    Mutant("advantages over all groups together", OF_STEPS,
           "groupby(records, key=lambda record: record.group)", "groupby(records, key=lambda record: 0)", PPO),
    Mutant("a group is split in two before its advantages", OF_STEPS,
           "groupby(records, key=lambda record: record.group)",
           "groupby(records, key=lambda record: (record.group, record.member % 2))", PPO),
    Mutant("a micro-batch weighs its samples by its own tokens", TRAINER,
           "advantages.of(part), version)",
           "__import__('dataclasses').replace(advantages.of(part), weights=advantages.weights and [1 / sum(len(samples[i].token_ids) for i in part)] * len(part)), version)",
           streamed("seq-mean-token-mean")),
    Mutant("the clip bounds are swapped", LOSSES,
           "1.0 - settings.clip_low, 1.0 + settings.clip_high", "1.0 - settings.clip_high, 1.0 + settings.clip_low", PPO),
    Mutant("no dual clip", LOSSES,
           "torch.where(advantages < 0, torch.minimum(loss, -settings.dual_clip * advantages), loss)", "loss", PPO),
    Mutant("the dual clip bounds the wrong side", LOSSES,
           "torch.where(advantages < 0, torch.minimum(", "torch.where(advantages > 0, torch.minimum(", PPO),
    Mutant("a tighter clamp of the log-ratio", LOSSES, "LOG_RATIO_BOUND = 20.0", "LOG_RATIO_BOUND = 1.0", PPO),
    Mutant("the importance weight has no cap", LOSSES, "return ratio.clamp(max=settings.tis_cap)", "return ratio", TWO),
    Mutant("the importance weight is upside down", LOSSES,
           "ratio = log_ratio(inputs.proximal_logprobs.detach(), inputs.behaviour_logprobs)",
           "ratio = log_ratio(inputs.behaviour_logprobs, inputs.proximal_logprobs.detach())", TWO),
    Mutant("ppo_clip against the proximal policy", LOSSES,
           'proximal = settings.ratio == "proximal"', "proximal = True", PPO),
    Mutant("the proximal policy of a later mini-batch is the present one", STEP,
           "self.trainer.accumulate(samples, advantages, version)",
           "self.trainer.accumulate(samples, replace(advantages, proximal=None), version)", TWO),
    Mutant("the proximal policy is scored again for each mini-batch", STEP,
           "self.trainer.accumulate(samples, advantages, version)",
           "self.trainer.accumulate(samples, replace(advantages, proximal=advantages.proximal and self.trainer.score(samples)), version)",
           TWO),
    Mutant("the last segment alone is trained under every loss", SAMPLES_OF,
           "record.earlier if last_only else 0", "record.earlier", TWO),
    Mutant("last_segment trains all segments", SAMPLES_OF,
           "record.earlier if last_only else 0", "0", of_step("the last segment")),
    Mutant("pois keeps its ratios", SCORER,
           "if self.settings.ratio_one:", "if False:", of_step("pois")),
    Mutant("the learner ignores the temperature", HEAD,
           "_divide(token_rows.mask(logits), temperature, part)\n            wanted", "token_rows.mask(logits)\n            wanted", PPO),
    Mutant("the learner multiplies by the temperature", HEAD,
           "rows.div_(temperature[part, None])", "rows.mul_(temperature[part, None])", PPO),
    Mutant("the temperature is left out in backward", HEAD, "_divide(change, temperature, part)", "pass", PPO),
    Mutant("mean over sequences", TRAINER, "divisor = (denominator or tokens) * scale", "divisor = self._sequences * scale", PPO),
    Mutant("the denominator is that of the last part of a step", STEP,
           "self._denominator += denominator", "self._denominator = denominator", streamed("seq-mean-token-mean")),
    Mutant("a sample is weighted by the tokens of its group", ADVANTAGES,
           "return [1 / count for count in tokens], float(len(tokens))",
           "return [1 / sum(tokens) for count in tokens], float(len(tokens))", VECTORS),
    Mutant("batch_std forgets its division where it is streamed", STEP,
           "scale = formulas.batch_scale(self._centred) if self._centred else 1.0", "scale = 1.0",
           streamed("batch_std, ppo_clip")),
    Mutant("the weight of CISPO has a gradient", LOSSES,
           "ratio_of(inputs, settings).detach().clamp(max=settings.cispo_cap)",
           "ratio_of(inputs, settings).clamp(max=settings.cispo_cap)", VECTORS),
    Mutant("a bad answer is bounded on the wrong side", LOSSES,
           "return torch.maximum(-ratio * advantages, -ratio.clamp(low, high) * advantages)",
           "return torch.minimum(-ratio * advantages, -ratio.clamp(low, high) * advantages)", VECTORS),
    Mutant("the mean of a sample is over all of its tokens", LOSSES,
           "return total / inputs.lengths.clamp(min=1)[inputs.samples]",
           "return total / inputs.samples.bincount()[inputs.samples]", VECTORS),
    Mutant("gradients of several micro-batches are summed in bfloat16", "busrl/training/model.py",
           "master.grad.add_(gradient)", "master.grad.copy_(master.grad.to(gradient.dtype) + gradient)",
           ("tests/training/test_precision.py",)),
    Mutant("parameters are not rounded after an update", STATE,
           "        self.optimizer.step()\n        self.round()\n", "        self.optimizer.step()\n", ("tests/training/test_precision.py",)),
    Mutant("layers are computed again in evaluation mode, which is not at all", "busrl/training/forward.py",
           "    model.train()\n", "", ("tests/training/test_activations.py",)),
    Mutant("what is not to be trained is trained", "busrl/training/model.py",
           "            parameter.requires_grad_(False)\n", "            pass\n", ("tests/training/test_train_layers.py",)),
    Mutant("ranks train what is not to be trained", "busrl/ranks/builder.py",
           "            train_only(model, settings.train_layers)\n", "            pass\n", ("tests/training/test_ranks.py",)),
    Mutant("a checkpoint of other layers is continued", OPTIMIZERS,
           "    if trained_parameters.chosen(before, names)[0] != trained_parameters.chosen(text, names)[0]:",
           "    if False:",
           ("tests/training/test_train_layers.py",)),
    Mutant("a range of layers ends before its last", "busrl/algorithms/trained_parameters.py",
           "self.first <= int(number[1]) <= self.last", "self.first <= int(number[1]) < self.last",
           ("tests/training/test_train_layers.py",)),
    Mutant("a sum of memory without the states of the optimiser", "busrl/preflight/memory.py",
           "int(states * trained.parameters * part)", "0", ("tests/preflight/test_learner_memory.py",)),
    Mutant("dropout of the model while layers are computed again", "busrl/training/forward.py",
           "    silence_chance(model)\n", "", ("tests/training/test_activations.py",)),
    Mutant("positions of joined rows go on behind a border", "busrl/training/batch.py",
           "torch.from_numpy(numbered(lengths))", "torch.arange(int(lengths.sum()))",
           ("tests/training/test_activations.py",)),
    Mutant("log-probabilities of the token before", "busrl/training/batch.py",
           "np.concatenate([sample.behaviour_logprobs for sample in samples]), dtype)",
           "np.roll(np.concatenate([sample.behaviour_logprobs for sample in samples]), 1), dtype)", PPO),
    Mutant("the logits are taken one position late", "busrl/training/batch.py",
           "np.repeat(spans[:, 0], counts) - 1\n", "np.repeat(spans[:, 0], counts)\n",
           ("tests/training/test_trainer_gradient.py",)),
    # -- the update
    Mutant("no weight decay", OPTIMIZERS,
           '"weight_decay": settings["weight_decay"]}', '"weight_decay": 0.0}', PPO),
    Mutant("norms are decayed", OPTIMIZERS,
           'if p.ndim < 2], "weight_decay": 0.0}', 'if p.ndim < 2], "weight_decay": settings["weight_decay"]}', PPO),
    Mutant("the betas are swapped", OPTIMIZERS, 'betas=adam["betas"]', 'betas=adam["betas"][::-1]', TWO),
    Mutant("the topology's eps is not used", OPTIMIZERS, 'eps=adam["eps"]', "eps=1e-8", THREE),
    Mutant("the states of another optimiser are read", OPTIMIZERS, "if before != name:", "if False:", OPTIMISER_TESTS),
    Mutant("the optimiser's settings of the checkpoint win", OPTIMIZERS,
           "group.update(present)", "pass", OPTIMISER_TESTS),
    Mutant("an optimiser that ignores the rate is taken", OPTIMIZERS,
           "_update(target, first, 0.0, 1)", "pass", OPTIMISER_TESTS),
    Mutant("only the first part of the parameters gets the learning rate", STATE,
           "for group in self.optimizer.param_groups:\n            group[\"lr\"] = lr",
           "for group in self.optimizer.param_groups[:1]:\n            group[\"lr\"] = lr", PPO),
    Mutant("the gradient is not clipped", TRAINER, "    if norm > limit:", "    if False:", PPO),
    Mutant("the gradient is always scaled to the limit", TRAINER, "    if norm > limit:", "    if True:", THREE),
    Mutant("a gradient is the mean of the ranks", "busrl/ranks/mesh.py",
           "module.set_gradient_divide_factor(1.0)", "pass", ("tests/training/test_ranks.py",)),
    Mutant("a rank divides by its own tokens", TRAINER,
           "(tokens,) = sharded.added([self.tally.tokens / self._copies], self.parameters)", "tokens = self.tally.tokens",
           ("tests/training/test_ranks.py",)),
    Mutant("the sum of ranks is not forced", "busrl/ranks/mesh.py",
           "module.set_force_sum_reduction_for_comms(True)", "pass", RANKS),
    Mutant("a rank adds the mean of its micro-batch", TRAINER,
           "total = trained.sum()", "total = trained.mean()",
           (f"{TEAM}::test_a_team_trains_scores_publishes_and_saves_as_one_rank_does",)),
    Mutant("a rank without work counts as a sequence", TRAINER,
           "nothing = self.scorer.idle()",
           "self.tally._sequences += 1\n        nothing = self.scorer.idle()",
           ("tests/training/test_team_options.py::test_an_adapter_and_a_reference_over_ranks_are_those_of_one",)),
    Mutant("a rank updates the value head by its own samples", "busrl/training/sharded.py",
           "        dist.all_reduce(tensor.grad)\n", "",
           ("tests/training/test_team_options.py::test_a_value_head_over_ranks_is_that_of_one",)),
    Mutant("an update does not wait for a checkpoint that is being written", STATE,
           "            self.saving.stage()", "            pass",
           ("tests/training/test_shards.py::test_an_update_first_copies_what_is_not_on_disk_yet",)),
    Mutant("a rank reads the rows of a shard from its beginning", "busrl/training/shard_files.py",
           "piece[_from(shared, begin)]", "piece[_from(shared, [0] * len(begin))]",
           ("tests/training/test_shards.py::test_any_number_of_ranks_reads_what_any_number_wrote",)),
    Mutant("a checkpoint without the file of a rank is read", "busrl/training/shard_files.py",
           "if worlds != {len(paths)}:", "if not worlds:",
           ("tests/training/test_shards.py::test_the_file_of_a_rank_that_is_missing_is_told",)),
    Mutant("the optimiser's states go to other parameters", STATE,
           "numbers[name]: self._as_kept(read(tree, trained[name]))", "len(numbers) - 1 - numbers[name]: self._as_kept(read(tree, trained[name]))",
           ("tests/training/test_shards.py::test_training_goes_on_beside_and_from_it_bit_for_bit",)),
    Mutant("a rank gets the old log-probabilities in another order", "busrl/ranks/follower.py",
           "np.frombuffer(row, np.float32) for row in work.proximal]",
           "np.frombuffer(row, np.float32)[::-1].copy() for row in work.proximal]",
           (f"{TEAM}::test_an_update_with_the_old_log_probabilities_is_that_of_one_rank",)),
    Mutant("a rank gets the old log-probabilities of another one's samples", "busrl/ranks/leader.py",
           "advantages.of(share), version))",
           "__import__('dataclasses').replace(advantages.of(share), proximal=advantages.proximal and advantages.proximal[: len(share)]), version))",
           (f"{TEAM}::test_an_update_with_the_old_log_probabilities_is_that_of_one_rank",)),
    Mutant("a rank reads the first rows of every tensor", "busrl/training/sharded.py",
           "slice(at, at + size) for at, size", "slice(0, size) for _, size", RANKS),
    Mutant("a rank trains as if all samples weighed the same", "busrl/ranks/follower.py",
           "Advantages(work.advantages, work.weights, before, chosen, valued)", "Advantages(work.advantages, None, before, chosen, valued)",
           (f"{TEAM}::test_a_team_trains_scores_publishes_and_saves_as_one_rank_does",)),
    Mutant("the norm is told after clipping", TRAINER,
           "stats = self.tally.stats(norm,", "stats = self.tally.stats(min(norm, self.settings.max_grad_norm),", PPO),
    Mutant("warm-up does not count the step itself", LEARNING_RATE,
           "self.warmup(trained + groups)", "self.warmup(trained)", PPO),
    Mutant("the fall counts the step itself", LEARNING_RATE, "self.left(trained)", "self.left(trained + groups)", PPO),
    Mutant("the fall begins before the warm-up ends", LEARNING_RATE, "max(seen - self.warmup_groups, 0)", "seen", PPO),
    Mutant("linear coupling of the rate to the groups", LEARNING_RATE,
           "math.sqrt(groups / self.n_min)", "groups / self.n_min", TWO),
    Mutant("the rate is that of a mini-batch", STEP,
           "rate = self.schedule(self.groups, groups)", "rate = self.schedule(self.groups, groups // updates)", TWO),
    Mutant("the groups of a step are not counted", STEP,
           "        self.groups += groups\n", "", PPO),
    # -- what is told
    Mutant("mismatch of the version before", TRAINER,
           "torch.from_numpy(flat.policy_versions == version)", "torch.from_numpy(flat.policy_versions == version - 1)", PPO),
    Mutant("mismatch of all older versions", TRAINER,
           "torch.from_numpy(flat.policy_versions == version)", "torch.from_numpy(flat.policy_versions <= version)", PPO),
    Mutant("mismatch of a second mini-batch too", STEP,
           "None if number else version", "version", TWO),
    Mutant("the learner compares with the version before", "busrl/roles/learner/publish.py",
           "return self.version if self.ring.header", "return self.version - 1 if self.ring.header", RUN),
    Mutant("the learner compares with a version of other weights", "busrl/roles/learner/publish.py",
           'self.version if self.ring.header(HeaderWord.VERSION_STEP) == step else None',
           "self.version",
           (f"{ANSWERS}::test_a_version_is_present_only_if_published_after_the_newest_step",)),
    Mutant("answers that ended with these weights count as begun with them", TRAINER,
           "flat.begun(version)", "torch.from_numpy(flat.policy_versions == version).to(self._device)", PPO),
    Mutant("k3 of the other direction", DIAGNOSTICS,
           "ratio - 1 - difference, ratio,", "1 / ratio - 1 + difference, ratio,", PPO),
    Mutant("ess without the square", DIAGNOSTICS,
           'value["weight"] ** 2 / weights', 'value["weight"] / weights', PPO),
    Mutant("clip shares of the wrong sign", DIAGNOSTICS,
           "rows += [falling & (ratio < low), rising & (ratio > high),",
           "rows += [rising & (ratio < low), falling & (ratio > high),", PPO),
    Mutant("metrics of the last mini-batch alone", "busrl/training/step_stats.py",
           "    if len(updates) == 1:\n", "    if True:\n", TWO),
    Mutant("the log names a version that is not there yet", LEARNER,
           "version=self.publisher.version, cause", "version=self.publisher.version + 1, cause", RUN),
    Mutant("a replayed step is of age 0", METRICS,
           "            **_trained(record), **_training(stats, record.samples),\n",
           '            **_trained(record), **_training(stats, record.samples), "age_max": 0,\n',
           (f"{STEPS}::test_the_line_of_a_replayed_step_has_the_ages_of_its_groups",)),
    # -- starting again
    Mutant("random state is not restored", MODELS, "            newest.restore_random(self.device)\n", "",
           (f"{ANSWERS}::test_dropout_goes_on_after_a_restart_where_it_was",)),
    Mutant("the optimiser begins anew", MODELS,
           "self.changed = self.trainer.restore(saved, optimizer)", "self.changed = []", AGAIN),
    Mutant("groups are counted from 0 again", STEP, 'self.groups = int(newest.meta["groups"])', "self.groups = 0", AGAIN),
    Mutant("the log is trained from the beginning", "busrl/roles/learner/history.py",
           "self.wal.records(after=self.step)", "self.wal.records(after=self.step - 1)", AGAIN),
    # -- prompts
    Mutant("every block of a mixture begins its sources again", "busrl/data/prompts.py",
           "divmod(block * section.share + before, section.count)", "divmod(before, section.count)",
           ("tests/data/test_stream.py::"
            "test_blocks_of_a_mixture_have_their_shares_and_sources_whole_epochs",)),
    Mutant("validation is given the tasks that training has", "busrl/preflight/prompt_sources.py",
           '(at,), HELD_OUT_SEED, "data"', '(at,), t.run.seed, "data"',
           ("tests/preflight/test_topology_sources.py::"
            "test_tasks_that_are_held_out_are_none_that_any_training_has",)),
    Mutant("a prompt rests by all groups that it ever had", "busrl/scheduling/pass_rates.py",
           "while len(prompt.groups) > 1 and sum(", "while False and sum(", SKIPS),
    Mutant("prompts rest for ever where all of them do", "busrl/scheduling/pass_rates.py",
           "self.given_up = draw + sum(self.rates.sizes)\n            return False",
           "self.given_up = draw\n            return True", SKIPS),
    Mutant("a scheduler forgets what a killed one had written down", "busrl/roles/scheduler.py",
           "            self._newest = max([self._newest, *line.draws])\n            self._end(line.draws)\n", "",
           ("tests/roles/test_skipped_prompts.py",)),
    Mutant("prompts that are left out end a run as idle", "busrl/roles/learner/alarms.py",
           "((fates == Fate.TRAINED) | (fates == Fate.SKIPPED)).any()", "(fates == Fate.TRAINED).any()",
           ("tests/roles/test_idling.py",)),
    Mutant("a copy of a reward child answers too", "busrl/system/pipes.py",
           "if os.getpid() != OWN_PID:", "if not os.getpid():",
           ("tests/rewards/test_pool.py::test_a_function_that_forks_is_answered_once",)),
    Mutant("figures of a source forget what was set aside", "busrl/roles/learner/metrics.py",
           "tags=[tag] if tag else [],", "tags=[],",
           ("tests/roles/test_claimed_groups.py::"
            "test_tag_figures_cover_all_groups_with_that_tag_even_set_aside_ones",)),
    Mutant("a resume mixes with the weights of before", "busrl/preflight/prompt_sources.py",
           '{**row, "share": share}', "row", ("tests/run/test_mixture_run.py",)),
    # -- validation
    Mutant("validation at the training temperature", VALIDATOR,
           "temperature=spec.temperature", "temperature=self.topology.generation.temperature", RUN),
    Mutant("validation is greedy", VALIDATOR, "temperature=spec.temperature", "temperature=0.0", RUN),
    Mutant("samples of a prompt weigh more the more there are", FIGURES,
           "return [float(np.mean(numbers)) for numbers in of_prompt.values()]", "return sum(of_prompt.values(), [])",
           ("tests/roles/test_validation_rounds.py",)),
    Mutant("pass@k draws an answer twice", FIGURES,
           "1.0 - math.prod((n - c - i) / (n - i) for i in range(k))", "1.0 - (1.0 - c / n) ** k",
           ("tests/data/test_figures.py",)),
    Mutant("a tie of answers is won by the first", FIGURES,
           "sum(right[answer] / most for answer in best) / len(best) if best", "right[best[0]] / most if best",
           ("tests/data/test_figures.py",)),
    Mutant("a round is mixed by its newest versions alone", VALIDATOR,
           "for v in (result.oldest, result.version)", "for v in (result.version,)",
           ("tests/roles/test_validation_rounds.py",)),
    Mutant("an answer of two versions is not mixed", VALIDATOR,
           "oldest=int(versions.min())", "oldest=int(versions.max())", ("tests/roles/test_validation_rounds.py",)),
    # -- rewards of parts
    Mutant("a part counts without its weight", "busrl/rewards/pool.py",
           "value = sum(stage.weight * outcome.value for", "value = sum(outcome.value for", (f"{PARTS}::test_the_reward_is_the_weighted_sum_and_parts_are_shown_without_weight",)),
    Mutant("a judge that fails says 0", "busrl/rewards/judge.py",
           'raise JudgeFailed(f"{self.url}: {why} (try {number} of {self.tries})")', "return 0.0", ("tests/rewards/test_judge.py",)),
    Mutant("an answer fills in a placeholder", "busrl/rewards/judge.py",
           'values["completion"] = completion', 'values["completion"] = PLACE.sub(lambda found: values.get(found[1], found[0]), completion)',
           ("tests/rewards/test_judge.py::test_an_answer_cannot_fill_in_a_placeholder",)),
    Mutant("a reward model is padded at the left", "busrl/rewards/model.py",
           "[*row, *[self.pad] * (width - len(row))]", "[*[self.pad] * (width - len(row)), *row]",
           ("tests/rewards/test_model.py::test_a_score_is_that_of_the_text_alone",)),
    Mutant("all that were judged together are blamed for one", "busrl/rewards/pool.py",
           "self._suspects = len(self.sent) if self.together else 1", "self._suspects = 1",
           (f"{PARTS}::test_a_coroutine_that_kills_its_process_is_found_among_others",)),
    Mutant("long answers are paid for", GROUPS,
           "return -(penalty * over / buffer)", "return penalty * over / buffer", ("tests/roles/test_overlong_shaping.py",)),
    Mutant("cut answers are trained", STEP, "enumerate(records) if not self.tokens.is_cut(record)]", "enumerate(records)]",
           ("tests/roles/test_training_step.py::test_an_answer_cut_by_the_limit_is_masked_but_counts_for_advantage",)),
    # -- episodes of several turns
    Mutant("a turn that is not trained is trained", SAMPLES_OF, "np.where(record.turns_trained(), left_out, lengths)",
           "np.repeat(left_out, 1)", EPISODES),
    Mutant("the rows between two turns are scored in the place of the second", "busrl/training/packing.py",
           "torch.from_numpy(columns - before[rows] + own_first[rows] - shared)",
           "torch.from_numpy(numbered(np.bincount(rows)) + own_first[rows] - shared)", EPISODES),
    Mutant("credit goes in the order of the sequences", OF_STEPS, "np.argsort(record.turn_calls()",
           "np.argsort(record.turn_array()[:, 0]", EPISODES),
    Mutant("what an episode returned is the first call's", OF_STEPS, "np.argmax(calls)", "np.argmin(calls)", EPISODES),
    Mutant("the baseline of a turn is over those that got there", ADVANTAGES,
           "(table.sum(0) - table) / (len(rewards) - 1)",
           "(table.sum(0) - table) / ((table != 0).sum(0) - 1).clamp(min=1)", ("tests/algorithms/test_credit.py",)),
    Mutant("a turn that is the unit weighs by the tokens of its episode", OF_STEPS,
           "lengths = [sample.trained_of_turns().tolist() for sample in samples]",
           "lengths = [[sample.trained] * len(sample.turn_lengths()) for sample in samples]", EPISODES),
    Mutant("the audit takes turns that are not trained for the age", "busrl/ledger/audit/readers.py",
           "versions = versions[_trained(sample)]", "pass", ("tests/ledger/test_ledger_audit_episodes.py",)),
    # -- a loss of the user's, and what a step is divided by
    Mutant("the trial of a loss does not take masked tokens away", "busrl/training/custom.py",
           "_losses(loss, _part(tokens, tokens.mask))", "with_others", EXTENDING),
    Mutant("a loss of all samples is streamed", MODELS,
           "return not isinstance(loss, OwnLoss) or loss.streamable", "return True", EXTENDING),
    Mutant("the tokens of a padded row are counted", TALLY,
           "self.tokens += len(flat.targets) - context", "self.tokens += positions", PPO),
    Mutant("the gradient of the head is summed in its own type", HEAD,
           "torch.zeros_like(weight, dtype=normaliser.dtype) if ctx", "torch.zeros_like(weight) if ctx",
           ("tests/training/test_head.py",)),
    # -- a teacher
    Mutant("a token that the teacher names twice loses a gradient", HEAD,
           "change.scatter_add_(-1, targets[part], of_logprobs)", "change.scatter_(-1, targets[part], of_logprobs)",
           ("tests/algorithms/test_teacher.py",)),
    Mutant("a teacher's token beyond the model's table is asked for", HEAD,
           "values, ids = logits[:, :limit].topk(", "values, ids = logits.topk(", ("tests/algorithms/test_teacher.py",)),
    Mutant("what a teacher says at masked tokens counts", LOSSES,
           '"teacher_logprobs", "student_logprobs")', ")", ("tests/algorithms/test_teacher.py",)),
    Mutant("a teacher's answer that is shifted by a position is taken", "busrl/teachers/answers.py",
           "if token not in {number for number, _ in pairs}:", "if False:", TEACHERS),
    Mutant("a teacher's answer with fewer positions is taken", "busrl/teachers/answers.py",
           "if len(positions) != len(piece.ids):", "if False:", TEACHERS),
    Mutant("an endpoint's tokenizer is not looked at", "busrl/teachers/answers.py",
           "if tokens == probe.text_ids:", "if True:", TEACHERS),
    Mutant("what a teacher did not name counts as a token", "busrl/training/scorer.py",
           "student.masked_fill(taught <= catalog.FEWER, catalog.FEWER)", "student", TEACHERS),
    Mutant("files of posted teachers go while the log needs them", "busrl/teachers/of_groups.py",
           "self._store.remove(self._covered)", "self._store.remove(self._covered + self._waiting)", TEACHERS),
    # -- rows that sequences share
    Mutant("a fork sees the rows before another", "busrl/training/packing.py",
           "np.array([contexts[node.parent] for node in nodes])", "np.zeros(len(nodes), np.int64)",
           ("tests/training/test_packing.py",)),
    Mutant("positions behind a shared stretch begin again", "busrl/training/packing.py",
           "np.repeat([node.begin for node in nodes], lengths)", "0", ("tests/training/test_packing.py",)),
    # -- a value head
    Mutant("an advantage forgets the value after its token", VALUES,
           "gamma * value[:, t + 1] - value[:, t]", "-value[:, t]", VALUE_TESTS),
    Mutant("an answer's advantage goes on into the padding behind a shorter one", VALUES,
           "return [row[:count] for row, count in zip(advantages, counts, strict=True)]",
           "return [row[len(row) - count :] for row, count in zip(advantages, counts, strict=True)]", VALUE_TESTS),
    Mutant("values are trained towards the advantages' decay", VALUES,
           "advantages if decay == decay_of_values else", "advantages if True else", VALUE_TESTS),
    Mutant("the better of both value losses counts", VALUES, "torch.maximum(plain,", "torch.minimum(plain,", VALUE_TESTS),
    Mutant("masked tokens are whitened along", VALUES, "np.concatenate([row[mask] for row, mask",
           "np.concatenate([row for row, mask", VALUE_TESTS),
    Mutant("the value loss reaches the model whole", "busrl/training/value_head.py",
           "constant.lerp(hidden, self.settings.coef)", "constant.lerp(hidden, 1.0)", HEAD_TESTS),
    Mutant("a checkpoint forgets the value head", MODELS, "self.trainer.value_head.write(directory / VALUE)", "pass",
           ("tests/roles/test_training_step.py::"
            "test_the_value_head_returns_from_checkpoint_and_log_outside_any_model",)),
    # -- terms that no published number holds: sign, temperature, mask, which tokens
    Mutant("what a KL takes from the reward is added", OF_STEPS, "record.reward - float(np.sum(penalty))",
           "record.reward + float(np.sum(penalty))", BY_HAND),
    Mutant("what a KL takes from each token's reward is added", OF_STEPS, "row -= penalty", "row += penalty", BY_HAND),
    Mutant("a KL in the reward is that of the other direction", OF_STEPS,
           "coefficient * estimator(logprobs, torch.from_numpy(row.astype(np.float64)))",
           "coefficient * estimator(torch.from_numpy(row.astype(np.float64)), logprobs)", BY_HAND),
    Mutant("a KL in the reward is that of the weights at hand", OF_STEPS,
           "behaviour = [torch.from_numpy(record.logprob_array().astype(np.float64)) for record in records]",
           "behaviour = [torch.from_numpy(one.astype(np.float64)) for one in self.models.trainer.score(self.tokens.samples(records))]", BY_HAND),
    Mutant("an opponent's turns pay for their KL", OF_STEPS, "            * np.repeat(record.turns_trained(), record.turn_lengths())\n", "", BY_HAND),
    Mutant("a KL of the reward is in the loss too", TRAINER,
           'settings.kl != "none" and settings.kl_in == "loss"', 'settings.kl != "none"', BY_HAND),
    Mutant("a KL in the loss pulls away from the reference", TERMS, "values + settings.kl_coef * distance",
           "values - settings.kl_coef * distance", BY_HAND),
    Mutant("a reference ignores the temperature", MODELS, "forward.score(samples, flat)[0]", f"forward.score(samples, {AT_ONE})[0]", BY_HAND),
    Mutant("a reference has rows that no token has", MODELS, "            way.leave_out_all_but(self.settings.token_rows)\n", "",
           of_step("rows that no token has")),
    Mutant("the base of an adapter ignores the temperature", "busrl/training/model.py", "return score(*arguments)[0]",
           "return score(arguments[0], __import__('dataclasses').replace(arguments[1], temperature=None))[0]", REFERRED),
    Mutant("an adapter is its own reference", "busrl/training/model.py", "            with self.off():\n                return score",
           "            if True:\n                return score", REFERRED),
    Mutant("a reference is the model that is trained", MODELS, "forward = self._other(self.referred or self.source)",
           "forward = trained", BY_HAND),
    Mutant("a teacher ignores the temperature", MODELS, "forward.best(samples, flat, self.config.teacher_k, words)",
           f"forward.best(samples, {AT_ONE}, self.config.teacher_k, words)", BY_HAND),
    Mutant("a rank's reference ignores the temperature", BUILDER, "second.score(samples, flat)[0]", f"second.score(samples, {AT_ONE})[0]",
           RANK_READS),
    Mutant("a rank's teacher ignores the temperature", BUILDER, "second.best(samples, flat, count, words)",
           f"second.best(samples, {AT_ONE}, count, words)", RANK_READS),
    Mutant("a bonus is paid for certainty", TERMS, "values - settings.entropy_coef * seen.entropy",
           "values + settings.entropy_coef * seen.entropy", BY_HAND),
    Mutant("a correction is engine over trainer", TERMS, "log_ratio(inputs.proximal_logprobs, inputs.behaviour_logprobs).detach()",
           "log_ratio(inputs.behaviour_logprobs, inputs.proximal_logprobs).detach()", BY_HAND),
    Mutant("a correction is of the weights at hand", TERMS, "log_ratio(inputs.proximal_logprobs, inputs.behaviour_logprobs).detach()",
           "log_ratio(inputs.trainer_logprobs, inputs.behaviour_logprobs).detach()", BY_HAND),
    Mutant("the KL that is told is of the other direction", DIAGNOSTICS,
           "terms.k3(inputs.trainer_logprobs.detach(), inputs.reference_logprobs)",
           "terms.k3(inputs.reference_logprobs, inputs.trainer_logprobs.detach())", BY_HAND),
    Mutant("what separates from a teacher is pushed away", TERMS, "values + settings.teacher_coef * teacher_kl",
           "values - settings.teacher_coef * teacher_kl", BY_HAND),
    Mutant("a teacher's rest counts for nothing", LOSSES, "distill.topk_kl(inputs.student_logprobs, inputs.teacher_logprobs)",
           "distill.topk_kl(inputs.student_logprobs, inputs.teacher_logprobs, tail=False)", BY_HAND),
    Mutant("tokens that are not trained are whitened along", OF_STEPS, "counts = [int(self.tokens.mask(record).sum()) for record in records]",
           "counts = [one.tokens for one in records]", BY_HAND),
    Mutant("cut answers are whitened along", SAMPLES_OF, ".mask() & (not self.is_cut(record))", ".mask()", BY_HAND),
    Mutant("tokens that are too old are whitened along", SAMPLES_OF,
           "to_sample(record, self.last_only, self.stale.count(record)).mask()", "to_sample(record, self.last_only).mask()", BY_HAND),
    Mutant("earlier segments are whitened along", SAMPLES_OF,
           "to_sample(record, self.last_only, self.stale.count(record)).mask()",
           "to_sample(record, False, self.stale.count(record)).mask()", BY_HAND),
    Mutant("a sample weighs by what was drawn of it", OF_STEPS, "lengths = [[sample.trained] for sample in samples]",
           "lengths = [[sample.generated] for sample in samples]", BY_HAND),
    Mutant("an answer's length is no norm", ADVANTAGES, "return [1 / norm] * len(tokens)", "return [1.0] * len(tokens)", BY_HAND),
    Mutant("n instead of n - 1 tokens under the root of a whitening", ADVANTAGES, "(counts.sum() - 1).clamp(min=1)",
           "counts.sum().clamp(min=1)", BY_HAND),
    Mutant("the reward is of the first token", OF_STEPS, "row[-1] += record.reward", "row[0] += record.reward", BY_HAND),
    Mutant("values of tokens that are not trained are learnt", SCORER, "loss if flat.mask is None else loss.where(flat.mask, 0)",
           "loss", BY_HAND),
    Mutant("the loss of values is not aggregated as that of the policy", TRAINER, "loss, trained = loss * weights, trained * weights",
           "loss, trained = loss * weights, trained - loss + loss * weights", BY_HAND),
    Mutant("an explained variance of the values alone", DIAGNOSTICS, "error = errors.returns - errors.values", "error = errors.values", BY_HAND),
    Mutant("what leaves a wrapped module is a view", "busrl/ranks/mesh.py", "return result.clone() if", "return result if",
           ("tests/training/test_ranks.py::test_what_leaves_a_wrapped_module_may_be_changed_in_place",)),
    Mutant("untrained turns of a cut episode are counted twice", METRICS, "sample.turns and not (masks_cut and sample.finish == Finish.LENGTH)",
           "sample.turns", (f"{STEPS}::test_a_step_of_episodes_has_the_numbers_of_log_and_weights",)),
    Mutant("tokens of older weights have ratio 1 too", SCORER,
           "torch.where(current, inputs.trainer_logprobs.detach(), inputs.behaviour_logprobs)", "inputs.trainer_logprobs.detach()", BY_HAND),
    Mutant("a forked process outlives launch", TEMPLATE, '    die_with(request["owner"])\n', "", FORKED),
    Mutant("forked processes draw the same numbers", TEMPLATE, "    _draw_other_numbers()\n", "", FORKED),
    Mutant("a forked process has the threads of its template", TEMPLATE, "    _set_threads(int(", "    int(int(", FORKED),
    Mutant("a template forks beside its threads", TEMPLATE, '("/proc/self/task"))) > 1:', '("/proc/self/task"))) > 99:', FORKED),
    Mutant("what a forked process has written is not flushed", TEMPLATE, "opened.flush()", "pass", FORKED),
    Mutant("exit handlers of a forked process are left out", TEMPLATE, "    atexit._run_exitfuncs()\n", "", FORKED),
    Mutant("a process with variables of its own is forked", "busrl/launcher/forks.py", "spec.python or spec.env)", "spec.python)", FORKS),
    Mutant("an import that never ends is waited for", "busrl/launcher/forks.py", "if used_s > self._begun_s + MOST_CPU_S:", "if False:", FORKS),
    Mutant("routes are not copied before blocks are another's", CAPTURE, "and name in self._batch.req_id_to_index:", "and False:", CAPTURED),
    Mutant("a position that is computed again has its last route", CAPTURE, "np.arange(len(before), ", "np.arange(0 * len(before), ", CAPTURED),
    Mutant("routes that were taken are copied again", CAPTURE, "self._taken.add(own)", "pass", CAPTURED),
    Mutant("a call for routes ends an answer twice", "busrl/engines/vllm/routes.py", " if not running.over}", "}",
           ("tests/engines/test_vllm_joined_routes.py::test_many_ends_are_one_call_and_an_answer_ends_once",)),
    Mutant("a shared prompt has the routes of its last sample", REPLAY, "if int(heads[number]) not in there:", "if True:",
           (f"{REPLAYED}::test_the_lowest_member_gives_a_shared_prompt_its_routes",)),
    Mutant("the row behind a trained token's is counted", REPLAY, "columns - (firsts[which] - 1)", "columns - firsts[which]",
           (f"{REPLAYED}::test_a_step_counts_the_rows_whose_router_chose_others",)),
    Mutant("a row without routes has the last expert", REPLAY, "torch.where(given < 0, ids, given) if self._partly else given", "given",
           (f"{REPLAYED}::test_a_sample_without_routes_or_a_prompt_without_takes_its_own",)),
    Mutant("a layer that is computed again is counted again", REPLAY, " or place in self._seen:", ":",
           (f"{REPLAYED}::test_layers_that_are_computed_again_take_the_same_routes",)),
    Mutant("the balance is of the experts that the router chose", REPLAY, "self._spread(place, logits, chosen)", "self._spread(place, logits, ids)",
           (f"{REPLAYED}::test_balance_counts_the_experts_that_were_used",)),
    Mutant("a token that is computed again has its last route", "busrl/routes/capture.py", "        routes[: len(first)] = first\n", "",
           ("tests/engines/test_engine_routes.py::test_a_token_keeps_the_route_that_it_was_drawn_by",)),
    Mutant("routes are carried in float32", "busrl/routes/rules.py", 'if t.model.dtype == "float32":', "if False:",
           ("tests/routes/test_route_rules.py::test_auto_carries_routes_but_in_float32",)),
    Mutant("new weights of experts are not packed", "busrl/engines/vllm/cpu_patches.py", "tensor.copy_(pack(tensor.clone()).view_as(tensor))", "pass",
           ("tests/engines/test_vllm_parts.py::test_new_weights_of_experts_are_packed_again_on_a_cpu_alone",)),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names; none = all")
    parser.add_argument("--list", action="store_true", help="names alone")
    parser.add_argument("--quick", action="store_true", help="without those that a whole run must notice")
    given = parser.parse_args()
    chosen = [one for one in MUTANTS if not given.names or any(part in one.name for part in given.names)]
    chosen = [one for one in chosen if not (given.quick and WHOLE_RUN in one.tests)]
    if given.list:
        print("\n".join(one.name for one in chosen))
        return 0
    with tempfile.TemporaryDirectory(prefix="busrl-mutants-") as place:
        tree = Path(place) / "tree"
        copy_tree(tree)
        return try_all(tree, chosen)


def copy_tree(tree: Path) -> None:
    """The files that git knows or does not ignore, and what was built beside them."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    built = [str(path.relative_to(ROOT)) for path in (ROOT / "busrl").rglob("*.so*")]
    for name in {*listed, *built}:
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def try_all(tree: Path, chosen: list[Mutant]) -> int:
    begun = time.monotonic()
    good = run_tests(tree, tuple(dict.fromkeys(test for one in chosen for test in one.tests)), tell=True)
    if good != 0:
        print(f"without any mistake planted the tests end with {good}; mend that first")
        return 1
    bad = [text for one in chosen if (text := verdict(tree, one))]
    minutes = (time.monotonic() - begun) / 60
    print(f"{len(chosen) - len(bad)} of {len(chosen)} mistakes were noticed, {minutes:.1f} minutes")
    print("\n".join(f"NOT NOTICED {text}" for text in bad))
    return 1 if bad else 0


def verdict(tree: Path, one: Mutant) -> str:
    """Empty if its tests noticed it; else what is wrong."""
    if fault := one.fault(tree):
        return fault
    path = tree / one.file
    text = path.read_text()
    path.write_text(text.replace(one.old, one.new))
    try:
        code = run_tests(tree, one.tests)
    finally:
        path.write_text(text)
    print(f"{'noticed' if code == 1 else f'code {code}':10} {one.name}", flush=True)
    return "" if code == 1 else f"{one.name}: pytest ended with {code}, and 1 is a test that failed ({one.tests[0]})"


def run_tests(tree: Path, tests: tuple[str, ...], tell: bool = False) -> int:
    """pytest's exit code; with `tell` what it printed of a failure, too."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    limit_s = max(2 * LIMIT_S, EACH_S * len(tests))
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=limit_s)
    if done.returncode and (tell or done.returncode != 1):
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
