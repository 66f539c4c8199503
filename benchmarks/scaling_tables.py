"""The tables and the chart of scaling.py."""

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from scaling_chart import Line, Panel, draw_chart
from scaling_simulator import LAGS, Outcome
from scaling_workload import Workload


def percent(share: float) -> str:
    """Format a share; rounding may make it slightly negative."""
    return f"{max(share, 0.0):.0%}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


COLUMNS = (
    "split", "step s", "samples/s", "samples/s per GPU",
    "trainer idle", "engines idle", "rows per engine", "tail", "lag mean / max",
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
    """Draw throughput and trainer idle share over the number of GPUs."""
    names = {
        "colocated": "synchronous, all GPUs",
        "6/2 lag 1": "asynchronous as built, lag 1, a quarter of the GPUs samples",
        "best lag 1": "asynchronous as built, lag 1, best split (more lag: the same)",
        "several lag 1": "several batches in flight, lag 1, best split",
        "several lag 2": "several batches in flight, lag 2, best split",
    }
    throughput = Panel(
        title="completions per second and GPU",
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
    """Replace the text between `<!-- NAME -->` and `<!-- /NAME -->`."""
    content = page.read_text(encoding="utf-8")
    for name, text in texts.items():
        pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        content, count = pattern.subn(lambda match, text=text: match[1] + text + match[2], content)
        if count != 1:
            sys.exit(f"{page} has no place for {name!r}: put <!-- {name} --> and its end there")
    page.write_text(content, encoding="utf-8")


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
    """Write the effect of more GPUs on a batch of fixed size."""
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
    """Write the effect of smaller chunks."""
    return table(
        ("chunks per engine", *COLUMNS),
        [[str(each.setting.chunks_per_engine), *cells(each)] for each in outcomes],
    )
