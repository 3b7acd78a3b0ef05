"""Names that other trainers give to keys (TRL, verl, OpenRLHF and their configuration files), and the key of busrl.

`counterpart` gives the reader the remedy for an unknown key. Pure; knows nothing of the keys' values.

- The remedy is a key of busrl, or says that there is none and what does the work instead.
"""

from __future__ import annotations

NONE = "there is none yet"

KEYS = {
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
    "learner.updates_per_batch": "mini_batch_size ppo_mini_batch_size num_mini_batches",
    "learner.passes_per_batch": "ppo_epochs num_ppo_epochs num_iterations mu",
    "learner.dual_clip": "delta clip_ratio_c",
    "learner.correction": "rollout_is vllm_importance_sampling_correction importance_sampling_correction tis",
    "learner.correction_high": "vllm_importance_sampling_cap rollout_is_threshold tis_imp_ratio_cap",
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
REMEDIES = {
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
    "key_list group_keys group_key":
        "did you mean groups.size? Answers to a prompt are a group, and each seat of a model has its own; turns within "
        'episodes are compared by llm.chat(..., key="plan") with learner.credit = "turn" (docs/beyond-groups.md)',
    "check_batch_ready_function batch_ready_function batch_ready_fn loaded_batch_finished":
        'did you mean learner.trigger.n_min, the groups of a batch (learner.trigger.count = "ended" counts all that '
        'ended)? With weights.mode = "sync" a batch is ready when all of its groups have ended',
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

RIVALS = {name: f"did you mean {key}?" for key, names in KEYS.items() for name in names.split()}
RIVALS |= {name: text for names, text in REMEDIES.items() for name in names.split()}


def counterpart(name: str) -> str:
    """The key to write instead of another trainer's name; empty for one that nobody uses."""
    return RIVALS.get(name.lower().replace("-", "_"), "")
