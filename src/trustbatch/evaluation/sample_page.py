"""Samples of an evaluation on its page: some problems of each task, with all that was sampled.

Problems, answers and samples are escaped by `text`.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trustbatch.observe.page_parts import figure, text

PROBLEMS_SHOWN = 24
"""of each task"""
SAMPLES_SHOWN = 8
"""of each problem"""
LONGEST_SAMPLE = 4000
"""characters"""


def spread_samples(file: Path, num_shown: int = PROBLEMS_SHOWN) -> list[dict[str, Any]]:
    """Return some lines of samples.jsonl, spread evenly over each task.

    The file is read twice, since it may not fit into memory: once for the number of problems.
    """
    counts: Counter[str] = Counter()
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            counts[json.loads(line)["task"]] += 1
    seen: Counter[str] = Counter()
    shown: Counter[str] = Counter()
    chosen = []
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            task = record["task"]
            # the next one to show is at this share of the problems
            if shown[task] < num_shown and seen[task] * num_shown >= shown[task] * counts[task]:
                shown[task] += 1
                chosen.append(record | {"problems": counts[task]})
            seen[task] += 1
    return chosen


def samples_section(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the problems by task, each of which opens on a click."""
    blocks = []
    for task in dict.fromkeys(record["task"] for record in records):
        found = [record for record in records if record["task"] == task]
        total = found[0].get("problems", len(found))
        number = f"{len(found):,} of {total:,} problems" if len(found) < total else "all problems"
        blocks.append(f"<h3>{text(task)} <small>{number}</small></h3>")
        blocks += map(_problem, found)
    return (
        '<section id="samples"><h2>Samples</h2><p class="hint">Problems spread evenly over each '
        f"task, each with its first {SAMPLES_SHOWN} samples; samples.jsonl has all.</p>"
        + "\n".join(blocks)
        + "</section>"
    )


def _problem(record: Mapping[str, Any]) -> str:
    samples = record["samples"]
    graded = [sample["reward"] for sample in samples if sample["reward"] is not None]
    result = f"{sum(reward == 1 for reward in graded)} of {len(samples)} correct"
    shown = "".join(map(_sample, samples[:SAMPLES_SHOWN]))
    more = len(samples) - SAMPLES_SHOWN
    rest = f'<p class="more">{more:,} more not shown</p>' if more > 0 else ""
    return (
        f"<details><summary><span>{text(record['id'])}</span><small>{result}</small></summary>"
        f'<div class="problem"><h4>Prompt</h4><pre>{_cut(record["prompt"])}</pre>'
        f"<h4>Answer</h4><pre>{_cut(record['answer'])}</pre><h4>Samples</h4>{shown}{rest}</div>"
        "</details>"
    )


def _sample(sample: Mapping[str, Any]) -> str:
    reward = sample["reward"]
    grade = f"reward {figure(reward)}" if reward is not None else f"{sample['status']}"
    reason = f", {sample['reason']}" if sample.get("reason") else ""
    ending = f"{grade}{reason}, {sample['tokens']:,} tokens, {sample['finish_reason']}"
    kind = "right" if reward == 1 else "wrong"
    turns = sample.get("turns") or [{"role": "", "text": sample["text"]}]
    said = "".join(
        (f"<small>{text(turn['role'])}</small>" if turn["role"] else "")
        + f"<pre>{_cut(turn['text'])}</pre>"
        for turn in turns
    )
    return f'<div class="sample {kind}"><small>{text(ending)}</small>{said}</div>'


def _cut(value: object) -> str:
    shown = str(value)
    more = len(shown) - LONGEST_SAMPLE
    rest = f'<span class="more"> … {more:,} more characters</span>' if more > 0 else ""
    return text(shown[:LONGEST_SAMPLE]) + rest
