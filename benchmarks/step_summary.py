"""The results of step_gpu.py as text: lines, medians and ratios."""

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def describe_line(line: Mapping[str, Any]) -> str:
    """Return a result as a line of text."""
    if "step" in line:
        kind = "timed" if line["is_timed"] else "warm-up"
        return (
            f"{line['framework']:18} step {line['step']} ({kind})  {line['seconds']:8.3f} s  "
            f"generate {line['generate']:.3f}  train {line['train']:.3f}"
        )
    if "peak_gib" in line:
        peaks = ", ".join(f"{k} {v:.1f}" for k, v in line["peak_gib"]["whole_run"].items())
        return f"{line['framework']:18} peak GiB: {peaks or 'no GPU'}"
    return json.dumps(line)


def summarize(lines: Sequence[Mapping[str, Any]], frameworks: Sequence[str]) -> dict[str, Any]:
    """Return medians of the timed steps, peaks, and ratios to the first framework."""
    summary: dict[str, Any] = {}
    for framework in frameworks:
        own = [line for line in lines if line.get("framework") == framework]
        # after running out of memory only the last attempt counts
        starts = [n for n, line in enumerate(own) if line.get("step") == 1]
        own = own[starts[-1] :] if starts else []
        steps = [line for line in own if line.get("is_timed")]
        if not steps:
            continue
        peaks = [line["peak_gib"]["whole_run"] for line in own if "peak_gib" in line]
        summary[framework] = {
            "num_timed": len(steps),
            **{
                phase: statistics.median(step[phase] for step in steps)
                for phase in ("seconds", "generate", "train")
            },
            "peak_gib": peaks[-1] if peaks else {},
        }
    first = summary.get(frameworks[0])
    for each in summary.values():
        if first is not None:
            each["time_ratio"] = each["seconds"] / first["seconds"]
            both = each["peak_gib"].get("device"), first["peak_gib"].get("device")
            each["memory_ratio"] = both[0] / both[1] if all(both) else None
    return summary


def print_summary(summary: Mapping[str, Any], first: str) -> None:
    """Print a line per framework."""
    columns = ("s/step", "generate", "train", "device GiB", "reserved", "allocated")
    print(f"\n{'median':18}" + "".join(f"{c:>11}" for c in columns) + f"   beside {first}")
    for framework, each in summary.items():
        peaks = [each["peak_gib"].get(n) for n in ("device", "torch_reserved", "torch_allocated")]
        times = "".join(f"{each[phase]:11.3f}" for phase in ("seconds", "generate", "train"))
        memory = "".join(f"{'-' if peak is None else format(peak, '.1f'):>11}" for peak in peaks)
        ratio = f"time x {each['time_ratio']:.2f}" if "time_ratio" in each else ""
        if each.get("memory_ratio"):
            ratio += f", memory x {each['memory_ratio']:.2f}"
        print(f"{framework:18}{times}{memory}   {ratio}")
