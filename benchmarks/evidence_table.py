"""Tables and pictures of docs/results.md from the committed runs: regimes x objectives x seeds.

    python benchmarks/evidence_table.py --update
    python benchmarks/evidence_table.py results/gpu/runs.jsonl --dead 0.14
    python benchmarks/evidence_table.py --collect STUDY_FOLDER > results/cpu/trust.jsonl

--update writes docs/images/evidence-matrix*.svg, and what stands on the page between such a mark
and <!-- end -->: table: FILE DEAD (all runs), intervals: FILE DEAD (cells with their intervals),
arms: FILE [ARM ...] (all pairs of objectives, or those with these), paired: FILE ARM (one against
the others), agreement: FILE DEAD FILE DEAD (two files of runs) and gains: FILE FILE (rewards before
and after training, of two files with one arm each). --update PAGE does that to another page,
without the pictures.

A run below --dead is shown in bold. The last columns are the mean over regimes of the means over
seeds, the worst regime's mean, and how many runs are dead. --collect makes such a file of the
finished runs of a study, whose arms are named REGIME-METHOD. A run that failed counts as dead.
"""

import argparse
import contextlib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import correlation, mean, stdev
from typing import Any

from evidence_chart import Matrix, draw_matrix
from evidence_intervals import arms_table, interval_table
from evidence_runs import (
    LABELS,
    REGIMES,
    Row,
    markdown,
    mean_over_regimes,
    means_over_seeds,
    read_rows,
    shown_regimes,
)

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results.md"
PICTURES = ROOT / "docs" / "images"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """What a picture shows; docs/evidence.md has the two numbers."""

    file: Path
    dead: float
    untrained: float
    setting: str

    def draw(self) -> str:
        """Return the SVG of the matrix of its runs."""
        lines = [json.loads(line) for line in self.file.read_text().splitlines()]
        steps = {len(line["steps"]["reward/mean"]) for line in lines if "steps" in line}
        return draw_matrix(
            Matrix(
                rows=read_rows(self.file),
                dead=self.dead,
                untrained=self.untrained,
                setting=f"{self.setting}, {min(steps)} to {max(steps)} steps, {len(lines)} runs",
            )
        )


DRAWN = {
    "evidence-matrix.svg": Picture(
        file=ROOT / "results" / "gpu" / "runs.jsonl",
        dead=0.14,
        untrained=0.181,
        setting="Qwen2.5-Coder-0.5B-Instruct, GSM8K",
    ),
    "evidence-matrix-cpu.svg": Picture(
        file=ROOT / "results" / "cpu" / "matrix.jsonl",
        dead=0.115,
        untrained=0.23,
        setting="The small language of the cpu scale",
    ),
}
"""by the name of the file in `PICTURES`"""

MARKED = re.compile(r"<!-- (\w+): ([^>]*) -->\n(.*?)\n?<!-- end -->", re.DOTALL)


def main() -> None:
    """Print a table, or the lines of a study, or write the page anew."""
    parser = argparse.ArgumentParser(description="Tables of runs that are kept.")
    parser.add_argument("file", nargs="?", type=Path, help="lines with arm, regime, seed, held_out")
    parser.add_argument("--dead", type=float, default=0.0, help="below this a run is dead")
    parser.add_argument("--collect", type=Path, help="folder of a study")
    parser.add_argument(
        "--update",
        nargs="?",
        const=PAGE,
        type=Path,
        metavar="PAGE",
        help="write docs/results.md and its pictures anew, or the tables of another page",
    )
    args = parser.parse_args()
    if args.update is not None:
        args.update.write_text(filled(args.update.read_text()))
        if args.update.resolve() == PAGE:
            for name, picture in DRAWN.items():
                (PICTURES / name).write_text(picture.draw())
    elif args.collect is not None:
        sys.stdout.writelines(json.dumps(line) + "\n" for line in collect(args.collect))
    else:
        print(table(args.file, dead=args.dead))


def filled(page: str) -> str:
    """Return a page with everything between its marks made from the runs."""
    with contextlib.chdir(ROOT):  # the marks name files from here
        return MARKED.sub(_section, page)


def _section(found: re.Match[str]) -> str:
    kind, words, _ = found.groups()
    return f"<!-- {kind}: {words} -->\n{generated(kind, words)}\n<!-- end -->"


def generated(kind: str, words: str) -> str:
    """Return what belongs after the mark of this kind with these words."""
    file, *rest = words.split()
    match kind, rest:
        case "table", [dead]:
            return table(Path(file), dead=float(dead))
        case "intervals", [dead]:
            return interval_table(Path(file), dead=float(dead))
        case "arms", shown:
            return arms_table(Path(file), shown)
        case "paired", [arm]:
            return differences(Path(file), arm)
        case "agreement", [dead, other, dead_other]:
            return agreement(Path(file), float(dead), Path(other), float(dead_other))
        case "gains", [other]:
            return gains(Path(file), Path(other))
        case _:
            raise ValueError(f"There is no mark {kind!r} with {words!r}.")


def table(file: Path, *, dead: float) -> str:
    """Return the Markdown table of a file, the arms in the order of LABELS."""
    rows = read_rows(file)
    regimes = shown_regimes(rows)
    head = ["objective", *(REGIMES[each] for each in regimes), "mean", "worst", "dead"]
    return markdown(
        [head, ["---"] * len(head), *(_line(arm, row, regimes, dead) for arm, row in rows.items())]
    )


def _line(arm: str, row: Row, regimes: Sequence[str], dead: float) -> list[str]:
    """Return the cells of an arm; its mean and worst only if it has runs in all regimes."""
    is_whole = len(row) == len(regimes)
    values = [value for seeds in row.values() for value in seeds.values()]
    return [
        LABELS[arm],
        *(_cell(list(row.get(each, {}).values()), dead) for each in regimes),
        f"{mean_over_regimes(row):.3f}" if is_whole else "",
        f"{min(means_over_seeds(row)):.3f}" if is_whole else "",
        f"{sum(value < dead for value in values)} of {len(values)}",
    ]


def _cell(values: Sequence[float], dead: float) -> str:
    """Return the numbers of a cell, those of dead runs in bold."""
    return " ".join(f"**{value:.3f}**" if value < dead else f"{value:.3f}" for value in values)


def differences(file: Path, arm: str) -> str:
    """Return the mean over regimes of `arm` minus that of each other, paired over seeds."""
    held: dict[str, dict[tuple[str, int], float]] = defaultdict(dict)
    for line in file.read_text().splitlines():
        run = json.loads(line)
        held[run["arm"]][run["regime"], run["seed"]] = run["held_out"]
    rows = [
        ["against", "difference", "standard error", "seeds ahead"],
        ["---", "---:", "---:", "---:"],
    ]
    for other in sorted(held.keys() - {arm}, key=list(LABELS).index):
        assert held[other].keys() == held[arm].keys(), f"{other} has other runs than {arm}"
        seeds = sorted({seed for _, seed in held[arm]})
        gains = [
            mean(held[arm][cell] - held[other][cell] for cell in held[arm] if cell[1] == seed)
            for seed in seeds
        ]
        error = stdev(gains) / len(gains) ** 0.5
        ahead = f"{sum(gain > 0 for gain in gains)} of {len(gains)}"
        rows.append([LABELS[other], f"{mean(gains):+.3f}", f"{error:.3f}", ahead])
    return markdown(rows)


def agreement(first: Path, dead_first: float, second: Path, dead_second: float) -> str:
    """Return how well the cells (objective and regime) of two files agree, by means over seeds."""
    cells = [_means(file) for file in (first, second)]
    shared = sorted(cells[0].keys() & cells[1].keys())
    pairs = [(cells[0][cell], cells[1][cell]) for cell in shared]
    dead = [(one < dead_first, other < dead_second) for one, other in pairs]
    objectives = sorted({label for label, _ in shared})
    overall = [
        [mean(each[cell] for cell in shared if cell[0] == label) for label in objectives]
        for each in cells
    ]
    rows = [
        ("objectives, cells", f"{len(objectives)}, {len(shared)}"),
        ("agree on dead or alive", str(sum(one == other for one, other in dead))),
        ("dead in both", str(dead.count((True, True)))),
        (f"dead in `{first}` alone", _names(shared, dead, (True, False))),
        (f"dead in `{second}` alone", _names(shared, dead, (False, True))),
        ("rank correlation of cells", f"{rank_correlation(*zip(*pairs, strict=True)):.2f}"),
        ("rank correlation of objectives' means", f"{rank_correlation(*overall):.2f}"),
    ]
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])


def gains(first: Path, second: Path) -> str:
    """Return what the runs of two files gained over the model that they began with."""
    rows = [
        ["frozen weights", "before", "after, by seed", "mean", "gain, standard error over seeds"],
        ["---"] * 5,
    ]
    for file in (first, second):
        runs = sorted(map(json.loads, file.read_text().splitlines()), key=lambda run: run["seed"])
        (before,) = {run["held_out_before"] for run in runs}
        after = [run["held_out"] for run in runs]
        error = stdev(after) / len(after) ** 0.5
        rows.append(
            [
                runs[0]["config"]["model"].get("quantization", "bfloat16"),
                f"{before:.3f}",
                " ".join(f"{each:.3f}" for each in after),
                f"{mean(after):.3f}",
                f"{mean(after) - before:.3f} ± {error:.3f}",
            ]
        )
    return markdown(rows)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's correlation; equal values share the mean of their ranks."""
    ranks = [
        [sum(other < each for other in values) + values.count(each) / 2 for each in values]
        for values in (list(first), list(second))
    ]
    return correlation(*ranks)


def _means(file: Path) -> dict[tuple[str, str], float]:
    """Return the mean over seeds by label and regime."""
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in file.read_text().splitlines():
        run = json.loads(line)
        values[LABELS[run["arm"]], run["regime"]].append(run["held_out"])
    return {cell: mean(each) for cell, each in values.items()}


def _names(
    cells: list[tuple[str, str]], dead: list[tuple[bool, bool]], which: tuple[bool, bool]
) -> str:
    """Return the cells that died where `which` says."""
    named = [
        f"{label} at {REGIMES[regime]}"
        for (label, regime), each in zip(cells, dead, strict=True)
        if each == which
    ]
    return "; ".join(named) or "none"


def collect(study: Path) -> list[dict[str, Any]]:
    """Return a line for each evaluated run of a study."""
    lines = []
    for path in sorted(study.glob("runs/*/evaluation.json")):
        arm, seed = path.parent.name.split("--seed-")
        found = re.match("|".join(sorted(map(re.escape, REGIMES), key=len, reverse=True)), arm)
        assert found is not None, arm
        metrics = [json.loads(row) for row in (path.parent / "metrics.jsonl").open()]
        strength = [row["pull/strength"] for row in metrics if "pull/strength" in row]
        line: dict[str, Any] = {
            "regime": found.group(),
            "arm": arm[found.end() + 1 :],
            "seed": int(seed),
            "held_out": json.loads(path.read_text())["mean_reward"],
            "entropy": [round(metrics[place]["entropy"], 4) for place in (0, -1)],
            "one_minus_ess": float(f"{metrics[-1]['one_minus_ess']:.3g}"),
        }
        if strength:
            line["pull"] = [round(min(strength), 4), round(max(strength), 4)]
        lines.append(line)
    return lines


if __name__ == "__main__":
    main()
