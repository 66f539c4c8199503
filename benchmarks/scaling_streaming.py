"""Simulation of what the asynchronous loop does not do yet: engines that never wait for a batch.

Engines take the next group of prompts whenever a row's seat is free, and new weights replace the
old ones while completions run on (in-flight updates: a completion may span versions, and each of
its tokens has its own). Group k belongs to batch k // size + 1 and may start once the version that
this batch needs is out, so the first token of a batch that is trained in its order is never older
than the bound.
"""

import heapq
import math
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
from scaling_costs import Costs
from scaling_decoding import steps_seconds
from scaling_schedule import Steady


@dataclass
class _Engine:
    """The running rows of one engine, advanced from event to event."""

    costs: Costs
    prompt: int
    rows: list[tuple[int, int, int]] = field(default_factory=list)
    """heap: step at which a row ends, its group and its tokens"""
    step: int = 0
    context: int = 0
    now: float = 0.0
    """when `step` was reached; beyond the present while weights are loaded"""
    event: int = 0
    """number of the event that is planned for it: older ones are void"""
    row_seconds: float = 0.0
    working: float = 0.0

    def seconds(self, steps: int) -> float:
        return steps_seconds(
            self.costs.engine, steps=steps, rows=len(self.rows), context=self.context
        )

    def next_end(self) -> float:
        return self.now + self.seconds(self.rows[0][0] - self.step)

    def advance(self, steps: int) -> None:
        seconds = self.seconds(steps)
        self.row_seconds += len(self.rows) * seconds
        self.working += seconds
        self.now += seconds
        self.step += steps
        self.context += len(self.rows) * steps

    def advance_to(self, time: float) -> None:
        """Go on to the end of the step that runs at this time."""
        if not self.rows:
            self.now = max(self.now, time)
        elif time > self.now:
            engine, rows = self.costs.engine, len(self.rows)
            # cached * rows / 2 * n^2 + each * n = elapsed
            square = engine.cached * rows / 2
            each = engine.step + rows * engine.row + engine.cached * (self.context - rows / 2)
            elapsed = time - self.now
            if square:
                steps = (math.sqrt(each * each + 4 * square * elapsed) - each) / (2 * square)
            else:
                steps = elapsed / each
            self.advance(min(math.ceil(steps - 1e-9), self.rows[0][0] - self.step))

    def enter(self, group: int, lengths: np.ndarray) -> None:
        for length in lengths.tolist():
            heapq.heappush(self.rows, (self.step + length, group, length))
        self.context += self.prompt * len(lengths)

    def leave(self) -> int:
        """Let the row go that ends now; returns its group."""
        end, group, length = self.rows[0]
        self.advance(end - self.step)
        heapq.heappop(self.rows)
        self.context -= self.prompt + length
        return group


class _Stream:
    """Engines, the groups they were given, and what was finished."""

    def __init__(
        self,
        lengths: np.ndarray,
        costs: Costs,
        *,
        prompt: int,
        batch_groups: int,
        engines: int,
        lag: int,
    ) -> None:
        self.lengths, self.costs, self.batch_groups, self.lag = lengths, costs, batch_groups, lag
        self.engine_pool = [_Engine(costs, prompt) for _ in range(engines)]
        self.events: list[tuple[float, int, int, int]] = []
        """heap: time, order, engine (-1: the trainer), number of the engine's event"""
        self.order = 0
        self.now = 0.0
        self.version = 0
        self.next_group = 0
        self.first_versions: dict[int, int] = {}
        """group, version of its first token"""
        self.missing: dict[int, int] = {}
        """group, samples of it that still run"""
        self.finished: deque[int] = deque()
        self.finished_of: Counter[int] = Counter()
        """batch in the order of prompts, its groups that are finished"""

    def plan(self, time: float, engine: int, event: int) -> None:
        """Let something happen at a time."""
        self.order += 1
        heapq.heappush(self.events, (time, self.order, engine, event))

    def plan_end(self, number: int) -> None:
        """Let the next row of an engine end; an end that was planned before is void."""
        engine = self.engine_pool[number]
        engine.event += 1
        if engine.rows:
            self.plan(engine.next_end(), number, engine.event)

    def admit(self, number: int, most: int) -> int:
        """Give an engine up to `count` groups, as far as seats and the bound allow."""
        engine, samples = self.engine_pool[number], self.lengths.shape[1]
        seats = max(self.costs.engine.seats, samples)
        admitted = 0
        while (
            admitted < most
            and len(engine.rows) + samples <= seats
            and self.next_group < len(self.lengths)
            and self.next_group // self.batch_groups <= self.version + self.lag
        ):
            engine.enter(self.next_group, self.lengths[self.next_group])
            self.first_versions[self.next_group] = self.version
            self.missing[self.next_group] = samples
            self.next_group += 1
            admitted += 1
        return admitted

    def deal(self) -> None:
        """Give out the groups that a version has admitted, one to each engine in turn."""
        given: set[int] = set()
        hungry = sorted(
            range(len(self.engine_pool)), key=lambda number: len(self.engine_pool[number].rows)
        )
        while hungry:
            hungry = [number for number in hungry if self.admit(number, most=1)]
            given.update(hungry)
        for number in given:
            self.plan_end(number)

    def end_row(self, number: int) -> None:
        """A completion ends, and its seat may be taken."""
        group = self.engine_pool[number].leave()
        self.missing[group] -= 1
        if not self.missing[group]:
            del self.missing[group]
            self.finished.append(group)
            self.finished_of[group // self.batch_groups] += 1
        self.admit(number, most=len(self.lengths))
        self.plan_end(number)

    def publish(self) -> None:
        """All engines take the new version, with their rows where they are."""
        self.version += 1
        for number, engine in enumerate(self.engine_pool):
            engine.advance_to(self.now)
            engine.now += self.costs.load
            engine.working += self.costs.load
            self.plan_end(number)
        self.deal()

    def take(self, *, first_finished: bool) -> list[int]:
        """Return the groups of the next batch, or none if there are not enough."""
        size = self.batch_groups
        if first_finished:
            ready = len(self.finished) >= size
            return [self.finished.popleft() for _ in range(size)] if ready else []
        ready = self.finished_of[self.version] == size
        return list(range(self.version * size, (self.version + 1) * size)) if ready else []


def simulate_streaming(
    lengths: np.ndarray,
    costs: Costs,
    *,
    prompt: int,
    batch_groups: int,
    engines: int,
    trainers: int,
    lag: int,
    steps: int,
    skip: int,
    first_finished: bool,
) -> Steady:
    """Run `steps` steps and return the means after the first `skip`.

    Args:
        lengths: of the completions, [groups, samples].
        costs: of engines and trainer.
        prompt: tokens of a prompt.
        batch_groups: groups in a batch.
        engines: how many.
        trainers: GPUs of the trainer.
        lag: the bound that admits groups.
        steps: batches that are trained.
        skip: steps that are not counted; at least 1.
        first_finished: whether a batch is made of the groups that were finished first, in place of
            those that are next in the order of prompts.
    """
    stream = _Stream(
        lengths, costs, prompt=prompt, batch_groups=batch_groups, engines=engines, lag=lag
    )
    stream.deal()
    training = False
    begin = worked = ran = trained_seconds = 0.0
    lags: list[int] = []
    while stream.version < steps:
        taken = [] if training else stream.take(first_finished=first_finished)
        if taken:
            training = True
            seconds = costs.trainer.batch_seconds(lengths[taken] + prompt, trainers)
            seconds += costs.trainer.publish
            stream.plan(stream.now + seconds, -1, 0)
            if stream.version >= skip:
                trained_seconds += seconds
                lags += [stream.version - stream.first_versions[group] for group in taken]
        if not stream.events:
            raise ValueError(f"{len(lengths)} groups are too few for {steps} steps.")
        stream.now, _, number, event = heapq.heappop(stream.events)
        if number < 0:
            training = False
            stream.publish()
            if stream.version == skip:
                begin = stream.now
                worked = sum(engine.working for engine in stream.engine_pool)
                ran = sum(engine.row_seconds for engine in stream.engine_pool)
        elif event == stream.engine_pool[number].event:
            stream.end_row(number)
    window = stream.now - begin
    worked = sum(engine.working for engine in stream.engine_pool) - worked
    ran = sum(engine.row_seconds for engine in stream.engine_pool) - ran
    return Steady(
        step=window / (steps - skip),
        trainer_idle=1 - trained_seconds / window,
        engine_idle=1 - worked / (engines * window),
        lag_mean=float(np.mean(lags)),
        lag_max=max(lags),
        tail=math.nan,
        rows=ran / (engines * window),
    )
