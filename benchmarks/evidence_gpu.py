"""The runs of docs/evidence.md: objectives x off-policy regimes x seeds, several at a time.

    python benchmarks/evidence_gpu.py --model FOLDER --data FOLDER --out results/gpu/runs.jsonl \\
        --plan pact:1,2,3 grpo:1,2 --parallel 6 --minutes 9

Each finished run is one line of --out: its configuration, a few numbers of every step and the
held-out reward. Runs that are in it already, or in --done, are skipped, so that a campaign can
continue on another machine. Under `nvidia-cuda-mps-control -d` processes share the GPU better.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS, STEPS_WITH_LAG = 16, 24
REGIMES: dict[str, dict[str, Any]] = {
    "fresh": {},
    "t1.2": {"rollout.temperature": 1.2},
    "t0.6": {"rollout.temperature": 0.6},
    "top-p0.95": {"rollout.top_p": 0.95},
    "lag8": {"rollout.lag": 8},
    "t1.2-lag4": {"rollout.temperature": 1.2, "rollout.lag": 4},
    "lag2": {"rollout.lag": 2},
    "fp8": {"rollout.precision": "fp8"},
    "fp8-kv": {"rollout.kv_precision": "fp8"},
    "mixed50": {"rollout.policies": [{"model": "", "share": 0.5}]},  # the model of --second-model
}
FIRST_REGIMES = tuple(REGIMES)[:6]
"""of a plan that names none"""
ARMS: dict[str, dict[str, Any]] = {
    "pact": {"name": "pact"},
    "pact-rms": {"name": "pact", "pull": "deviation"},
    "prox": {"name": "pact", "anchor": "proximal"},
    "prox-rms": {"name": "pact", "anchor": "proximal", "pull": "deviation"},
    "prox-0.3": {"name": "pact", "anchor": "proximal", "pull": 0.3},
    "prox-1": {"name": "pact", "anchor": "proximal", "pull": 1.0},
    "p3o": {"name": "p3o"},
    "p3o-sampler": {"name": "p3o", "anchor": "sampler"},
    "grpo": {"name": "grpo"},
    "cispo": {"name": "cispo"},
    "decoupled": {"name": "decoupled"},
    "sequence-mis": {"name": "grpo_is"},
    "dppo": {"name": "dppo"},
    "m2po": {"name": "m2po"},
    "vespo": {"name": "vespo"},
    "vcpo": {"name": "vcpo"},
    "dapo": {"name": "dapo"},
    "gspo": {"name": "gspo"},
    "two-anchor": {"name": "two_anchor"},
}
KEPT = (
    "reward/mean",
    "entropy",
    "one_minus_ess",
    "ratio/mean",
    "weight/cap",
    "kl/penalty",
    "pull/strength",
    "pull/sequences",
    "ratio/clipped_fraction",
    "gradient/norm",
    "response/length_mean",
    "response/truncated_fraction",
    "time/step_seconds",
)
HELD_OUT_PROMPTS, HELD_OUT_SAMPLES, MAX_TOKENS = 256, 4, 400


def main() -> None:
    """Run what is planned and not done, until the time is over."""
    args = parse()
    started = time.monotonic()
    done = {line["name"] for path in (args.out, args.done) for line in read_lines(path)}
    jobs = [job for job in plan(args.plan) if job["name"] not in done]
    print(f"{len(jobs)} runs to do, {len(done)} done", flush=True)
    context = multiprocessing.get_context("spawn")
    queue, lock = context.Queue(), context.Lock()
    for job in jobs:
        queue.put(job)
    for _ in range(args.parallel):
        queue.put(None)
    deadline = time.time() + 60 * args.minutes
    pool = [
        context.Process(target=work, args=(queue, lock, args, deadline, args.commit or commit()))
        for _ in range(args.parallel)
    ]
    for process in pool:
        process.start()
        time.sleep(1.0)
    for process in pool:
        process.join(max(deadline - time.time(), 0.0))
    for process in pool:
        if process.is_alive():
            process.kill()
    names = {line["name"] for line in read_lines(args.out)}
    print(f"{len(names)} runs in {args.out} after {time.monotonic() - started:.0f} s", flush=True)


def plan(words: list[str]) -> list[dict[str, Any]]:
    """Return the runs of plans such as "grpo:1,2" or "grpo@t1.2,lag8:1", in their order."""
    jobs = []
    for word in words:
        arm, seeds = word.split(":")
        arm, _, regimes = arm.partition("@")
        for seed in seeds.split(","):
            for regime in regimes.split(",") if regimes else FIRST_REGIMES:
                name = f"{regime}--{arm}--seed-{seed}"
                jobs.append({"name": name, "arm": arm, "regime": regime, "seed": int(seed)})
    return jobs


def work(queue: Any, lock: Any, args: Any, deadline: float, revision: str) -> None:
    """Take runs from the queue until it is empty or there is no time for another."""
    from trustbatch.errors import DivergedError, TrustbatchError

    while (job := queue.get()) is not None:
        if time.time() > deadline - args.least_seconds:
            return
        started = time.time()
        try:
            record = run(job, args)
        except (RuntimeError, TrustbatchError) as error:
            print(f"FAILED {job['name']}: {error}", flush=True)
            if isinstance(error, DivergedError):  # a failure of the run, not of the machine
                write(lock, args.out, {**job, "held_out": 0.0, "failed": str(error)})
            continue
        record |= {"seconds": round(time.time() - started, 1), "commit": revision}
        write(lock, args.out, record)
        steps = record["steps"]
        print(
            f"{job['name']:32} held-out {record['held_out']:.3f} +- {record['standard_error']:.3f}"
            f"  entropy {steps['entropy'][0]:.2f} -> {steps['entropy'][-1]:.2f}"
            f"  1-ESS {steps['one_minus_ess'][-1]:.1e}  {record['seconds']:.0f} s",
            flush=True,
        )


def write(lock: Any, file: str, record: dict[str, Any]) -> None:
    """Append a finished run to the file."""
    with lock, Path(file).open("a") as out:
        out.write(json.dumps(record) + "\n")


def run(job: dict[str, Any], args: Any) -> dict[str, Any]:
    """Train one run without checkpoints and evaluate what it has learned."""
    import torch
    from session_loop import train_session

    from trustbatch.build.session import build_session
    from trustbatch.config import parse_config
    from trustbatch.observe.progress import Progress
    from trustbatch.observe.run_folder import read_metrics

    with tempfile.TemporaryDirectory() as folder, open("/dev/null", "w") as nowhere:
        tree = configuration(job, args, folder)
        session = build_session(parse_config(tree))
        session = dataclasses.replace(session, checkpointer=NoCheckpoints())
        try:
            before = (
                {"held_out_before": held_out(session.policy, args).mean_reward}
                if args.before
                else {}
            )
            with contextlib.closing(session.run), session.run.status:
                train_session(session, Progress(job["name"], 0, stream=nowhere))
            session.engine.sleep()
            result = held_out(session.policy, args)
        finally:
            session.scorer.close()
            session.engine.close()
        rows = read_metrics(Path(folder) / job["name"])
    del session
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    steps = {
        key: [float(f"{row[key]:.5g}") for row in rows]
        for key in KEPT
        if all(key in r for r in rows)
    }
    return {
        **job,
        "config": {key: tree[key] for key in ("objective", "rollout", "training")}
        | {"model": {key: value for key, value in tree["model"].items() if key != "name"}},
        **before,
        "held_out": result.mean_reward,
        "standard_error": result.standard_error,
        "steps": steps,
    }


def held_out(policy: Any, args: Any) -> Any:
    """Evaluate a policy on problems that are never trained on."""
    from trustbatch.evaluation import evaluate
    from trustbatch.tasks import build_task

    return evaluate(
        policy,
        build_task("gsm8k", path=f"{args.data}/gsm8k_test.jsonl.gz", seed=0, shuffle=False),
        num_prompts=args.held_out,
        num_samples=HELD_OUT_SAMPLES,
        max_tokens=MAX_TOKENS,
    )


def configuration(job: dict[str, Any], args: Any, folder: str) -> dict[str, Any]:
    """Return the tables of one run."""
    from trustbatch.utils.tables import set_key

    has_lag = any(key == "rollout.lag" for key in REGIMES[job["regime"]])
    num_steps = args.steps or (STEPS_WITH_LAG if has_lag else STEPS)
    tree: dict[str, Any] = {
        "seed": job["seed"],
        "model": {"name": args.model},
        "task": {"name": "gsm8k", "path": f"{args.data}/gsm8k_train.jsonl.gz"},
        "objective": dict(ARMS[job["arm"]]),
        "rollout": {"prompts_per_step": 24, "samples_per_prompt": 8, "max_tokens": MAX_TOKENS},
        "training": {
            "steps": num_steps,
            "mini_batches": 8,
            "learning_rate": 4e-6,
            "micro_batch_tokens": 4096,
        },
        "run": {"name": job["name"], "folder": folder, "rollouts_logged": 0},
    }
    for key, value in REGIMES[job["regime"]].items():
        set_key(tree, key, value)
    for policy in tree["rollout"].get("policies", ()):
        policy["model"] = args.second_model
    for change in args.set:
        key, value = change.split("=", 1)
        set_key(tree, key, json.loads(value))
    return tree


class NoCheckpoints:
    """In place of a Checkpointer: these runs leave numbers, not weights."""

    def save(self, loop: Any) -> None:
        """Save nothing."""

    def finish(self) -> None:
        """Do nothing: no checkpoint is being written."""

    raise_failure = close = finish


def read_lines(path: str | None) -> list[dict[str, Any]]:
    """Return the runs of a file, if there is one."""
    if path is None or not Path(path).exists():
        return []
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def commit() -> str:
    """Return the commit of the code, if git knows it."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--second-model", help="folder of the other model of mixed50")
    parser.add_argument("--data", required=True, help="folder with gsm8k_{train,test}.jsonl.gz")
    parser.add_argument("--out", required=True, help="file that finished runs are added to")
    parser.add_argument("--done", help="file of runs that need not be run again")
    parser.add_argument("--plan", nargs="+", required=True, help="ARM[@REGIME,...]:SEED,...")
    parser.add_argument("--parallel", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--least-seconds", type=float, default=100.0, help="to start another run")
    parser.add_argument("--steps", type=int, help="of each run; 16, or 24 with lag")
    parser.add_argument("--held-out", type=int, default=HELD_OUT_PROMPTS, help="problems")
    parser.add_argument("--before", action="store_true", help="evaluate before training, too")
    parser.add_argument("--commit", help="state of the code, where git does not know it")
    parser.add_argument("--set", action="append", default=[], help="KEY=JSON for all runs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
