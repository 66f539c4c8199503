"""What to change if memory is short, in the order of the costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trustbatch.plan.estimate import Estimator
from trustbatch.plan.memory import Lora, Setting, size
from trustbatch.rollout.registry import engine_info

LORA_RANK = 16
SMALLEST = "nf4"
"""format of frozen weights"""
MAX_GPUS = 64
MIN_SEQUENCES = 16
MIN_MICRO_BATCH_TOKENS = 2048
"""fewer do not keep a GPU busy"""
MIN_SAVING = 0.02
"""share of the memory; smaller savings are not suggested"""


@dataclass(frozen=True)
class Change:
    """One suggested change."""

    words: str
    field: str
    """field of `Setting`"""
    value: Any
    is_key: bool = True
    """whether it is a key of the configuration"""


@dataclass(frozen=True)
class Advice:
    """Changes that together bring a run below a limit, or as near to it as possible."""

    changes: tuple[Change, ...]
    saved: float
    needed: float
    """bytes after the changes"""
    is_enough: bool

    def __str__(self) -> str:
        if not self.changes:
            return "choose a smaller model or a device with more memory, since no setting helps"
        saving = f"{self._words()}, which saves about {size(self.saved)}"
        if self.is_enough:
            return saving
        return (
            f"{saving}; that still needs {size(self.needed)}, so choose a smaller model or a "
            "device with more memory too"
        )

    def _words(self) -> str:
        settings = [change.words for change in self.changes if change.is_key]
        words = [change.words for change in self.changes if not change.is_key]
        if settings:
            *first, last = settings
            words.insert(0, f"set {', '.join(first)} and {last}" if first else f"set {last}")
        return " and ".join(words)


def advise(
    estimator: Estimator, setting: Setting, *, limit: float, phase: str | None = None
) -> Advice:
    """Find the cheapest changes that suffice, for one phase or for all of them."""

    def changed(changes: Sequence[Change]) -> Setting:
        return replace(setting, **{change.field: change.value for change in changes})

    def needed(changes: Sequence[Change]) -> list[float]:
        phases = estimator.plan(changed(changes)).phases
        return [each.needed for each in phases if phase in (None, each.name)]

    def excess(changes: Sequence[Change]) -> float:
        # of both phases: a change that helps the smaller one is needed too
        return sum(max(each - limit, 0.0) for each in needed(changes))

    before = max(needed([]))
    chosen: list[Change] = []
    current = excess(chosen)
    for change in _changes(estimator, setting):
        if current == 0.0:
            break
        candidate = changed([*chosen, change])
        if candidate.quantization is not None and candidate.is_sharded:
            continue  # a run refuses it
        after = excess([*chosen, change])
        if current - after > MIN_SAVING * min(limit, before) or after == 0.0:
            chosen.append(change)
            current = after
    # later changes may have made earlier ones unnecessary: the dearest of them first
    for change in reversed(chosen):
        rest = [each for each in chosen if each is not change]
        if excess(rest) <= current:
            chosen = rest
    last_of_each = {change.field: change for change in chosen}
    after = max(needed(chosen))
    return Advice(tuple(last_of_each.values()), before - after, after, is_enough=after <= limit)


def _changes(estimator: Estimator, setting: Setting) -> Iterator[Change]:
    """Yield single changes, the cheapest first: those that change what is trained come last."""
    config, hardware = estimator.config, estimator.hardware
    sleep_key = engine_info(config.rollout.engine).sleep_key
    if sleep_key is not None and config.cluster is None and not setting.engine_sleeps:
        yield Change(f"{sleep_key} = true", "engine_sleeps", True)
    if setting.direct_transfer:
        words = 'cluster.weight_transfer = "shared_memory"'
        yield Change(words, "direct_transfer", False)
    longest = estimator.longest_sequence
    for tokens in _halved(setting.micro_batch_tokens, max(longest, MIN_MICRO_BATCH_TOKENS)):
        yield _micro_batch(tokens)
    for rows in _halved(setting.max_sequences, MIN_SEQUENCES):
        yield Change(f"rollout.max_sequences = {rows}", "max_sequences", rows)
    if not setting.gradient_checkpointing:
        yield Change("training.gradient_checkpointing = true", "gradient_checkpointing", True)
    more_gpus = [
        _more_trainers(number, is_cluster=config.cluster is not None)
        for number in _doubled(setting.num_gpus)
        if hardware.is_gpu
    ]
    demand = estimator.demand
    of_engines = 0.0 if demand is None else demand.engines.size * demand.engines.gpus
    for_training = hardware.num_available - of_engines
    yield from (change for change in more_gpus if change.value <= for_training)
    if hardware.is_gpu:
        yield from _offloads(setting)
    for tokens in _halved(min(setting.micro_batch_tokens, MIN_MICRO_BATCH_TOKENS), longest):
        yield _micro_batch(tokens)
    if not setting.eight_bit_optimizer and setting.lora is None:
        yield Change('training.optimizer = "adamw_8bit"', "eight_bit_optimizer", True)
    has_fp8_cache = estimator.has_pages and hardware.converts_fp8
    if hardware.is_gpu and has_fp8_cache and not setting.fp8_cache:
        yield Change('rollout.kv_precision = "fp8"', "fp8_cache", True)
    if setting.lora is None:
        yield Change(f"model.lora.rank = {LORA_RANK}", "lora", Lora(rank=LORA_RANK))
    if setting.quantization is None:
        yield Change(f'model.quantization = "{SMALLEST}"', "quantization", SMALLEST)
    if hardware.num_available > 1:  # who has one GPU is not told to get more
        yield from (change for change in more_gpus if change.value > for_training)


def _offloads(setting: Setting) -> Iterator[Change]:
    """Yield what can go to host memory."""
    if setting.is_sharded:
        if not setting.cpu_offload:
            yield Change("training.cpu_offload = true", "cpu_offload", True)
    elif not setting.optimizer_offload and not setting.eight_bit_optimizer:
        yield Change("training.optimizer_offload = true", "optimizer_offload", True)
    if not setting.activation_offload:
        yield Change("training.activation_offload = true", "activation_offload", True)


def _more_trainers(number: int, *, is_cluster: bool) -> Change:
    if is_cluster:
        return Change(f"cluster.trainers = {number}", "num_gpus", number)
    words = f"train on {number} GPUs (torchrun --nproc-per-node={number})"
    return Change(words, "num_gpus", number, is_key=False)


def _micro_batch(tokens: int) -> Change:
    return Change(f"training.micro_batch_tokens = {tokens}", "micro_batch_tokens", tokens)


def _halved(number: int, least: int) -> Iterator[int]:
    while number > least:
        number = max(number // 2, least)
        yield number


def _doubled(number: int) -> Iterator[int]:
    while number < MAX_GPUS:
        number *= 2
        yield number
