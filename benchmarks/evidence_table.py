"""Tables of docs/results.md from the committed runs: regimes x objectives, a number per seed.

    python benchmarks/evidence_table.py --update docs/results.md
    python benchmarks/evidence_table.py results/gpu/runs.jsonl --dead 0.14
    python benchmarks/evidence_table.py --collect STUDY_FOLDER > results/cpu/trust.jsonl

--update rewrites every table between <!-- table: FILE DEAD --> and <!-- end -->, every list of
paired differences after <!-- paired: FILE ARM -->, and every comparison of two files of runs after
<!-- agreement: FILE DEAD FILE DEAD -->. A run below
--dead is shown in bold. The last columns are the mean over regimes of the means over seeds, the
worst regime's mean, and how many runs are dead. --collect makes such a file of the finished runs of
a study, whose arms are named REGIME-METHOD. A run that failed counts as dead.
"""

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import correlation, mean, stdev
from typing import Any

REGIMES = {
    "fresh": "T = 1",
    "t1.2": "T = 1.2",
    "t0.6": "T = 0.6",
    "top-p0.95": "top-p 0.95",
    "lag2": "lag 2",
    "lag8": "lag 8",
    "t1.2-lag4": "T = 1.2, lag 4",
    "fp8": "FP8",
    "fp8-kv": "FP8 keys and values",
    "mixed50": "half foreign",
    "mixed25": "25% foreign",
}
LABELS = {
    "pact": "PACT",
    "both": "PACT",
    "pact-rms": "rms(A), to both",
    "both-rms": "rms(A), to both",
    "prox": "PACT, to the proximal policy",
    "model": "PACT, to the model",
    "prox-rms": "rms(A), to the proximal policy",
    "both-0.3": "0.3, to both",
    "both-1": "1, to both",
    "prox-0.3": "0.3, to the proximal policy",
    "prox-1": "1, to the proximal policy",
    "model-0.3": "0.3, to the model",
    "model-1": "1, to the model",
    "p3o": "P3O",
    "p3o-model": "P3O",
    "p3o-sampler": "P3O, to the sampler",
    "p3o-no-kl": "P3O without KL",
    "two-anchor": "two-anchor",
    "grpo": "GRPO",
    "grpo-0.2": "GRPO",
    "dapo": "DAPO",
    "gspo": "GSPO",
    "cispo": "CISPO",
    "decoupled": "decoupled",
    "token-tis": "GRPO, token TIS",
    "sequence-mis": "GRPO, sequence MIS",
    "dppo": "DPPO",
    "m2po": "M2PO",
    "vespo": "VESPO",
    "vcpo": "VCPO",
}

TABLE = re.compile(r"<!-- table: (\S+) ([\d.]+) -->\n(.*?)\n?<!-- end -->", re.DOTALL)

AGREEMENT = re.compile(
    r"<!-- agreement: (\S+) ([\d.]+) (\S+) ([\d.]+) -->\n(.*?)\n?<!-- end -->", re.DOTALL
)

PAIRED = re.compile(r"<!-- paired: (\S+) (\S+) -->\n(.*?)\n?<!-- end -->", re.DOTALL)


def main() -> None:
    """Print a table, or the lines of a study."""
    parser = argparse.ArgumentParser(description="Tables of runs that are kept.")
    parser.add_argument("file", nargs="?", type=Path, help="lines with arm, regime, seed, held_out")
    parser.add_argument("--dead", type=float, default=0.0, help="below this a run is dead")
    parser.add_argument("--collect", type=Path, help="folder of a study")
    parser.add_argument("--update", type=Path, help="page whose tables are written anew")
    args = parser.parse_args()
    if args.update is not None:
        page = TABLE.sub(_filled, args.update.read_text())
        page = PAIRED.sub(_filled_differences, page)
        args.update.write_text(AGREEMENT.sub(_filled_agreement, page))
    elif args.collect is not None:
        sys.stdout.writelines(json.dumps(line) + "\n" for line in collect(args.collect))
    else:
        print(table(args.file, dead=args.dead))


def table(file: Path, *, dead: float) -> str:
    """Return the Markdown table of a file, the arms in the order of LABELS."""
    cells: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for line in file.read_text().splitlines():
        run = json.loads(line)
        cells[run["arm"]][run["regime"]].append((run["seed"], run["held_out"]))
    regimes = [each for each in REGIMES if any(each in row for row in cells.values())]
    head = ["objective", *(REGIMES[each] for each in regimes), "mean", "worst", "dead"]
    rows = [head, ["---"] * len(head)]
    for arm in sorted(cells, key=list(LABELS).index):
        row = cells[arm]
        means = [
            sum(value for _, value in row[each]) / len(row[each]) for each in regimes if each in row
        ]
        is_whole = len(means) == len(regimes)
        values = [value for each in regimes for _, value in row.get(each, [])]
        rows.append(
            [
                LABELS[arm],
                *(_cell(row.get(each, []), dead) for each in regimes),
                f"{sum(means) / len(means):.3f}" if is_whole else "",
                f"{min(means):.3f}" if is_whole else "",
                f"{sum(value < dead for value in values)} of {len(values)}",
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


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
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


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


def _filled_agreement(found: re.Match[str]) -> str:
    """Return a section of the page with the comparison of its two files."""
    first, dead_first, second, dead_second, _ = found.groups()
    shown = agreement(Path(first), float(dead_first), Path(second), float(dead_second))
    head = f"<!-- agreement: {first} {dead_first} {second} {dead_second} -->"
    return f"{head}\n{shown}\n<!-- end -->"


def _filled_differences(found: re.Match[str]) -> str:
    """Return a section of the page with the differences of its file."""
    file, arm, _ = found.groups()
    return f"<!-- paired: {file} {arm} -->\n{differences(Path(file), arm)}\n<!-- end -->"


def _filled(found: re.Match[str]) -> str:
    """Return a section of the page with the table of its file."""
    file, dead, _ = found.groups()
    return f"<!-- table: {file} {dead} -->\n{table(Path(file), dead=float(dead))}\n<!-- end -->"


def _cell(runs: list[tuple[int, float]], dead: float) -> str:
    """Return the numbers of a cell in the order of seeds."""
    shown = [f"{value:.3f}" for _, value in sorted(runs)]
    return " ".join(
        f"**{text}**" if value < dead else text
        for text, (_, value) in zip(shown, sorted(runs), strict=True)
    )


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
