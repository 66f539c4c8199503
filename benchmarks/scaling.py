"""How the asynchronous loop grows from 8 to 1,024 GPUs: a simulation with measured costs.

    python benchmarks/scaling.py [--gpus 8 64] [--seed 0] [--write-docs]

Lengths are of real solutions (benchmarks/data/solution_lengths.json), stretched to a mean of
4,096 and 16,384 tokens; costs are in scaling_costs.py with their sources; the schedulers are in
scaling_schedule.py and scaling_streaming.py. Numpy only, no GPU, seeded. --write-docs puts the
tables between the markers of docs/scaling.md and writes docs/scaling.svg.
"""

import argparse
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scaling_chart import Line, Panel, draw_chart
from scaling_schedule import Batch, Steady, simulate_pipeline, simulate_synchronous, steady
from scaling_streaming import simulate_streaming
from scaling_workload import (
    LENGTHS,
    Workload,
    equal_workload,
    make_batches,
    read_lengths,
    scaled_workload,
)

DOCS = Path(__file__).parent.parent / "docs"
GPUS = (8, 32, 128, 512, 1024)
LAGS = (0, 1, 2, 4)
EIGHTHS = (1, 2, 3, 4, 5, 6, 7)
"""shares of the GPUs that sample, in eighths, among which the best split is looked for"""
COMPLETIONS_PER_GPU = 64
"""the paper's 512 completions a step on 8 GPUs"""
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
        """Completions trained on in a second."""
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
        return self._told(Outcome(setting, steady(line, skip=SKIP)))

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
        return self._told(Outcome(setting, steady(line, skip=SKIP)))

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
        return self._told(Outcome(setting, result))

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

    def _told(self, outcome: Outcome) -> Outcome:
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
    """Return the one with most samples a second."""
    return max(outcomes, key=lambda outcome: outcome.samples)


def growth(
    simulator: Simulator, workload: Workload, gpus: Sequence[int]
) -> dict[str, list[Outcome]]:
    """Simulate all splits and lags where the batch grows with the GPUs."""
    found: dict[str, list[Outcome]] = {}
    for number in gpus:
        base = Setting(
            workload=workload,
            gpus=number,
            engines=number,
            lag=0,
            completions=COMPLETIONS_PER_GPU * number,
        )
        found.setdefault("colocated", []).append(simulator.colocated(base))
        by_lag: dict[int, list[Outcome]] = {lag: [] for lag in LAGS}
        several: dict[int, list[Outcome]] = {lag: [] for lag in LAGS[1:]}
        for eighths in EIGHTHS:
            for lag in LAGS:
                setting = replace(base, engines=engines_of(number, eighths), lag=lag)
                outcome = simulator.pipeline(setting)
                by_lag[lag].append(outcome)
                if eighths in (2, 3):
                    name = f"{'6/2' if eighths == 2 else '5/3'} lag {lag}"
                    found.setdefault(name, []).append(outcome)
                if lag:
                    several[lag].append(simulator.pipeline(replace(setting, in_flight=lag + 1)))
        for lag, outcomes in by_lag.items():
            found.setdefault(f"best lag {lag}", []).append(best(outcomes))
        for lag, outcomes in several.items():
            found.setdefault(f"several lag {lag}", []).append(best(outcomes))
    return found


def fixed_batch(
    simulator: Simulator, workload: Workload, gpus: Sequence[int], completions: int
) -> list[tuple[Outcome, Outcome]]:
    """Simulate more GPUs for the same batch; returns the best of one batch and of several."""
    rows = []
    for number in gpus:
        one, several = [], []
        for eighths in EIGHTHS:
            setting = Setting(
                workload=workload,
                gpus=number,
                engines=engines_of(number, eighths),
                lag=2,
                completions=completions,
            )
            one.append(simulator.pipeline(setting))
            several.append(simulator.pipeline(replace(setting, in_flight=3)))
        rows.append((best(one), best(several)))
    return rows


def improvements(
    simulator: Simulator, workload: Workload, gpus: int, lags: Sequence[int]
) -> list[tuple[str, Outcome]]:
    """Simulate what could be built next, each at its own best split."""
    found = []
    for lag in lags:
        settings = [
            Setting(
                workload=workload,
                gpus=gpus,
                engines=engines_of(gpus, eighths),
                lag=lag,
                completions=COMPLETIONS_PER_GPU * gpus,
            )
            for eighths in EIGHTHS
        ]
        ways = {
            "as built: one batch at a time": [simulator.pipeline(each) for each in settings],
            "several batches in flight": [
                simulator.pipeline(replace(each, in_flight=lag + 1)) for each in settings
            ],
            "in-flight updates, batches in order": [
                simulator.streaming(each, first_finished=False) for each in settings
            ],
            "in-flight updates, first finished": [
                simulator.streaming(each, first_finished=True) for each in settings
            ],
        }
        found += [(name, best(outcomes)) for name, outcomes in ways.items()]
    return found


def chunk_sizes(simulator: Simulator, workload: Workload, gpus: int) -> list[Outcome]:
    """Simulate smaller chunks, which idle engines share out between them."""
    return [
        best(
            simulator.pipeline(
                Setting(
                    workload=workload,
                    gpus=gpus,
                    engines=engines_of(gpus, eighths),
                    lag=1,
                    completions=COMPLETIONS_PER_GPU * gpus,
                    chunks_per_engine=chunks,
                )
            )
            for eighths in EIGHTHS
        )
        for chunks in (1, 2, 4)
    ]


def without(simulator: Simulator, workload: Workload, gpus: int) -> list[tuple[str, Outcome]]:
    """Simulate the loop as built with one cost taken away at a time, at lag 1, best split."""
    trainer = replace(workload.costs.trainer, publish=workload.costs.trainer.publish * 0.15 / 1.1)
    cheap = replace(workload.costs, trainer=trainer, load=workload.costs.load * 0.15 / 1.1)
    equal = equal_workload(workload)
    cases = {
        "as it is": workload,
        "weights handed over as fast as `ipc`": replace(workload, costs=cheap),
        "all completions of the mean length": equal,
    }
    found = []
    for name, case in cases.items():
        base = Setting(
            workload=case, gpus=gpus, engines=0, lag=1, completions=COMPLETIONS_PER_GPU * gpus
        )
        found.append(
            (
                name,
                best(
                    simulator.pipeline(replace(base, engines=engines_of(gpus, eighths)))
                    for eighths in EIGHTHS
                ),
            )
        )
    return found


def percent(share: float) -> str:
    """Write a share; rounding may make it a little less than none."""
    return f"{max(share, 0.0):.0%}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


COLUMNS = (
    "split", "step s", "samples/s", "samples/s a GPU",
    "trainer idle", "engines idle", "rows an engine", "tail", "lag mean / max",
)  # fmt: skip


def cells(outcome: Outcome, *, split: str = "") -> list[str]:
    """Write an outcome as the cells of a table."""
    setting, means = outcome.setting, outcome.steady
    return [
        split or f"{setting.trainers} / {setting.engines}",
        f"{means.step:.0f}",
        f"{outcome.samples:.1f}",
        f"{outcome.samples / setting.gpus:.3f}",
        percent(means.trainer_idle),
        percent(means.engine_idle),
        f"{means.rows:.0f}",
        "" if np.isnan(means.tail) else percent(means.tail),
        f"{means.lag_mean:.1f} / {means.lag_max}",
    ]


def growth_table(found: dict[str, list[Outcome]], gpus: Sequence[int]) -> str:
    """Write the loop as built, for the paper's splits, the best one, and the synchronous loop."""
    rows = []
    for at, number in enumerate(gpus):
        rows.append(
            [str(number), "synchronous", *cells(found["colocated"][at], split=f"all {number}")]
        )
        for kind in ("6/2", "5/3", "best"):
            for lag in LAGS if kind == "best" else (0, 1):
                outcome = found[f"{kind} lag {lag}"][at]
                rows.append([str(number), f"{kind}, lag {lag}", *cells(outcome)])
    return table(("GPUs", "scheduler", *COLUMNS), rows)


def short_table(found: dict[str, list[Outcome]], gpus: Sequence[int]) -> str:
    """Write the best split alone."""
    rows = []
    for at, number in enumerate(gpus):
        rows.append(
            [str(number), "synchronous", *cells(found["colocated"][at], split=f"all {number}")]
        )
        for lag in LAGS:
            rows.append([str(number), f"best, lag {lag}", *cells(found[f"best lag {lag}"][at])])
    return table(("GPUs", "scheduler", *COLUMNS), rows)


def chart(found: dict[str, list[Outcome]], gpus: Sequence[int], caption: str) -> str:
    """Sample throughput and trainer idle share over the number of GPUs."""
    names = {
        "colocated": "synchronous, all GPUs",
        "6/2 lag 1": "asynchronous as built, lag 1, a quarter of the GPUs samples",
        "best lag 1": "asynchronous as built, lag 1, best split (more lag: the same)",
        "several lag 1": "several batches in flight, lag 1, best split",
        "several lag 2": "several batches in flight, lag 2, best split",
    }
    throughput = Panel(
        title="completions a second and GPU",
        lines=[
            Line(name=name, values=[each.samples / each.setting.gpus for each in found[key]])
            for key, name in names.items()
        ],
    )
    idle = Panel(
        title="share of time in which the trainer is idle",
        lines=[
            Line(name=name, values=[max(each.steady.trainer_idle, 0.0) for each in found[key]])
            for key, name in names.items()
        ],
        percent=True,
    )
    return draw_chart([throughput, idle], [str(number) for number in gpus], "GPUs", caption)


def fill_marked(page: Path, texts: dict[str, str]) -> None:
    """Replace what stands between `<!-- NAME -->` and `<!-- /NAME -->`."""
    content = page.read_text(encoding="utf-8")
    for name, text in texts.items():
        pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        content, count = pattern.subn(lambda match, text=text: match[1] + text + match[2], content)
        if count != 1:
            sys.exit(f"{page} has no place for {name!r}: put <!-- {name} --> and its end there")
    page.write_text(content, encoding="utf-8")


def main() -> None:
    """Simulate, print the tables, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=GPUS)
    parser.add_argument("--lengths", type=Path, default=LENGTHS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args()
    start = time.monotonic()
    simulator = Simulator(options.seed)
    real = read_lengths(options.lengths)
    short, long = scaled_workload(real, mean=4096), scaled_workload(real, mean=16_384)
    texts = {"lengths": lengths_table(real, [short, long])}
    found = growth(simulator, short, options.gpus)
    texts["growth"] = growth_table(found, options.gpus)
    texts["growth-long"] = short_table(growth(simulator, long, options.gpus), options.gpus)
    texts["several"] = several_table(found, options.gpus)
    texts["fixed"] = fixed_table(
        fixed_batch(simulator, short, [n for n in options.gpus if n >= 32], 4096)
    )
    texts["improvements"] = improvements_table(improvements(simulator, short, 32, LAGS[1:]))
    texts["chunks"] = chunks_table(chunk_sizes(simulator, short, 32))
    texts["without"] = table(
        ("what", *COLUMNS),
        [[name, *cells(outcome)] for name, outcome in without(simulator, short, 32)],
    )
    for name, text in texts.items():
        print(f"\n{name}\n\n{text}")
    if options.write_docs:
        fill_marked(DOCS / "scaling.md", texts)
        svg = chart(found, options.gpus, f"{short.name} a completion on average")
        (DOCS / "scaling.svg").write_text(svg, encoding="utf-8")
    print(f"{simulator.num_runs} settings in {time.monotonic() - start:.0f} s", file=sys.stderr)


def lengths_table(real: np.ndarray, workloads: Sequence[Workload]) -> str:
    """Write what the distributions of lengths look like."""
    rows = []
    for name, lengths, seats in [
        ("solutions, characters", real, ""),
        *((each.name, each.groups, str(each.costs.engine.seats)) for each in workloads),
    ]:
        middle, most = np.quantile(lengths, [0.5, 0.9])
        rows.append(
            [
                name,
                f"{lengths.mean():,.0f}",
                f"{middle:,.0f}",
                f"{most:,.0f}",
                f"{lengths.max():,}",
                f"{lengths.std() / lengths.mean():.2f}",
                seats,
            ]
        )
    header = ("lengths", "mean", "median", "90%", "longest", "std / mean", "seats")
    return table(header, rows)


def several_table(found: dict[str, list[Outcome]], gpus: Sequence[int]) -> str:
    """Write one batch at a time beside several, both at their best split."""
    rows = []
    for lag in LAGS[1:]:
        for at, number in enumerate(gpus):
            one, several = found[f"best lag {lag}"][at], found[f"several lag {lag}"][at]
            rows.append(
                [
                    str(lag),
                    str(number),
                    *(f"{each.samples:.1f}" for each in (one, several)),
                    f"{several.samples / one.samples - 1:+.0%}",
                    *(percent(each.steady.trainer_idle) for each in (one, several)),
                    *(percent(each.steady.engine_idle) for each in (one, several)),
                ]
            )
    header = ("lag", "GPUs", "samples/s, one", "several", "gain")
    header = (*header, "trainer idle, one", "several", "engines idle, one", "several")
    return table(header, rows)


def fixed_table(rows: Sequence[tuple[Outcome, Outcome]]) -> str:
    """Write what more GPUs do for a batch that does not grow."""
    first = rows[0][0]
    written = []
    for one, several in rows:
        ideal = first.samples / first.setting.gpus * one.setting.gpus
        written.append(
            [
                str(one.setting.gpus),
                *cells(one),
                percent(one.samples / ideal),
                f"{several.samples:.1f}",
                percent(several.samples / ideal),
            ]
        )
    header = ("GPUs", *COLUMNS, "of linear", "several: samples/s", "of linear")
    return table(header, written)


def improvements_table(found: Sequence[tuple[str, Outcome]]) -> str:
    """Write each way beside the loop as built at the same lag."""
    rows, built = [], {}
    for name, outcome in found:
        lag = outcome.setting.lag
        built.setdefault(lag, outcome.samples)
        gain = outcome.samples / built[lag] - 1
        rows.append([str(lag), name, *cells(outcome), f"{gain:+.0%}" if gain else ""])
    return table(("bound", "scheduler", *COLUMNS, "gain"), rows)


def chunks_table(outcomes: Sequence[Outcome]) -> str:
    """Write what smaller chunks do."""
    return table(
        ("chunks an engine", *COLUMNS),
        [[str(each.setting.chunks_per_engine), *cells(each)] for each in outcomes],
    )


if __name__ == "__main__":
    main()
