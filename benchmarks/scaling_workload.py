"""The batches that are simulated: real lengths, scaled, dealt to engines and priced."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scaling_costs import QWEN3_4B, Costs, EngineCosts, ModelShape, model_costs
from scaling_decoding import chunk_ends
from scaling_schedule import Batch, Chunk

LENGTHS = Path(__file__).parent / "data" / "solution_lengths.json"
SAMPLES = 8
"""completions of a prompt"""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and how long its completions are."""

    name: str
    groups: np.ndarray
    """lengths of real groups, scaled, [groups, samples]"""
    costs: Costs
    prompt: int = 200
    """tokens of a prompt"""

    def sample(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Sample `count` groups with replacement, [count, samples]."""
        return self.groups[generator.integers(len(self.groups), size=count)]


def read_lengths(path: Path = LENGTHS) -> np.ndarray:
    """Return what solution_lengths.py wrote, [groups, samples]."""
    lengths = np.array(json.loads(path.read_text())["lengths"], dtype=np.int64).ravel()
    return lengths[: len(lengths) // SAMPLES * SAMPLES].reshape(-1, SAMPLES)


def scaled_workload(
    real: np.ndarray, *, mean: int, shape: ModelShape = QWEN3_4B, prompt: int = 200
) -> Workload:
    """Scale real lengths to a mean; the distribution keeps its shape."""
    groups = np.maximum(np.rint(real * (mean / real.mean())), 1).astype(np.int64)
    return Workload(
        name=f"{shape.name}, {mean:,} tokens",
        groups=groups,
        costs=model_costs(shape, groups.tolist(), prompt=prompt),
        prompt=prompt,
    )


def equal_workload(workload: Workload) -> Workload:
    """Give every completion the mean length: without stragglers."""
    mean = round(float(workload.groups.mean()))
    groups = np.full_like(workload.groups, mean)
    return Workload(
        name=workload.name + ", all equal",
        groups=groups,
        costs=workload.costs,
        prompt=workload.prompt,
    )


def deal(groups: np.ndarray, *, num_chunks: int) -> list[np.ndarray]:
    """Split groups into chunks of nearly equal size, with at least one group each."""
    return np.array_split(groups, min(num_chunks, len(groups)))


def price_chunks(costs: EngineCosts, chunks: Sequence[np.ndarray], *, prompt: int) -> list[Chunk]:
    """Return the time of each chunk on an engine; chunks of one size are computed together."""
    priced: list[Chunk | None] = [None] * len(chunks)
    by_size: dict[int, list[int]] = {}
    for number, chunk in enumerate(chunks):
        by_size.setdefault(len(chunk), []).append(number)
    for numbers in by_size.values():
        all_ends = chunk_ends(
            costs, np.stack([chunks[number] for number in numbers]), prompt=prompt
        )
        for number, ends in zip(numbers, all_ends, strict=True):
            priced[number] = Chunk.of(ends)
    return [chunk for chunk in priced if chunk is not None]


def make_batches(
    workload: Workload,
    *,
    count: int,
    batch_groups: int,
    engines: int,
    trainers: int,
    chunks_per_engine: int = 1,
    seed: int = 0,
) -> list[Batch]:
    """Sample batches; lengths depend on the seed alone, not on the chunks."""
    generator = np.random.default_rng(seed)
    batches = []
    for _ in range(count):
        groups = workload.sample(generator, batch_groups)
        chunks = deal(groups, num_chunks=engines * chunks_per_engine)
        batches.append(
            Batch(
                chunks=price_chunks(workload.costs.engine, chunks, prompt=workload.prompt),
                train=workload.costs.trainer.batch_seconds(groups + workload.prompt, trainers),
            )
        )
    return batches
