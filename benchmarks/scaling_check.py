"""Single points of the scaling simulation against real runs on this machine.

    python benchmarks/scaling_check.py                       # all that this version can run
    python benchmarks/scaling_check.py --parts engine,sync

engine   The native engine decodes rows of equal length, which gives the three costs of a step; then
         rows that stop when they stop, and the simulation says how long those take.
sync     The synchronous loop with real costs: what a batch costs is taken from a run without lag,
         and runs with `rollout.lag` are predicted from it step by step.
paced    The synchronous loop with unequal costs that are slept (pacing.py): every batch has costs
         of its own, and the waiting and the length of each step are predicted.
async    The same for the asynchronous loop, where this version has one.

`compare_steps` is what compares: it takes the lines of any run's metrics.jsonl.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from overlap import describe_hardware, has_asynchronous_loop
from pacing import make_tiny_model, paced_loops, run_tiny
from scaling_costs import EngineCosts
from scaling_decoding import chunk_ends
from scaling_schedule import Batch, Chunk, Timeline, simulate_pipeline, simulate_synchronous

PARTS = ("engine", "sync", "paced", "async")


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step: until its batch was there, and of the whole step."""

    wait: float
    step: float


def predicted_steps(line: Timeline) -> list[StepTimes]:
    """Return each step of a simulation as the loops measure it."""
    before = [0.0, *line.published[:-1]]
    return [
        StepTimes(wait=taken - start, step=end - start)
        for start, taken, end in zip(before, line.taken, line.published, strict=True)
    ]


def measured_steps(metrics: Sequence[Mapping[str, Any]]) -> list[StepTimes]:
    """Return the times in the lines of a metrics.jsonl."""
    return [
        StepTimes(wait=float(line["time/generate_seconds"]), step=float(line["time/step_seconds"]))
        for line in metrics
    ]


def simulated_run(
    *, generate: Sequence[float], train: Sequence[float], lag: int, asynchronous: bool
) -> list[StepTimes]:
    """Simulate a run whose batch b takes generate[b - 1] to sample and train[b - 1] to train on."""
    batches = [
        Batch(chunks=[Chunk.of(np.array([generating]))], train=training)
        for generating, training in zip(generate, train, strict=True)
    ]
    simulate = simulate_pipeline if asynchronous else simulate_synchronous
    line = simulate(batches, engines=1, lag=lag, steps=len(batches), publish=0.0, load=0.0)
    return predicted_steps(line)


def compare_steps(
    metrics: Sequence[Mapping[str, Any]],
    *,
    generate: Sequence[float],
    train: Sequence[float],
    lag: int,
    asynchronous: bool,
) -> list[tuple[StepTimes, StepTimes]]:
    """Return for every step what was measured and what the simulation says.

    Args:
        metrics: the lines of a run's metrics.jsonl (`trustbatch.observe.run_folder.read_metrics`).
        generate: seconds to sample each batch.
        train: seconds to train on each batch, weights handed over included.
        lag: `cluster.max_lag`, or `rollout.lag` of a synchronous run.
        asynchronous: which loop it was.
    """
    predicted = simulated_run(generate=generate, train=train, lag=lag, asynchronous=asynchronous)
    return list(zip(measured_steps(metrics), predicted, strict=True))


def report(name: str, pairs: Sequence[tuple[StepTimes, StepTimes]]) -> None:
    """Print a run beside its simulation."""
    print(f"\n{name}\n\nstep  measured: wait    step   simulated: wait    step")
    for number, (real, simulated) in enumerate(pairs, start=1):
        print(
            f"{number:4}  {real.wait:14.3f} {real.step:7.3f}  "
            f"{simulated.wait:15.3f} {simulated.step:7.3f}"
        )
    real = sum(measured.step for measured, _ in pairs)
    simulated = sum(predicted.step for _, predicted in pairs)
    print(f"all   {real:22.3f}  {simulated:23.3f}   simulated / measured {simulated / real:.3f}")


def check_engine(model: str, *, rounds: int = 3) -> None:
    """Compare a chunk of unequal lengths with what equal lengths say of it."""
    import torch

    from trustbatch.models.policy import Policy
    from trustbatch.rollout.native.engine import NativeEngine
    from trustbatch.types import GenerationRequest, SamplingParams

    torch.set_num_threads(1)  # then the process's seconds are those of a machine to itself
    policy = Policy.load(model, device="cpu").freeze()
    engine = NativeEngine(policy, seed=0)
    prompt = (2, 3, 4, 5)

    def measure(rows: int, length: int, *, stops: bool = False) -> tuple[float, list[int]]:
        sampling = SamplingParams(
            max_tokens=length, stop_token_ids=policy.stop_token_ids if stops else ()
        )
        requests = [
            GenerationRequest(
                prompt_id=str(number), token_ids=prompt, num_samples=1, sampling=sampling
            )
            for number in range(rows)
        ]
        sampled = engine.generate(requests)  # the first time, the cache grows to its size
        seconds = []
        for _ in range(rounds):
            start = time.process_time()
            engine.generate(requests)
            seconds.append(time.process_time() - start)
        return min(seconds), [len(completion.token_ids) for completion in sampled]

    # seconds = steps * step + rows * steps * row + (context read) * cached
    equations, seconds = [], []
    for rows, length in [(1, 30), (1, 110), (16, 60), (64, 30), (64, 110)]:
        read = rows * (length * len(prompt) + length * (length - 1) / 2)
        equations.append([length, rows * length, read])
        seconds.append(measure(rows, length)[0])
    relative = np.array(equations) / np.array(seconds)[:, None]
    solved, *_ = np.linalg.lstsq(relative, np.ones(len(relative)), rcond=None)
    step, row, cached = (float(value) for value in solved)
    costs = EngineCosts(step=step, row=row, cached=cached, seats=512)
    print(
        f"engine: {step * 1e6:.0f} us a step, {row * 1e6:.2f} us a row, {cached * 1e9:.2f} ns a "
        f"cached token; the fit is off by {np.abs(relative @ solved - 1).max():.0%} at most"
    )
    for rows in (32, 64):
        measured, sampled = measure(rows, 110, stops=True)
        simulated = float(
            chunk_ends(costs, np.array(sampled)[None, :, None], prompt=len(prompt)).max()
        )
        print(
            f"{rows} rows of {min(sampled)} to {max(sampled)} tokens, mean {np.mean(sampled):.0f}: "
            f"measured {measured:.3f} s, simulated {simulated:.3f} s, "
            f"ratio {simulated / measured:.3f}"
        )


def check_synchronous(model: str, scratch: Path, *, steps: int = 10) -> None:
    """Predict runs with a lag from one without."""
    sizes: dict[str, Any] = {"steps": steps, "prompts": 32, "tokens": 32}
    base = run_tiny(model, scratch / "lag-0", **sizes)
    generate = statistics.median(float(line["time/generate_seconds"]) for line in base[1:])
    train = statistics.median(float(line["time/train_seconds"]) for line in base[1:])
    print(
        f"\nsync: a batch takes {generate:.3f} s to sample and {train:.3f} s to train on at lag 0"
    )
    for lag in (1, 2):
        metrics = run_tiny(model, scratch / f"lag-{lag}", **sizes, rollout={"lag": lag})
        pairs = compare_steps(
            metrics,
            generate=[generate] * steps,
            train=[train] * steps,
            lag=lag,
            asynchronous=False,
        )
        report(f"synchronous, rollout.lag = {lag}", pairs)


def check_paced(
    model: str, scratch: Path, *, asynchronous: bool, lags: Sequence[int], steps: int = 12
) -> None:
    """Predict paced runs whose batches all have different costs."""
    generator = np.random.default_rng(0)
    loop = "asynchronous" if asynchronous else "synchronous"
    for name, generating, training in [("sampling", 0.8, 0.4), ("training", 0.4, 0.8)]:
        generate = (generating * generator.uniform(0.5, 1.5, steps)).tolist()
        train = (training * generator.uniform(0.5, 1.5, steps)).tolist()
        for lag in lags:
            tables: dict[str, Any] = {"rollout": {"lag": lag}}
            if asynchronous:
                tables = {"cluster": {"engines": 2, "max_lag": lag}}
            with paced_loops(generate, train):
                folder = scratch / f"{loop}-{name}-{lag}"
                metrics = run_tiny(model, folder, steps=steps, **tables)
            pairs = compare_steps(
                metrics, generate=generate, train=train, lag=lag, asynchronous=asynchronous
            )
            report(f"{loop}, {name} dominates, lag {lag}", pairs)


def main() -> None:
    """Run the selected parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--lags", type=int, nargs="+", default=(0, 1, 2), help="of paced, async")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        sys.exit(f"unknown part {sorted(unknown)[0]!r}: choose from {', '.join(PARTS)}")
    print(f"{time.strftime('%Y-%m-%d')}, {describe_hardware()}: python {' '.join(sys.argv)}")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = make_tiny_model(scratch / "model")
        if "engine" in parts:
            check_engine(model)
        if "sync" in parts:
            check_synchronous(model, scratch)
        if "paced" in parts:
            check_paced(model, scratch, asynchronous=False, lags=options.lags)
        if "async" in parts and not has_asynchronous_loop():
            print("\nasync: not run, this version has no [cluster] table")
        elif "async" in parts:
            check_paced(model, scratch, asynchronous=True, lags=options.lags)


if __name__ == "__main__":
    main()
