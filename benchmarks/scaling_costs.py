"""What things cost in the simulation of scaling: measured figures, and what is made of them.

Every constant names its source. MEASURED ones are figures of this repository, all of one NVIDIA
H200; EXTRAPOLATED ones are scaled from those by the reason given; ASSUMED ones are neither.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# MEASURED, docs/LOG.md "the native engine beside vLLM ... again": 512 rows of 64 + 512 tokens
NATIVE_TOKENS_PER_SECOND = 71_140.0
NATIVE_ROWS, NATIVE_MEAN_CONTEXT = 512, 64 + 256
# MEASURED, docs/LOG.md "rollouts on one GPU beside vLLM": keys and values are read at this speed,
# and 512 steps spend 0.65 s in matrix products
CACHE_BYTES_PER_SECOND = 4.0e12
NATIVE_PRODUCT_SECONDS = 0.65 / 512
# MEASURED, docs/LOG.md "decoding kernels on one GPU": a plain sum reads at this speed
MEMORY_BYTES_PER_SECOND = 4.37e12
# MEASURED, benchmarks/RESULTS.md "Trainer alone": 4B, GRPO, 4,096 tokens, compiled
TRAINER_MFU = 0.483
PEAK_FLOPS = 989e12
# MEASURED, the same section: P3O took 4.7 s where GRPO took 3.80 s (4B; 2.74 and 2.28 s at 1.7B,
# 16,384)
P3O_TO_GRPO = 4.7 / 3.80
# EXTRAPOLATED: layers computed again by gradient checkpointing, one forward pass in a step of
# three. 4B with 16,384 tokens did not fit one GPU without (RESULTS.md), and a micro-batch is no
# shorter than a sequence.
RECOMPUTING = 4 / 3
RECOMPUTE_ABOVE_TOKENS = 16_384
# MEASURED, docs/engines/vllm.md: an update of 0.6B through shared memory took 1.2 and 1.0 s, ipc
# 0.15 s
SHARED_MEMORY_UPDATE_SECONDS = 1.1
# ASSUMED: half of it is the trainer's (to the host) and half the engine's (from the host)
TRAINER_SHARE_OF_UPDATE = 0.5
# ASSUMED: 8 completions of 8 tokens and one forward pass
CANARY_SECONDS = 0.1
# ASSUMED: of an H200's 139 GiB, what remains for keys and values beside weights, graphs and
# activations
CACHE_BYTES = 110e9


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes that decide what a Qwen3 costs, as in qwen3_shapes.py; embeddings are tied."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int = 128
    vocabulary: int = 151_936

    @property
    def parameters(self) -> float:
        """All that is multiplied for each token, the head included."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.key_value_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return float(self.layers * layer + self.vocabulary * self.hidden)

    @property
    def cache_bytes(self) -> float:
        """Keys and values of one token in bfloat16."""
        return float(self.layers * 2 * self.key_value_heads * self.head_dim * 2)


QWEN3_06B = ModelShape(
    name="0.6B", hidden=1024, intermediate=3072, layers=28, heads=16, key_value_heads=8
)
QWEN3_4B = ModelShape(
    name="4B", hidden=2560, intermediate=9728, layers=36, heads=32, key_value_heads=8
)


@dataclass(frozen=True, kw_only=True)
class EngineCosts:
    """One decoding step takes `step + rows * row + context * cached` seconds.

    `context` is the number of tokens, prompts included, that all running rows have behind them.
    """

    step: float
    row: float
    cached: float
    seats: int
    """rows that may run at a time"""

    def step_seconds(self, rows: float, context: float) -> float:
        """Return the seconds of one step."""
        return self.step + rows * self.row + context * self.cached


@dataclass(frozen=True, kw_only=True)
class TrainerCosts:
    """Seconds of one GPU for a sequence of n tokens: n * (token + n * pair)."""

    token: float
    pair: float
    publish: float
    """seconds in which the trainer hands a version over"""

    def sequence_seconds(self, lengths: np.ndarray) -> np.ndarray:
        """Return the seconds of each sequence, elementwise."""
        return lengths * (self.token + lengths * self.pair)

    def batch_seconds(self, lengths: np.ndarray, num_gpus: int) -> float:
        """Return the seconds of a step: divided evenly, but no sequence is divided."""
        seconds = self.sequence_seconds(lengths.astype(np.float64).ravel())
        return max(float(seconds.sum()) / num_gpus, float(seconds.max()))


@dataclass(frozen=True, kw_only=True)
class Costs:
    """All that the simulation charges for."""

    engine: EngineCosts
    trainer: TrainerCosts
    load: float
    """seconds in which an engine takes a version over, its canary included"""


def engine_costs(shape: ModelShape, *, seats: int) -> EngineCosts:
    """Scale the native engine's measured step at 0.6B to another shape (EXTRAPOLATED).

    Weights are read at the memory's speed. What the products of 512 rows took beyond that is the
    rows' arithmetic, and goes with the parameters. What is left of the measured step (norms,
    rotations, samples, the host) is charged to every step and goes with the number of layers.
    """
    base = QWEN3_06B
    measured = NATIVE_ROWS / NATIVE_TOKENS_PER_SECOND
    cache = NATIVE_ROWS * NATIVE_MEAN_CONTEXT * base.cache_bytes / CACHE_BYTES_PER_SECOND
    rest = measured - cache - NATIVE_PRODUCT_SECONDS
    read = 2 * base.parameters / MEMORY_BYTES_PER_SECOND
    row = (NATIVE_PRODUCT_SECONDS - read) / NATIVE_ROWS
    return EngineCosts(
        step=2 * shape.parameters / MEMORY_BYTES_PER_SECOND + rest * shape.layers / base.layers,
        row=row * shape.parameters / base.parameters,
        cached=shape.cache_bytes / CACHE_BYTES_PER_SECOND,
        seats=seats,
    )


def trainer_costs(shape: ModelShape, *, longest: int, objective: str = "p3o") -> TrainerCosts:
    """Scale the trainer's measured MFU at 4B and 4,096 tokens to other lengths (EXTRAPOLATED)."""
    rate = PEAK_FLOPS * TRAINER_MFU
    factor = P3O_TO_GRPO if objective == "p3o" else 1.0
    if longest > RECOMPUTE_ABOVE_TOKENS:
        factor *= RECOMPUTING
    # the operations that benchmarks/train_gpu.py counts: 6 a parameter, causal attention three
    # times
    attention = 3 * 4 * shape.layers * shape.heads * shape.head_dim / 2
    return TrainerCosts(
        token=factor * 6 * shape.parameters / rate,
        pair=factor * attention / rate,
        publish=update_seconds(shape) * TRAINER_SHARE_OF_UPDATE,
    )


def update_seconds(shape: ModelShape) -> float:
    """Scale the measured update through shared memory by the size of the model (EXTRAPOLATED)."""
    return SHARED_MEMORY_UPDATE_SECONDS * shape.parameters / QWEN3_06B.parameters


def fitting_seats(shape: ModelShape, groups: Sequence[Sequence[int]], *, prompt: int) -> int:
    """Return the rows whose keys and values fit when they all start together.

    Rows of unequal length never have their full lengths at the same time: the most is needed at the
    position t where t times the share of rows that are longer is largest.
    """
    lengths = np.sort(np.concatenate([np.asarray(group) for group in groups]))
    alive = 1.0 - np.arange(len(lengths)) / len(lengths)
    peak = float(((prompt + lengths) * alive).max())
    return max(int(CACHE_BYTES / shape.cache_bytes / peak), 1)


def model_costs(
    shape: ModelShape, groups: Sequence[Sequence[int]], *, prompt: int, max_sequences: int = 512
) -> Costs:
    """Return what a model costs whose completions have such lengths."""
    longest = max(max(group) for group in groups)
    seats = min(fitting_seats(shape, groups, prompt=prompt), max_sequences)
    return Costs(
        engine=engine_costs(shape, seats=seats),
        trainer=trainer_costs(shape, longest=longest + prompt),
        load=update_seconds(shape) * (1 - TRAINER_SHARE_OF_UPDATE) + CANARY_SECONDS,
    )
