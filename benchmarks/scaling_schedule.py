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
        batches: more than `steps`, so that the producer is as busy at the end as before.
        engines: number of engines.
        lag: number of versions by which a batch may be older than the policy it trains.
        steps: number of batches that are trained.
        publish: seconds for the trainer to publish a version.
        load: seconds for an engine to load a version.
        in_flight: number of batches that may be sampled at a time.
    """
    return _Pipeline(
        batches,
        engines=engines,
        lag=lag,
        steps=steps,
        publish=publish,
        load=load,
        in_flight=in_flight,
    ).run()


class _Pipeline:
    """The state of the simulated asynchronous loop; batches are numbered from 1."""

    def __init__(
        self,
        batches: Sequence[Batch],
        *,
        engines: int,
        lag: int,
        steps: int,
        publish: float,
        load: float,
        in_flight: int,
    ) -> None:
        self.batches, self.lag, self.steps = batches, lag, steps
        self.publish, self.load, self.in_flight = publish, load, in_flight
        self.line = Timeline(engines=engines, lag_bound=lag)
        self.now = 0.0
        self.events: list[tuple[float, int, str, int]] = []
        """time, order, kind, and the batch that was published or the engine that is done"""
        self.num_events = 0
        self.chunks: deque[tuple[int, Chunk]] = deque()
        self.idle = deque(range(engines))
        self.loaded = [0] * engines
        """version that each engine has"""
        self.sampling = [0] * engines
        """batch that each engine samples for"""
        self.unfinished: dict[int, int] = {}
        """number of chunks of each batch that are not sampled yet"""
        self.begun: dict[int, list[tuple[float, Chunk]]] = {}
        self.version, self.started, self.trained, self.is_training = 0, 0, 0, False
        self.ready: set[int] = set()

    def run(self) -> Timeline:
        while self.trained < self.steps:
            self._start_batches()
            self._start_chunks()
            self._start_training()
            if not self.events:
                raise ValueError(
                    f"{len(self.batches)} batches are too few for {self.steps} steps at lag "
                    f"{self.lag}."
                )
            self._next_event()
        return self.line

    def _schedule(self, time: float, kind: str, which: int) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (time, self.num_events, kind, which))

    def _start_batches(self) -> None:
        """The producer: start batches whose version is out."""
        while (
            self.started < len(self.batches)
            and len(self.unfinished) < self.in_flight
            and self.version >= max(0, self.started - self.lag)
        ):
            self.started += 1
            number, line = self.started, self.line
            line.sampled_from.append(self.now)
            line.sampled.append(float("nan"))
            line.mostly_sampled.append(float("nan"))
            line.versions.append(max(0, number - 1 - self.lag))
            chunks = self.batches[number - 1].chunks
            self.unfinished[number], self.begun[number] = len(chunks), []
            self.chunks.extend((number, chunk) for chunk in chunks)
            pending = number - self.trained - self.is_training
            line.most_pending = max(line.most_pending, pending)

    def _start_chunks(self) -> None:
        """The engines: idle ones take the oldest chunks, and load their version first."""
        while self.chunks and self.idle:
            engine = self.idle.popleft()
            batch, chunk = self.chunks.popleft()
            needed = max(0, batch - 1 - self.lag)
            begin = self.now if self.loaded[engine] == needed else self.now + self.load
            self.loaded[engine], self.sampling[engine] = needed, batch
            self.begun[batch].append((begin, chunk))
            self.line.engine_work.append((self.now, begin + chunk.seconds))
            self.line.row_seconds.append((begin, chunk.row_seconds))
            self._schedule(begin + chunk.seconds, "chunk", engine)

    def _start_training(self) -> None:
        """The trainer: take the next batch if it is ready."""
        following = self.trained + 1
        if self.is_training or following not in self.ready:
            return
        self.ready.remove(following)
        self.is_training = True
        self.line.taken.append(self.now)
        seconds = self.batches[self.trained].train + self.publish
        self._schedule(self.now + seconds, "published", following)

    def _next_event(self) -> None:
        self.now, _, kind, which = heapq.heappop(self.events)
        if kind == "published":
            self.version = self.trained = which
            self.is_training = False
            self.line.published.append(self.now)
            return
        self.idle.append(which)
        batch = self.sampling[which]
        self.unfinished[batch] -= 1
        if not self.unfinished[batch]:
            del self.unfinished[batch]
            self.ready.add(batch)
            self.line.sampled[batch - 1] = self.now
            self.line.mostly_sampled[batch - 1] = _most(self.begun.pop(batch))


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
