"""Discrete-event simulation of the schedulers: who waits for whom, and for how long.

`simulate_pipeline` is the asynchronous loop's deterministic pipeline. `simulate_synchronous` is the
synchronous loop, `rollout.lag` included.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Chunk:
    """Requests that an engine answers in one go."""

    ends: np.ndarray
    """when its completions end, in seconds from the chunk's start"""
    seconds: float
    """when the last one ends"""
    row_seconds: float
    """seconds that its completions run, summed"""

    @classmethod
    def of(cls, ends: np.ndarray) -> "Chunk":
        """Make one of its ends."""
        flat = ends.ravel()
        return cls(flat, float(flat.max()), float(flat.sum()))


@dataclass(frozen=True)
class Batch:
    """One batch of completions, as far as time is concerned."""

    chunks: Sequence[Chunk]
    train: float
    """seconds in which the trainer trains on it"""


@dataclass
class Timeline:
    """When things happened; index b - 1 is batch b."""

    engines: int
    lag_bound: int
    sampled_from: list[float] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """version that sampled the batch"""
    taken: list[float] = field(default_factory=list)
    """when the trainer took the batch"""
    published: list[float] = field(default_factory=list)
    """when the version made of the batch was out"""
    most_pending: int = 0
    """most batches that were sampled and not yet taken, or being sampled, at any time"""
    mostly_sampled: list[float] = field(default_factory=list)
    """when 90% of the batch's completions had ended"""
    engine_work: list[tuple[float, float]] = field(default_factory=list)
    """from and to of everything that an engine did"""
    row_seconds: list[tuple[float, float]] = field(default_factory=list)
    """for each chunk when it started, and the seconds that its rows ran, summed"""


@dataclass(frozen=True)
class Steady:
    """Means over the steps after the pipeline has filled."""

    step: float
    trainer_idle: float
    engine_idle: float
    lag_mean: float
    lag_max: int
    tail: float
    """share of a batch's sampling time in which its last tenth of completions is awaited"""
    rows: float
    """mean number of rows that run on an engine, idle time included"""


def simulate_pipeline(
    batches: Sequence[Batch],
    *,
    engines: int,
    lag: int,
    steps: int,
    publish: float,
    load: float,
    in_flight: int = 1,
) -> Timeline:
    """Run `steps` steps of the asynchronous loop.

    The producer deals the chunks of a batch to idle engines, oldest batch first. It starts batch b
    when the version max(0, b - 1 - lag) is out and fewer than `in_flight` batches are being sampled
    (the loop: 1). An engine that has another version loads first. The trainer takes batches in
    their order, trains, and publishes. There are at most lag + 1 batches between the producer's
    start and the trainer: the version that a batch needs sees to that.

    Args:
        batches: what is sampled; more than `steps`, so that the producer is as busy at the end as
        before. engines: how many take chunks. lag: the versions by which a batch may be older than
        the policy it trains. steps: how many batches are trained. publish: seconds in which the
        trainer hands a version over. load: seconds in which an engine takes a version over.
        in_flight: how many batches may be sampled at a time.
    """
    line = Timeline(engines=engines, lag_bound=lag)
    events: list[tuple[float, int, str, int]] = []  # time, order, what, which
    chunks: deque[tuple[int, Chunk]] = deque()
    idle = deque(range(engines))
    loaded = [0] * engines
    unfinished: dict[int, int] = {}  # batch, chunks of it that are not sampled
    begun: dict[int, list[tuple[float, Chunk]]] = {}
    doing = [0] * engines  # batch that the engine samples for
    version, started, trained, training, order = 0, 0, 0, False, 0
    ready: set[int] = set()
    now = 0.0

    def at(time: float, what: str, which: int) -> None:
        nonlocal order
        order += 1
        heapq.heappush(events, (time, order, what, which))

    while trained < steps:
        # the producer
        while (
            started < len(batches)
            and len(unfinished) < in_flight
            and version >= max(0, started - lag)
        ):
            started += 1
            line.sampled_from.append(now)
            line.sampled.append(float("nan"))
            line.mostly_sampled.append(float("nan"))
            line.versions.append(max(0, started - 1 - lag))
            unfinished[started], begun[started] = len(batches[started - 1].chunks), []
            chunks.extend((started, chunk) for chunk in batches[started - 1].chunks)
            line.most_pending = max(line.most_pending, started - trained - training)
        # the engines
        while chunks and idle:
            engine = idle.popleft()
            batch, chunk = chunks.popleft()
            needed = max(0, batch - 1 - lag)
            begin = now if loaded[engine] == needed else now + load
            loaded[engine], doing[engine] = needed, batch
            begun[batch].append((begin, chunk))
            line.engine_work.append((now, begin + chunk.seconds))
            line.row_seconds.append((begin, chunk.row_seconds))
            at(begin + chunk.seconds, "chunk", engine)
        # the trainer
        if not training and trained + 1 in ready:
            ready.remove(trained + 1)
            training = True
            line.taken.append(now)
            at(now + batches[trained].train + publish, "published", trained + 1)
        if not events:
            raise ValueError(f"{len(batches)} batches are too few for {steps} steps at lag {lag}.")
        now, _, what, which = heapq.heappop(events)
        if what == "published":
            version = trained = which
            training = False
            line.published.append(now)
        else:
            idle.append(which)
            batch = doing[which]
            unfinished[batch] -= 1
            if not unfinished[batch]:
                del unfinished[batch]
                ready.add(batch)
                line.sampled[batch - 1] = now
                line.mostly_sampled[batch - 1] = _most(begun.pop(batch))
    return line


def simulate_synchronous(
    batches: Sequence[Batch], *, engines: int, lag: int, steps: int, publish: float, load: float
) -> Timeline:
    """Run `steps` steps of the synchronous loop with `rollout.lag`: nothing overlaps.

    Before each step batches are sampled until lag + 1 are pending, but none beyond the last step.
    """
    line = Timeline(engines=engines, lag_bound=lag)
    now, version = 0.0, 0
    for step in range(1, steps + 1):
        while len(line.sampled) < min(step + lag, steps):
            batch = batches[len(line.sampled)]
            line.sampled_from.append(now)
            line.versions.append(version)
            free = [now] * engines
            begun = []
            for chunk in batch.chunks:
                begin = heapq.heappop(free)
                end = begin + chunk.seconds
                heapq.heappush(free, end)
                begun.append((begin, chunk))
                line.engine_work.append((begin, end))
                line.row_seconds.append((begin, chunk.row_seconds))
            line.mostly_sampled.append(_most(begun))
            now = max(free)
            line.sampled.append(now)
        line.most_pending = max(line.most_pending, len(line.sampled) - step + 1)
        line.taken.append(now)
        now += batches[step - 1].train + publish + load
        version = step
        line.published.append(now)
    return line


def _most(begun: Sequence[tuple[float, Chunk]]) -> float:
    """Return when 90% of the completions had ended; of very many chunks, some say as much."""
    some = begun[:: max(len(begun) // 64, 1)]
    return float(np.quantile(np.concatenate([begin + chunk.ends for begin, chunk in some]), 0.9))


def steady(line: Timeline, *, skip: int) -> Steady:
    """Return the means over the steps after the first `skip`."""
    begin, end = line.published[skip - 1], line.published[-1]
    window, steps = end - begin, len(line.published) - skip
    lags = [b - line.versions[b] for b in range(skip, len(line.published))]
    training = sum(
        published - taken
        for taken, published in zip(line.taken[skip:], line.published[skip:], strict=True)
    )
    working = sum(max(min(stop, end) - max(start, begin), 0.0) for start, stop in line.engine_work)
    running = sum(seconds for start, seconds in line.row_seconds if begin <= start < end)
    tails = [
        (line.sampled[b] - line.mostly_sampled[b]) / (line.sampled[b] - line.sampled_from[b])
        for b in range(skip, len(line.published))
    ]
    return Steady(
        step=window / steps,
        trainer_idle=1 - training / window,
        engine_idle=1 - working / (line.engines * window),
        lag_mean=float(np.mean(lags)),
        lag_max=max(lags),
        tail=float(np.mean(tails)),
        rows=running / (line.engines * window),
    )
