"""Simulates settings of scaling.py: a workload on a number of GPUs, engines and trainers."""

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scaling_schedule import Batch, Steady, simulate_pipeline, simulate_synchronous, steady
from scaling_streaming import simulate_streaming
from scaling_workload import Workload, make_batches

LAGS = (0, 1, 2, 4)
EIGHTHS = (1, 2, 3, 4, 5, 6, 7)
"""shares of the GPUs that sample, in eighths, among which the best split is looked for"""
COMPLETIONS_PER_GPU = 64
"""the paper's 512 completions per step on 8 GPUs"""
STEPS, SKIP = 18, 6
SPARE = 6
"""batches beyond the last step, so that the producer does not run dry"""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One point of the simulation."""

    workload: Workload
    gpus: int
    engines: int
    lag: int
    completions: int
    """in a batch"""
    chunks_per_engine: int = 1
    in_flight: int = 1

    @property
    def trainers(self) -> int:
        """GPUs that do not sample."""
        return self.gpus - self.engines

    @property
    def batch_groups(self) -> int:
        """Prompts in a batch."""
        return max(self.completions // self.workload.groups.shape[1], 1)


@dataclass(frozen=True)
class Outcome:
    """A setting and what came out."""

    setting: Setting
    steady: Steady

    @property
    def samples(self) -> float:
        """Completions trained on per second."""
        return self.setting.completions / self.steady.step


class Simulator:
    """Simulates settings, and keeps the batches that several of them share."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.num_runs = 0
        self._key: object = None
        self._batches: list[Batch] = []
        self._said = time.monotonic()

    def pipeline(self, setting: Setting) -> Outcome:
        """Run the asynchronous loop on engines and trainers of their own."""
        costs = setting.workload.costs
        line = simulate_pipeline(
            self._sampled(setting, setting.engines, setting.trainers),
            engines=setting.engines,
            lag=setting.lag,
            steps=STEPS,
            publish=costs.trainer.publish,
            load=costs.load,
            in_flight=setting.in_flight,
        )
        return self._report(Outcome(setting, steady(line, skip=SKIP)))

    def colocated(self, setting: Setting) -> Outcome:
        """Run the synchronous loop: all GPUs sample, then all train; weights are where they are."""
        line = simulate_synchronous(
            self._sampled(setting, setting.gpus, setting.gpus),
            engines=setting.gpus,
            lag=0,
            steps=STEPS,
            publish=0.0,
            load=0.0,
        )
        return self._report(Outcome(setting, steady(line, skip=SKIP)))

    def streaming(self, setting: Setting, *, first_finished: bool) -> Outcome:
        """Run engines that are never drained, with in-flight weight updates."""
        workload, count = setting.workload, setting.batch_groups
        groups = workload.sample(
            np.random.default_rng(self.seed), count * (STEPS + setting.lag + SPARE)
        )
        result = simulate_streaming(
            groups,
            workload.costs,
            prompt=workload.prompt,
            batch_groups=count,
            engines=setting.engines,
            trainers=setting.trainers,
            lag=setting.lag,
            steps=STEPS,
            skip=SKIP,
            first_finished=first_finished,
        )
        return self._report(Outcome(setting, result))

    def _sampled(self, setting: Setting, engines: int, trainers: int) -> list[Batch]:
        key = (id(setting.workload), engines, trainers, setting.completions)
        key = (*key, setting.chunks_per_engine)
        if key != self._key:
            self._key = key
            self._batches = make_batches(
                setting.workload,
                count=STEPS + max(LAGS) + SPARE,
                batch_groups=setting.batch_groups,
                engines=engines,
                trainers=trainers,
                chunks_per_engine=setting.chunks_per_engine,
                seed=self.seed,
            )
        return self._batches

    def _report(self, outcome: Outcome) -> Outcome:
        self.num_runs += 1
        if time.monotonic() - self._said > 2:
            self._said = time.monotonic()
            setting = outcome.setting
            print(
                f"{self.num_runs} settings simulated; {setting.workload.name}, {setting.gpus} GPUs",
                file=sys.stderr,
                flush=True,
            )
        return outcome


def engines_of(gpus: int, eighths: int) -> int:
    """Return how many of the GPUs sample."""
    return gpus * eighths // 8


def best(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the one with the most samples per second."""
    return max(outcomes, key=lambda outcome: outcome.samples)
