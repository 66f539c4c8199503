"""What overlap is worth on one GPU: engines in processes of their own beside the trainer.

    python benchmarks/overlap_gpu.py CONFIG.toml [--engines native,vllm] [--steps 12]
        [--set model.name=FOLDER ...]

Each engine is measured twice with the same configuration: in turns with training (the synchronous
loop, with rollout.lag = 1) and beside it ([cluster] with one engine and max_lag = 1), so that both
train on rollouts that are one version old. Both share the GPU: what one takes, the other lacks.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from trustbatch.observe.run_folder import read_metrics

SHOWN = ("time/step_seconds", "time/generate_seconds", "time/train_seconds")


def means(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean of each time over these steps."""
    return {name: statistics.mean(float(step[name]) for step in steps) for name in SHOWN}


def measure(options: argparse.Namespace, engine: str, *, beside: bool, folder: Path) -> None:
    """Train, and append the mean times to the results."""
    name = f"{engine}-{'async' if beside else 'sync'}"
    how = ["--cluster.engines=1", "--cluster.max_lag=1"] if beside else ["--rollout.lag=1"]
    overrides = [
        f"--rollout.engine={engine}",
        *(["--rollout.vllm.gpu_memory_utilization=0.4"] if engine == "vllm" else []),
        *how,
        f"--training.steps={options.steps}",
        f"--run.folder={folder}",
        f"--run.name={name}",
        f"--run.checkpoint_every={options.steps}",
        *(f"--{each}" for each in options.set),
    ]
    started = time.monotonic()
    # a process for each, so that nothing of one run lies in the memory of the next
    command = [sys.executable, "-m", "trustbatch", "train", str(options.config), *overrides]
    subprocess.run(command, check=True, timeout=options.seconds)
    metrics = read_metrics(folder / name)
    counted = metrics[options.warm_up :]
    found = means(counted) | {
        "tokens": statistics.mean(
            float(step["time/tokens_per_second"]) * float(step["time/step_seconds"])
            for step in counted
        ),
        "reward": float(metrics[-1]["reward/mean"]),
        "seconds": time.monotonic() - started,
    }
    line = {"run": name} | found
    print(json.dumps(line), flush=True)
    with options.out.open("a") as out:
        out.write(json.dumps(line) + "\n")


def main() -> None:
    """Measure every engine in turns with the trainer and beside it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--engines", default="native,vllm")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument(
        "--warm-up",
        type=int,
        default=4,
        help="first steps that are not counted: graphs are captured, and the pipeline fills",
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of one run")
    parser.add_argument("--set", action="append", default=[], help="table.key=value")
    parser.add_argument("--out", type=Path, default=Path("overlap_gpu.jsonl"))
    options = parser.parse_args()
    if options.steps <= options.warm_up:
        sys.exit(f"--steps must be more than the {options.warm_up} that are not counted")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{time.strftime('%Y-%m-%d')}, {device}: python {' '.join(sys.argv)}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for engine in options.engines.split(","):
            for beside in (False, True):
                measure(options, engine, beside=beside, folder=Path(scratch))


if __name__ == "__main__":
    main()
