"""Names of keys that are not today's: keys that have moved or are gone, and what other trainers call them.

`elsewhere` and `counterpart` give the reader the remedy for an unknown key; `modern` brings the topology.json of an
older run into today's shape. Pure; knows nothing of the keys' values.

- A key that moved keeps its meaning; one whose unit changed stands in MOVED_MS and is converted.
- The remedy for another trainer's name is a key of busrl, or says that there is none and what does the work instead.
"""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

from busrl.scheduling.admission import AdmissionLimits

# -- keys of older versions -----

_KEPT = (
    "ema", "probe_every", "probe_samples", "reference_steps", "high", "low", "hysteresis", "clip_factor", "clip_floor",
    "ess_low",
)
_RULES = (  # of a second set of the controller's rules
    "rules", "k3_high", "masked_high", "grad_factor", "safety_cooldown", "sigma", "gate_on", "gate_off", "collapse",
    "streak", "kappa", "grow_at", "shrink_at", "grow", "shrink", "noise_groups", "eta_min", "idle_train",
    "idle_rollout", "ess_safe", "k3_safe",
)
MOVED_MS = {  # milliseconds became seconds
    "learner.trigger.t_max": "learner.trigger.t_max_s",
    "learner.controller.high_t_max": "experiments.controller.high_t_max_s",
    "learner.controller.low_t_max": "experiments.controller.low_t_max_s",
}
MOVED = {
    "data.validation": "validation.data",
    "run.validate_before": "validation.at_start",
    "segments.truncated": "reward.truncated",
    "segments.truncated_penalty": "reward.truncated_penalty",
    "learner.forced_age": "experiments.forced_age",
    **{f"learner.controller.{name}": f"experiments.controller.{name}" for name in _KEPT},
    **MOVED_MS,
}
_ONE_RULE_SET = "the controller has one set of rules, which follow the entropy (docs/control.md): remove it"
_MASK, _NO_MASK = ("dmmpt", "dmmpt_tau", "dmmpt_sigma"), "no tokens are left out for being mastered: remove it"
GONE = {
    **{f"{table}.controller.{name}": _ONE_RULE_SET for table in ("experiments", "learner") for name in _RULES},
    **{f"{table}.{name}": _NO_MASK for table in ("experiments", "learner") for name in _MASK},
    "scheduler.probe": "there are no probes, which cost more time than they saved (docs/experiments): remove it",
    "derived.eta_min": "it belonged to rules of the controller that are gone: remove it",
}


def elsewhere(key: str) -> str:
    """What to do about a key of an older file; empty for one that never was."""
    if key in MOVED_MS:
        return f"it is {MOVED_MS[key]} now, in seconds (a thousandth of the number)"
    return f"it is {MOVED[key]} now" if key in MOVED else GONE.get(key, "")


def modern(data: dict[str, Any]) -> dict[str, Any]:
    """The data of a topology.json of any age in today's shape; what is today's already stays as it is."""
    made = copy.deepcopy(data)
    without = _taken(made, "data.validation")
    for old, new in MOVED.items():
        found, value = _taken(made, old)
        if found:
            _put(made, new, value / 1000 if old in MOVED_MS and not isinstance(value, str) else value)
    if without[0]:  # an older run validated on the training prompts where it had no others
        rounds = made.get("derived", {}).get("val_samples", 0)
        _put(made, "validation.data", without[1] or (made["data"]["train"] if rounds else ""))
    for old in GONE:
        _taken(made, old)
    for part in made.get("reward", {}).get("part", []):
        part.pop("language", None)  # it had the one value python
    return _with_limits(made)


def _with_limits(made: dict[str, Any]) -> dict[str, Any]:
    """The admission limits, flat among the derived values, as a table of their own; older runs wrote only some."""
    derived = made.get("derived")
    if not isinstance(derived, dict) or "limits" in derived:
        return made
    try:
        known = _known_limits(made)
    except (KeyError, TypeError, AttributeError):
        return made  # a section is missing: whoever builds the topology names it
    names = [field.name for field in fields(AdmissionLimits)]
    derived["limits"] = known | {name: derived.pop(name) for name in names if name in derived}
    return made


def _known_limits(made: dict[str, Any]) -> dict[str, Any]:
    """What the keys alone say of the limits."""
    weights, segments = made["weights"], made.get("segments", {})
    sync = weights["mode"] == "sync"
    cut = sync and segments.get("length", 0) != 0 and segments.get("rounds") == "segments"
    waves = segments.get("max_segments", 0) if cut else 0
    bound = {"sync": None if waves else 0, "fully-async": None}.get(weights["mode"], weights["max_staleness"])
    return {
        "mode": weights["mode"], "n_min": made["learner"]["trigger"]["n_min"], "max_staleness": bound,
        "group_size": made["groups"]["size"], "waves": waves, "window": 0 if sync else weights.get("window", 0),
    }


def _taken(data: dict[str, Any], key: str) -> tuple[bool, Any]:
    """Remove a dotted key; whether it was there, and its value."""
    *tables, name = key.split(".")
    for table in tables:
        data = data.get(table, {})
        if not isinstance(data, dict):
            return False, None
    return (True, data.pop(name)) if name in data else (False, None)


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    *tables, name = key.split(".")
    for table in tables:
        data = data.setdefault(table, {})
    data[name] = value


# -- keys of other trainers, which TRL, verl, OpenRLHF and their configuration files use -----

NONE = "there is none yet"

_KEYS = {
    "run.name": "run_name experiment_name project_name exp_name",
    "run.max_steps": "steps total_steps total_training_steps num_train_steps train_steps max_train_steps",
    "run.seed": "random_seed data_seed",
    "model.path": "model model_name model_name_or_path pretrain checkpoint base_model tokenizer tokenizer_name",
    "model.dtype": "bf16 fp16 torch_dtype precision param_dtype mixed_precision",
    "data.train": "dataset dataset_name train_file train_files train_dataset prompt_data input_file data_path",
    "data.prompt_key": "input_key prompt_column prompt_field question_key",
    "data.answer_key": "label_key answer_column ground_truth_key reference_key",
    "data.template": "chat_template apply_chat_template",
    "data.template_arguments": "chat_template_kwargs apply_chat_template_kwargs enable_thinking",
    "data.tools_key": "tools tool_key tools_column",
    "validation.data": "val_file val_files validation_file eval_dataset eval_data test_file test_files",
    "validation.every": "eval_steps eval_every test_freq eval_interval val_every eval_freq",
    "groups.size": "num_generations n rollout_n group_size n_samples n_samples_per_prompt samples_per_prompt "
                   "num_samples num_return_sequences",
    "generation.max_new_tokens": "max_length max_tokens max_completion_length max_response_length response_length "
                                 "generate_max_len completion_length",
    "generation.max_prompt_tokens": "max_prompt_length prompt_max_len prompt_length max_input_length",
    "generation.max_batch": "rollout_batch max_num_seqs micro_rollout_batch_size",
    "learner.lr": "learning_rate actor_learning_rate lrate step_size",
    "learner.trigger.n_min": "batch_size train_batch_size per_device_train_batch_size rollout_batch_size "
                             "global_batch_size prompts_per_step num_prompts_per_step",
    "learner.updates_per_batch": "mini_batch_size ppo_mini_batch_size num_iterations mu num_mini_batches",
    "learner.passes_per_batch": "ppo_epochs num_ppo_epochs",
    "learner.value.decay": "lam gae_lambda lambd",
    "learner.value.gamma": "gamma discount",
    "learner.value.coef": "vf_coef value_coef",
    "learner.value.clip": "cliprange_value value_clip",
    "learner.micro_batch_tokens": "micro_batch_size micro_train_batch_size gradient_accumulation_steps "
                                  "ppo_max_token_len_per_gpu",
    "learner.advantage": "grpo algorithm adv_estimator advantage_estimator scale_rewards rloo gae",
    "learner.clip_low and learner.clip_high": "epsilon clip_eps clip_ratio cliprange clip_range eps_clip epsilon_high "
                                              "clip_ratio_low clip_ratio_high",
    "learner.train_layers": "trainable_layers layers_to_train unfrozen_layers freeze freeze_layers num_layers_unfrozen "
                            "unfrozen_parameters",
    "learner.betas": "adam_beta1 adam_beta2 adam_betas",
    "learner.eps": "adam_epsilon",
    "learner.max_grad_norm": "grad_clip gradient_clipping max_norm",
    "learner.warmup_groups": "warmup warmup_steps warmup_ratio lr_warmup_steps num_warmup_steps",
    "learner.decay": "lr_scheduler lr_scheduler_type lr_schedule scheduler_type",
    "learner.checkpoint_every": "save_steps save_freq save_every save_interval checkpoint_interval",
    "learner.keep_last": "save_total_limit max_ckpt_num",
    "reward.function": "reward_fn reward_func reward_function custom_reward_function",
    "reward.truncated": "mask_truncated_completions overlong_filter overlong_filtering",
    "reward.overlong_tokens": "overlong_buffer overlong_buffer_len soft_punish_cache",
    "lora.rank": "lora_r lora_rank use_peft peft r",
    "lora.alpha": "lora_alpha",
    "lora.targets": "target_modules lora_target_modules",
    "lora.dropout": "lora_dropout",
    "weights.max_staleness": "staleness max_lag async_level off_policy_steps max_off_policyness",
    "vllm.tensor_parallel": "tensor_parallel_size tensor_model_parallel_size tp",
}
_SAYINGS = {
    "reward_funcs reward_weights reward_model reward_model_path":
        "write a [[reward.part]] for each, with kind and weight (docs/rewards.md)",
    "num_train_epochs num_epochs total_epochs epochs epoch":
        "did you mean run.max_steps? An epoch is as many steps as there are prompts / learner.trigger.n_min",
    "datasets data_sources prompt_data_probs dataset_mixer mixture dataset_probs":
        "write a [[data.source]] for each of them, with its weight",
    "kl_coef kl_coeff kl beta init_kl_coef kl_loss_coef use_kl_loss kl_penalty target_kl":
        "did you mean learner.kl_coef, with learner.kl? By default the clip alone bounds how far a step goes",
    "entropy_coef entropy_coeff entropy_bonus ent_coef":
        "did you mean learner.entropy_coef? By default learner.clip_high above clip_low keeps entropy from falling",
    "loss_type loss_mode policy_loss pg_loss": "did you mean learner.loss? learner.recipe sets whole algorithms",
    "teacher_model teacher_model_path teacher_model_name_or_path distill_teacher": "did you mean model.teacher?",
    "ref_model reference_model ref_model_name_or_path": "did you mean model.reference? learner.kl reads it",
    "critic value_model value_head": 'write recipe = "ppo" in [learner]: it trains a value head, with [learner.value]',
    "stop stop_sequences stop_strings stop_words stop_token_ids":
        f"{NONE}: an answer ends with an end token of the model's generation_config.json, or at "
        "generation.max_new_tokens",
    "top_k min_p repetition_penalty presence_penalty frequency_penalty":
        f"{NONE}: training needs the probabilities that tokens were drawn with, so only temperature shapes them",
    "gpus num_gpus n_gpus n_gpus_per_node gpu_ids num_processes world_size nproc_per_node":
        'give a [[process]] entry devices = ["0"], or count for more processes of a role',
    "use_vllm vllm rollout_engine backend_engine inference_engine":
        'write engine = "vllm" in a [[process]] of role = "rollout"',
    "output_dir save_path ckpt_path log_dir default_local_dir": "give `busrl launch --run-dir DIR`",
    "wandb report_to use_wandb logger logging_steps tensorboard":
        'write to = ["wandb"] (or "tensorboard", ...) in [sinks]: see docs/metrics.md',
    "resume resume_from_checkpoint resume_mode": "a start with the same --run-dir continues the run",
    "deepspeed fsdp zero_stage strategy":
        'write ranks = 2 (or more) in the [[process]] of role = "learner": each holds a part of weights and optimiser',
    "torch_compile use_torch_compile": "did you mean learner.memory.compile?",
    "gradient_checkpointing": "did you mean learner.memory.activation_checkpointing?",
    "trainer actor actor_rollout_ref rollout training train":
        "tables are [model], [data], [groups], [generation], [learner], [reward], ...: see configs/reference.toml",
}

RIVALS = {name: f"did you mean {key}?" for key, names in _KEYS.items() for name in names.split()}
RIVALS |= {name: text for names, text in _SAYINGS.items() for name in names.split()}


def counterpart(name: str) -> str:
    """What to write instead of another trainer's name; empty for one that nobody uses."""
    return RIVALS.get(name.lower().replace("-", "_"), "")
