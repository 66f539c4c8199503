"""How the asynchronous loop grows from 8 to 1,024 GPUs: a simulation with measured costs.

    python benchmarks/scaling.py [--gpus 8 64] [--seed 0] [--write-docs]

Lengths are of real solutions (benchmarks/data/solution_lengths.json), stretched to a mean of
4,096 and 16,384 tokens; costs are in scaling_costs.py with their sources; the schedulers are in
scaling_schedule.py and scaling_streaming.py. Numpy only, no GPU, seeded. --write-docs puts the
tables between the markers of docs/scaling.md and writes docs/scaling.svg.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from scaling_simulator import (
    COMPLETIONS_PER_GPU,
    EIGHTHS,
    LAGS,
    Outcome,
    Setting,
    Simulator,
    best,
    engines_of,
)
from scaling_tables import (
    COLUMNS,
    cells,
    chart,
    chunks_table,
    fill_marked,
    fixed_table,
    growth_table,
    improvements_table,
    lengths_table,
    several_table,
    short_table,
    table,
)
from scaling_workload import (
    LENGTHS,
    Workload,
    equal_workload,
    read_lengths,
    scaled_workload,
)

DOCS = Path(__file__).parent.parent / "docs"
GPUS = (8, 32, 128, 512, 1024)


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


if __name__ == "__main__":
    main()
