"""What overlap is worth: asynchronous against synchronous steps, with parts of equal cost.

    python benchmarks/overlap.py [--seconds 1.0] [--engines 1] [--lag 1]

Both loops train a tiny model on the CPU; every batch takes at least --seconds to sample and as long
to train on (pacing.py: sleeping, so the machine's cores hardly matter). The synchronous step is
their sum; the aim for the asynchronous one is at most 0.6 of that.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pacing import make_tiny_model, paced_loops, run_tiny

from trustbatch.config import Config

AIM = 0.6
WARM_UP = 3
"""steps at the start that are not counted: the pipeline fills, and code runs for the first time"""


def has_asynchronous_loop() -> bool:
    """Whether this version has a [cluster] table."""
    return "cluster" in Config.model_fields


def step_seconds(metrics: list[dict[str, Any]]) -> float:
    """Return the mean seconds of the steps after the warm-up."""
    return statistics.mean(float(step["time/step_seconds"]) for step in metrics[WARM_UP:])


def describe_hardware() -> str:
    """Return what the script ran on, in a few words."""
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def main() -> None:
    """Run the synchronous loop, then the asynchronous one, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="to sample, and to train on, a batch"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--lag", type=int, default=1)
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        sys.exit(f"--steps must be more than the {WARM_UP} that are not counted")
    paces = [options.seconds]
    print(f"{time.strftime('%Y-%m-%d')}, {describe_hardware()}: python {' '.join(sys.argv)}")
    with tempfile.TemporaryDirectory() as scratch:
        model = make_tiny_model(Path(scratch) / "model")
        with paced_loops(paces, paces):
            metrics = run_tiny(model, Path(scratch) / "sync", steps=options.steps)
        synchronous = step_seconds(metrics)
        print(f"synchronous   {synchronous:.3f} s a step", flush=True)
        if not has_asynchronous_loop():
            print("asynchronous  not measured: this version has no [cluster] table")
            return
        cluster = {"engines": options.engines, "max_lag": options.lag}
        with paced_loops(paces, paces):
            metrics = run_tiny(model, Path(scratch) / "async", steps=options.steps, cluster=cluster)
        asynchronous = step_seconds(metrics)
    ratio = asynchronous / synchronous
    print(f"asynchronous  {asynchronous:.3f} s a step")
    print(f"ratio         {ratio:.3f} (aim: at most {AIM}: {'met' if ratio <= AIM else 'missed'})")


if __name__ == "__main__":
    main()
