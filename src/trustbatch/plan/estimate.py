"""Estimates the memory of a run on each GPU, before anything is loaded.

Parameters and optimizer states are counted, activations are measured on two layers, and the rest is
known from what this package keeps alive at the same time. Memory that a run uses only if it is free
is not counted: graphs of further micro-batches that wait for their backward pass.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from trustbatch.batching.sequences import sharing_pays
from trustbatch.config import Config
from trustbatch.plan.demand import (
    Bundles,
    Demand,
    published_bytes,
    seen_by_ray,
)
from trustbatch.plan.hardware import Hardware, find_hardware
from trustbatch.plan.memory import BFLOAT16, CACHE, FLOAT32, Lora, MemoryPlan, Part, Phase, Setting
from trustbatch.plan.outline import Activations, ModelOutline, measure_activations
from trustbatch.plan.token_counts import PromptLength, cached_tokens, longest_prompt
from trustbatch.plan.weights import Weights
from trustbatch.rollout.engine import EngineInfo
from trustbatch.rollout.native.workspace import (
    MIN_PREFILL_TOKENS,
    PREFILL_TOKENS,
    bytes_per_prompt_token,
)
from trustbatch.rollout.registry import engine_info
from trustbatch.tasks import Task
from trustbatch.training.host_memory import MAX_WRITING
from trustbatch.training.linear_logprobs import CPU_SLICE_BYTES, GPU_SLICE_BYTES
from trustbatch.weight_sync.publications import keeps_on_gpu

ADAMW_STATES = 2 * FLOAT32
EIGHT_BIT_STATES = 2 * (1 + FLOAT32 / 256)
"""two bytes per parameter, and a scale per block of 256"""
COMPILED = 0.58
"""share of a layer's activations that torch.compile's partitioner saves: 0.576 at the widths of
Qwen3-0.6B and 0.587 at those of 4B, counted with the backend aot_eager_decomp_partition"""
GATHERED_LAYERS = 3
"""in the autocast precision: one in use, one being gathered, and its buffer"""
REDUCED_LAYERS = 2
"""layers whose gradients are being reduced over the ranks, in float32"""
ALL_LOGIT_COPIES = 5
"""float32 copies of all logits for models that transform them, as measured"""
LEAST_ROWS = 8
"""sequences that must have room at a time, or a run would hardly move"""
TRUNCATED_LOGIT_COPIES = 8
"""copies of the logits of all rows if top-k or top-p sorts them"""


@dataclass(frozen=True)
class Estimator:
    """Estimates one run under any setting; measurements are made once."""

    config: Config
    hardware: Hardware
    prompt: PromptLength

    @classmethod
    def of(cls, config: Config, hardware: Hardware, task: Task | None) -> "Estimator":
        """Return the estimator of a run, with the prompt length of the task if one is given."""
        return cls(config, hardware, longest_prompt(config, task))

    def plan(self, setting: Setting | None = None) -> MemoryPlan:
        """Return the memory of both phases; default: the settings of the configuration."""
        if setting is None:
            setting = Setting.of(self.config, num_gpus=self.hardware.num_gpus)
        generate, train = self._phases(setting)
        return MemoryPlan(
            phases=tuple(
                Phase(name, tuple(part for part in parts if part.num_bytes))
                for name, parts in (("generate", generate), ("train", train))
            ),
            capacity=self.hardware.capacity,
            is_gpu=self.hardware.is_gpu,
            num_gpus=setting.num_gpus,
            prompt_tokens=self.prompt.num_tokens,
            is_prompt_assumed=self.prompt.is_assumed,
        )

    @cached_property
    def outline(self) -> ModelOutline:
        """The trained model."""
        model = self.config.model
        return ModelOutline.read(model.name, trust_remote_code=model.trust_remote_code)

    def activations(self, setting: Setting) -> Activations:
        """Return the activations that its layers save, with adapters where it has any."""
        lora, frozen = setting.lora, self.weights(setting).frozen_bytes
        key = (lora, frozen)
        if key not in self._measured:
            self._measured[key] = measure_activations(
                self.outline,
                precision=self._autocast_dtype,
                trust_remote_code=self.config.model.trust_remote_code,
                lora=lora,
                frozen=torch.bfloat16 if frozen == BFLOAT16 else torch.float32,
            )
        return self._measured[key]

    @cached_property
    def _measured(self) -> dict[tuple[Lora | None, int], Activations]:
        return {}

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and completion: the smallest possible micro-batch."""
        return self.prompt.num_tokens + self.config.rollout.max_tokens

    @cached_property
    def demand(self) -> Demand | None:
        """Ray resources of a run with [cluster]."""
        if self.config.cluster is None:
            return None
        num_gpus = self.hardware.num_available if self.hardware.is_gpu else 0
        return Demand.of(self.config, seen_by_ray(self.config, num_gpus))

    @property
    def shares_gpu(self) -> bool:
        """Whether the engines of a cluster share the only GPU with the trainer."""
        is_alone = self.hardware.is_gpu and self.hardware.num_available == 1
        return is_alone and self.demand is not None and not self.demand.trainers.size

    def _phases(self, setting: Setting) -> tuple[list[Part], list[Part]]:
        """Return the parts of generation and of training."""
        trainer, generate = self._trainer(setting), self._generate(setting)
        train = max(self._train(setting), key=lambda parts: sum(p.num_bytes for p in parts))
        if self.demand is None:
            engine = [
                Part("engine's weights", self._engine_weights(setting)),
                Part("second policies", self._second_policies(setting)),
            ]
            return [*trainer, *engine, *generate], [*trainer, *engine, *train]
        engines = self._engines_per_gpu(self.demand.engines, setting, generate)
        if self.shares_gpu:
            return [*trainer, *engines], [*trainer, *engines, *train]
        return engines, [*trainer, *train, Part("published weights", self._published(setting))]

    def _published(self, setting: Setting) -> float:
        """Bytes of the weight versions that the first trainer's GPU keeps for the engines."""
        if not setting.direct_transfer or not self.hardware.is_gpu:
            return 0.0
        num_bytes = published_bytes(self.config, self.outline)
        memory = self.hardware.memory
        assert self.config.cluster is not None
        method = self.config.cluster.weight_transfer
        return num_bytes if keeps_on_gpu(method, num_bytes, gpu_memory=memory) else 0.0

    def _engines_per_gpu(
        self, bundles: Bundles, setting: Setting, generate: list[Part]
    ) -> list[Part]:
        """Parts of the engines that share one GPU; each has its own policy.

        An engine that copies the policy keeps it in host memory, and reserves what it needs.
        """
        number = min(math.floor(1 / bundles.gpus), bundles.size) if 0 < bundles.gpus < 1 else 1
        alone = replace(setting, num_gpus=1)
        if not self._engine.loads_adapters(self._engine.table(self.config.rollout)):
            alone = replace(alone, lora=None, quantization=None)
        own = self.weights(alone).in_trainer
        of_one = [
            Part("engine's parameters", self._engine.shares_parameters * own),
            Part("engine's weights", self._engine_weights(alone)),
            Part("second policies", self._second_policies(setting)),
            *generate,
        ]
        return [part.times(number) for part in of_one]

    def _trainer(self, setting: Setting) -> list[Part]:
        """Parts that the trainer keeps in both phases."""
        on_device, weights = self._on_device(setting), self.weights(setting)
        states = EIGHT_BIT_STATES if setting.eight_bit_optimizer else ADAMW_STATES
        is_moved = setting.optimizer_offload and self.hardware.is_gpu and not setting.is_sharded
        with_states = 0.0 if is_moved else on_device
        return [
            Part("parameters", weights.in_trainer * on_device),
            Part("optimizer", states * weights.trained * with_states),
            Part("reference", FLOAT32 * self._reference_parameters(setting) * on_device),
        ]

    def weights(self, setting: Setting, outline: ModelOutline | None = None) -> Weights:
        """Return the sizes of the weights of the trained model, or of another one."""
        return Weights(
            outline or self.outline,
            setting,
            products=self._autocast_dtype,
            engine_precision=self._engine_precision,
            is_gpu=self.hardware.is_gpu,
        )

    def _on_device(self, setting: Setting) -> float:
        """Return the share of what is divided over ranks that is in the memory of each."""
        return 0.0 if setting.cpu_offload and self.hardware.is_gpu else 1 / setting.num_gpus

    def _gradients(self, setting: Setting) -> float:
        return FLOAT32 * self.weights(setting).trained * self._on_device(setting)

    def _reference_parameters(self, setting: Setting) -> int:
        if not self.config.objective.build().reference_kl_coef:
            return 0
        name = self.config.training.reference_model
        if name is None or name == self.config.model.name:
            # with LoRA, the policy without its adapters is the reference
            return self.outline.num_parameters if setting.lora is None else 0
        return ModelOutline.read(
            name, trust_remote_code=self.config.model.trust_remote_code
        ).num_parameters

    def _second_policies(self, setting: Setting) -> float:
        if not self._engine.shares_parameters:
            return 0.0  # they are in host memory
        outlines = [
            ModelOutline.read(second.model, trust_remote_code=second.trust_remote_code)
            for second in self.config.rollout.policies
        ]
        whole = replace(setting, num_gpus=1, lora=None, quantization=None)
        return sum(
            FLOAT32 * each.num_parameters + self.weights(whole, each).in_engine for each in outlines
        )

    def _engine_weights(self, setting: Setting) -> float:
        """Bytes that an engine on the trainer's parameters keeps beside them."""
        if not self._engine.shares_parameters:
            return 0.0
        if not setting.is_sharded:
            return self.weights(setting).in_engine
        # a full model of its own, with linear layers in the trainer's precision
        outline = self.outline
        if setting.lora is not None:
            return self.weights(setting).frozen
        images = self.weights(setting).in_engine
        replica = FLOAT32 * outline.num_parameters
        if self._autocast_dtype is not None:
            replica -= (FLOAT32 - BFLOAT16) * outline.linear_weights
            if self._engine_precision == "bfloat16" and self.hardware.is_gpu and images:
                images = BFLOAT16 * outline.head_weights  # rounded layers need no copy
        return replica + images

    @property
    def _autocast_dtype(self) -> torch.dtype | None:
        precision = self.config.model.precision
        if precision == "auto":
            precision = "bfloat16" if self.hardware.is_gpu else "float32"
        return None if precision == "float32" else getattr(torch, precision)

    @property
    def _engine_precision(self) -> str:
        precision = self.config.rollout.precision
        if precision != "auto":
            return precision
        return "float32" if self._autocast_dtype is None else "bfloat16"

    def _generate(self, setting: Setting) -> list[Part]:
        reserved = self._reserved()
        if reserved is not None:
            return [reserved]
        rollout, outline = self.config.rollout, self.outline
        num_rows = min(self._rows_per_call(setting), setting.max_sequences)
        rows_per_prompt = min(rollout.samples_per_prompt, num_rows)
        num_prompts = math.ceil(num_rows / rows_per_prompt)
        tokens = cached_tokens(
            num_prompts=num_prompts,
            rows_per_prompt=rows_per_prompt,
            prompt_tokens=self.prompt.num_tokens,
            max_tokens=rollout.max_tokens,
            paged=self.hardware.is_gpu and outline.is_decoded_fast,
        )
        in_cache = outline.cached_numbers * _itemsize(self._engine_precision)
        if setting.fp8_cache and self.hardware.is_gpu:
            in_cache = outline.cached_numbers + FLOAT32 * outline.cached_vectors  # and scales
        # while the cache grows, one layer's keys or values exist twice
        growing = 1 + 0.5 / outline.num_layers
        cache = tokens * in_cache * growing
        least = min(num_rows, LEAST_ROWS) * self.longest_sequence * in_cache * growing
        truncates = rollout.top_k > 0 or rollout.top_p < 1.0
        copies = TRUNCATED_LOGIT_COPIES if truncates else 2
        prompts = min(PREFILL_TOKENS, num_prompts * self.prompt.num_tokens)
        per_token = self.activations(setting).layer
        if self.has_pages:
            per_token = bytes_per_prompt_token(outline.config)
        return [
            Part(CACHE, cache, least=min(least, cache)),
            Part("logits", copies * FLOAT32 * num_rows * outline.vocabulary),
            Part(
                "prompts", prompts * per_token, least=min(prompts, MIN_PREFILL_TOKENS) * per_token
            ),
            # the layers with the same input are one product: gate and up are the largest
            Part("one layer, dequantized", 2 * self.weights(setting).dequantized),
        ]

    @property
    def has_pages(self) -> bool:
        """Whether the native engine's own decoder samples, whose cache can have FP8 numbers."""
        return self._engine.shares_parameters and self.outline.is_decoded_fast

    def _rows_per_call(self, setting: Setting) -> int:
        """Number of sequences per call of an engine."""
        rollout, cluster = self.config.rollout, self.config.cluster
        if cluster is None:
            num_sequences = rollout.prompts_per_step * rollout.samples_per_prompt
            return math.ceil(num_sequences / setting.num_gpus)
        share = math.ceil(rollout.prompts_per_step / cluster.engines)
        return (rollout.prompts_per_call or share) * rollout.samples_per_prompt

    @property
    def _engine(self) -> EngineInfo:
        return engine_info(self.config.rollout.engine)

    def _reserved(self) -> Part | None:
        """Return what engines reserve, of the policy and of second ones; None if nothing."""
        rollout, info = self.config.rollout, self._engine
        in_one = info.reserved_bytes(info.table(rollout), self.hardware.memory)
        if in_one is None:
            return None
        return Part(info.label, in_one * (1 + len(rollout.policies)))

    def _train(self, setting: Setting) -> list[list[Part]]:
        """Return the parts at each moment of an update that can be the peak."""
        rollout, training = self.config.rollout, self.config.training
        num_sequences = rollout.prompts_per_step * rollout.samples_per_prompt
        in_step = num_sequences * self.longest_sequence / training.mini_batches / setting.num_gpus
        tokens = min(max(setting.micro_batch_tokens, self.longest_sequence), math.ceil(in_step))
        parts = []
        reserved = self._reserved()
        if reserved is not None and not setting.engine_sleeps and self.demand is None:
            parts.append(reserved)
        gathered = Part("gathered layers", self._gathered(setting))
        gradients = Part("gradients", self._gradients(setting))
        saved = Part("activations", tokens * self._saved_per_token(setting))
        head = Part("log-probs", self._log_probs(tokens, setting))
        # saved with the activations: with checkpointing, those of one layer at a time
        num_rounded = 1 if setting.gradient_checkpointing else self.outline.num_layers
        rounded_layer = 0.0 if setting.is_sharded else self.activations(setting).rounded_layer
        rounded = Part("rounded weights", rounded_layer * num_rounded)
        dequantized = Part("one layer, dequantized", self.weights(setting).dequantized)
        moments = [
            # the head's backward pass, with the activations of all layers
            [*parts, gathered, saved, head, rounded, dequantized],
            # the end: all gradients, and the last one before it is accumulated
            [*parts, gathered, gradients, Part("last gradient", self._head_gradient(setting))],
        ]
        if tokens < in_step:  # gradients of earlier micro-batches are accumulated
            moments[0].append(gradients)
        return moments

    def _saved_per_token(self, setting: Setting) -> float:
        """Bytes saved per token by all layers; with checkpointing, by their inputs and one."""
        measured = self.activations(setting)
        in_layer = measured.layer * (COMPILED if setting.compiled else 1.0)
        num_inputs = self.outline.num_layers
        if not setting.gradient_checkpointing:
            return in_layer * num_inputs + measured.around
        if setting.activation_offload and self.hardware.is_gpu:
            num_inputs = min(num_inputs, 1 + MAX_WRITING)
        return FLOAT32 * self.outline.width * num_inputs + in_layer + measured.around

    def _log_probs(self, tokens: int, setting: Setting) -> float:
        """Bytes of the head's backward pass: a slice of logits, and gradients of its inputs."""
        outline = self.outline
        num_sampled = tokens * self._sampled_fraction(tokens)
        logits = FLOAT32 * num_sampled * outline.vocabulary
        if not outline.has_plain_logits:
            return ALL_LOGIT_COPIES * logits
        largest = GPU_SLICE_BYTES if self.hardware.is_gpu else CPU_SLICE_BYTES
        rounded = 1.0 if self._autocast_dtype is None else BFLOAT16 / FLOAT32
        slices = min(logits, largest) * (1 + rounded)
        hidden = num_sampled * outline.width * (2 * FLOAT32 + BFLOAT16)
        return slices + hidden + self._head_gradient(setting)

    def _sampled_fraction(self, tokens: int) -> float:
        """Return the share of sampled tokens in a micro-batch, which shared prompts raise."""
        rollout, prompt = self.config.rollout, self.prompt.num_tokens
        lengths = [self.longest_sequence] * rollout.samples_per_prompt
        is_shared = self.config.training.share_prompts and sharing_pays(
            prompt=prompt, lengths=lengths, copies_prompts=self.hardware.is_gpu
        )
        fitting = (tokens - prompt) // rollout.max_tokens if is_shared else 1
        sampled = min(max(fitting, 1), rollout.samples_per_prompt) * rollout.max_tokens
        return sampled / (prompt + sampled)

    def _head_gradient(self, setting: Setting) -> float:
        """Bytes of a gradient of the head before it is accumulated or reduced."""
        return 0.0 if setting.lora is not None else FLOAT32 * self.outline.head_weights

    def _gathered(self, setting: Setting) -> float:
        """Bytes of gathered parameters and gradients of sharded layers."""
        if not setting.is_sharded:
            return 0.0
        outline = self.outline
        in_layers = FLOAT32 if self._autocast_dtype is None else BFLOAT16
        gathered = GATHERED_LAYERS * in_layers * outline.largest_layer
        gathered += FLOAT32 * outline.around_layers  # until the step's backward pass has ended
        if setting.lora is None:
            gathered += (in_layers + REDUCED_LAYERS * FLOAT32) * outline.largest_layer
            gathered += FLOAT32 * outline.around_layers
        return gathered


def estimate_memory(
    config: Config,
    *,
    task: Task | None = None,
    setting: Setting | None = None,
    num_gpus: int | None = None,
    gpu_memory: float | None = None,
) -> MemoryPlan:
    """Estimate the memory of a run, on this machine or on `num_gpus` GPUs of `gpu_memory` bytes.

    The prompt length is measured on the task's prompts, or assumed without a task.
    """
    hardware = find_hardware(config, num_gpus=num_gpus, gpu_memory=gpu_memory)
    return Estimator.of(config, hardware, task).plan(setting)


def _itemsize(precision: str) -> int:
    return FLOAT32 if precision == "float32" else BFLOAT16
