"""What the settings of other frameworks are called here.

The one table behind the sentence for an unknown key and docs/coming-from.md. Names were read from
TRL 1.16 (GRPOConfig and the arguments of its scripts), verl and prime-rl; a few are of earlier
versions that are still in use.
"""

from collections.abc import Sequence
from dataclasses import dataclass

TRL, VERL, PRIME_RL = "TRL", "verl", "prime-rl"
PEERS = (TRL, VERL, PRIME_RL)


@dataclass(frozen=True)
class PeerName:
    """A setting of another framework, and what does the same here."""

    peer: str
    name: str
    """with its tables, where the framework has any"""
    keys: tuple[str, ...]
    """what it is called here; none where nothing corresponds to it"""
    note: str = ""
    """what differs, or why there is none; continues a sentence"""

    def sentence(self) -> str:
        """Return what to write in its place, as the rest of a sentence without its end."""
        last = self.name.rpartition(".")[2]
        if not self.keys:
            return f"{self.peer}'s {last} has no counterpart here: {self.note}"
        note = f", {self.note}" if self.note else ""
        return f"{self.peer}'s {last} is {' and '.join(self.keys)} here{note}"


def _of(peer: str, *rows: tuple[str, str] | tuple[str, str, str]) -> tuple[PeerName, ...]:
    """Make the rows of one framework; keys are separated by blanks."""
    return tuple(PeerName(peer, row[0], tuple(row[1].split()), *row[2:]) for row in rows)


EXACT_SPLITS = (
    "losses are exact for any split of a batch, so memory is set with training.micro_batch_tokens "
    "alone"
)
SEQUENCES = (
    "which counts prompts: a step has prompts_per_step x samples_per_prompt completions on all "
    "GPUs together"
)
STEPS = "which counts batches of rollouts, not optimizer steps"
GIVEN_LAG = "the exact number of versions without [cluster], and the largest with it"

PEER_NAMES: tuple[PeerName, ...] = (
    *_of(
        TRL,
        ("model_name_or_path", "model.name"),
        ("dataset_name", "task.name task.path", "a task is problems with their grader"),
        ("reward_funcs", "reward.terms"),
        ("reward_weights", "reward.terms.weight", "one for each term"),
        ("output_dir", "run.folder run.name"),
        ("run_name", "run.name"),
        ("report_to", "run.trackers", "a list"),
        ("num_generations", "rollout.samples_per_prompt"),
        (
            "per_device_train_batch_size",
            "rollout.prompts_per_step",
            f"{SEQUENCES}, and training.micro_batch_tokens bounds what is computed at a time",
        ),
        ("generation_batch_size", "rollout.prompts_per_step", SEQUENCES),
        ("gradient_accumulation_steps", "", EXACT_SPLITS),
        (
            "steps_per_generation",
            "training.mini_batches",
            "which counts optimizer steps in a batch, without those of accumulation",
        ),
        ("max_completion_length", "rollout.max_tokens"),
        (
            "max_prompt_length",
            "task.max_prompt_tokens",
            "which leaves longer prompts out and cuts none",
        ),
        ("temperature", "rollout.temperature", "with training.policy_temperature beside it"),
        ("top_p", "rollout.top_p"),
        ("top_k", "rollout.top_k"),
        ("learning_rate", "training.learning_rate"),
        ("lr_scheduler_type", "training.schedule"),
        ("warmup_ratio", "training.warmup_fraction"),
        ("warmup_steps", "training.warmup_fraction", "a share of all optimizer steps"),
        ("weight_decay", "training.weight_decay"),
        ("max_grad_norm", "training.gradient_clip"),
        ("adam_beta1", "training.betas", "a list of two"),
        ("adam_beta2", "training.betas", "a list of two"),
        ("optim", "training.optimizer"),
        ("max_steps", "training.steps", STEPS),
        (
            "num_train_epochs",
            "training.steps",
            "which counts batches: epochs x problems / rollout.prompts_per_step",
        ),
        ("num_iterations", "training.passes"),
        ("beta", "objective.reference_kl_coef", "of the KL to the initial model"),
        (
            "epsilon",
            "objective.clip_low objective.clip_high",
            "with an objective that clips: p3o has no clip range",
        ),
        ("epsilon_high", "objective.clip_high", "with an objective that clips"),
        ("loss_type", "objective.name", "where each objective has one normalization"),
        ("importance_sampling_level", "objective.name", "as gspo, which weighs whole sequences"),
        (
            "vllm_importance_sampling_correction",
            "objective.name",
            "as grpo_is; the others correct with the recorded log-probs themselves",
        ),
        ("vllm_importance_sampling_cap", "objective.correction_cap", "of grpo_is"),
        ("scale_rewards", "advantage.name", "group_standardized or group_centered"),
        ("mask_truncated_completions", "reward.truncated", 'with the value "leave_out"'),
        ("use_vllm", "rollout.engine", 'with the value "vllm"'),
        ("vllm_mode", "rollout.vllm.mode"),
        ("vllm_gpu_memory_utilization", "rollout.vllm.gpu_memory_utilization"),
        ("bf16", "model.precision", 'with the value "bfloat16", the default on a GPU'),
        ("fp16", "", "use bfloat16, which model.precision sets"),
        ("gradient_checkpointing", "training.gradient_checkpointing"),
        ("torch_compile", "training.compile"),
        ("use_peft", "model.lora", "a table, which may be empty"),
        ("lora_r", "model.lora.rank"),
        ("lora_alpha", "model.lora.alpha"),
        ("lora_target_modules", "model.lora.targets"),
        ("load_in_4bit", "model.quantization", 'with the value "nf4"'),
        ("load_in_8bit", "model.quantization", 'with the value "int8"'),
        ("lora_dropout", "", "trainer and engine must compute the same log-probs"),
        ("save_steps", "run.checkpoint_every"),
        ("save_strategy", "run.keep_checkpoints", 'where 0 is "no"'),
        ("save_total_limit", "run.keep_checkpoints"),
        ("eval_steps", "evaluation.every"),
        ("logging_steps", "", "every step is logged"),
        ("log_completions", "run.rollouts_every"),
        ("resume_from_checkpoint", "", "the same command continues a run"),
        ("push_to_hub", "", "trustbatch push uploads a run when it is done"),
    ),
    *_of(
        VERL,
        ("data.train_files", "task.path", 'with task.name = "file"'),
        ("data.val_files", "evaluation.suite", "which takes files and names"),
        ("data.prompt_key", "task.columns", 'as in columns = {problem = "question"}'),
        ("data.train_batch_size", "rollout.prompts_per_step"),
        (
            "data.max_prompt_length",
            "task.max_prompt_tokens",
            "which leaves longer prompts out and cuts none",
        ),
        ("data.max_response_length", "rollout.max_tokens"),
        ("actor_rollout_ref.model.path", "model.name"),
        ("actor_rollout_ref.model.lora_rank", "model.lora.rank"),
        ("actor_rollout_ref.rollout.n", "rollout.samples_per_prompt"),
        ("actor_rollout_ref.rollout.name", "rollout.engine"),
        (
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            "rollout.vllm.tensor_parallel",
        ),
        ("actor_rollout_ref.rollout.max_num_seqs", "rollout.max_sequences"),
        ("actor_rollout_ref.rollout.response_length", "rollout.max_tokens"),
        (
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            "training.mini_batches",
            "the number of mini-batches in a step, not their size",
        ),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "", EXACT_SPLITS),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "training.micro_batch_tokens"),
        ("actor_rollout_ref.actor.ppo_epochs", "training.passes"),
        (
            "actor_rollout_ref.actor.clip_ratio",
            "objective.clip_low objective.clip_high",
            "with an objective that clips: p3o has no clip range",
        ),
        ("actor_rollout_ref.actor.clip_ratio_low", "objective.clip_low"),
        ("actor_rollout_ref.actor.clip_ratio_high", "objective.clip_high"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "objective.name"),
        ("actor_rollout_ref.actor.entropy_coeff", "objective.entropy_coef"),
        ("actor_rollout_ref.actor.kl_loss_coef", "objective.reference_kl_coef"),
        ("actor_rollout_ref.actor.optim.lr", "training.learning_rate"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", "training.warmup_fraction"),
        (
            "algorithm.adv_estimator",
            "advantage.name",
            "where grpo is group_standardized and rloo leave_one_out; there is no critic",
        ),
        ("algorithm.norm_adv_by_std_in_grpo", "advantage.name", "as group_standardized"),
        (
            "algorithm.kl_ctrl.kl_coef",
            "objective.reference_kl_coef",
            "a term of the loss, not of the reward",
        ),
        ("algorithm.rollout_correction.rollout_is", "objective.name", "as grpo_is"),
        ("custom_reward_function.path", "reward.terms", 'with a term named "function"'),
        ("trainer.total_training_steps", "training.steps", STEPS),
        (
            "trainer.total_epochs",
            "training.steps",
            "which counts batches: epochs x problems / rollout.prompts_per_step",
        ),
        ("trainer.experiment_name", "run.name"),
        ("trainer.default_local_dir", "run.folder"),
        ("trainer.logger", "run.trackers"),
        ("trainer.save_freq", "run.checkpoint_every"),
        ("trainer.test_freq", "evaluation.every"),
        ("trainer.n_gpus_per_node", "", "start with torchrun, or set cluster.trainers"),
    ),
    *_of(
        PRIME_RL,
        ("orchestrator.batch_size", "rollout.prompts_per_step", SEQUENCES),
        ("orchestrator.group_size", "rollout.samples_per_prompt"),
        ("orchestrator.rollouts_per_example", "rollout.samples_per_prompt"),
        (
            "seq_len",
            "rollout.max_tokens",
            "for completions, and training.micro_batch_tokens for what is computed at a time",
        ),
        ("max_steps", "training.steps", STEPS),
        ("orchestrator.max_off_policy_steps", "cluster.max_lag", "a bound: nothing is dropped"),
        ("max_async_level", "cluster.max_lag rollout.lag", GIVEN_LAG),
        ("async_level", "cluster.max_lag rollout.lag", GIVEN_LAG),
        ("orchestrator.sampling.max_completion_tokens", "rollout.max_tokens"),
        ("trainer.optim.lr", "training.learning_rate"),
        ("trainer.loss.type", "objective.name"),
        ("trainer.model.lora.rank", "model.lora.rank"),
    ),
)


def find_peer_name(key: str) -> PeerName | None:
    """Return what a key is in another framework: whatever shares most of its last parts."""
    parts = key.split(".")
    best, length = None, 0
    for each in PEER_NAMES:
        common = _num_common(parts, each.name.split("."))
        if common > length and _is_told_by(parts, each, common):
            best, length = each, common
    return best


def _num_common(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the number of equal parts at the ends."""
    pairs = zip(reversed(first), reversed(second), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _is_told_by(parts: Sequence[str], name: PeerName, num_common: int) -> bool:
    """Whether that many last parts are enough: "path" says little where its table differs."""
    return num_common > 1 or "." not in name.name or len(parts) == 1 or "_" in parts[-1]
