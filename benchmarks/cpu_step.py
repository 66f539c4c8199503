"""Time one RL step (generate, score, train) of trustbatch beside TRL's GRPOTrainer on the CPU.

    pip install -e ".[bench]"
    python benchmarks/cpu_step.py

Both frameworks get the same checkpoint, prompts, rewards, batch, completion length, optimizer and
threads. Each run is a process of its own, and the two take turns, so that neither disturbs the
other and a slow minute of the machine hits both. See benchmarks/README.md for what is compared.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from cpu_step_model import make_checkpoint
from session_loop import train_session
from step_workload import SEED, SUMS_LEVEL, GradedSums, even_share
from transformers import AutoTokenizer
from transformers.utils import logging

from trustbatch.build.session import build_session
from trustbatch.config import parse_config
from trustbatch.observe.progress import Progress

FRAMEWORKS = ("trustbatch", "trl")
SIZES = ("tiny", "small")
COLUMNS = ("step", "generate", "score", "train", "cpu")
"""seconds of a step: total, its three phases, and CPU time of all threads"""
PACKAGES = ("trustbatch", "trl", "torch", "transformers", "accelerate", "tokenizers")
RESULT_FILE = Path(__file__).parent / "results" / "cpu_step.json"

WARM_UP_STEPS = 2
PROMPT_TOKENS = 6

LEARNING_RATE, BETAS, WEIGHT_DECAY, GRADIENT_CLIP = 1e-4, (0.9, 0.95), 0.01, 1.0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What both frameworks do; everything a worker needs."""

    size: str
    model: str
    folder: str
    steps: int
    prompts: int
    samples: int
    max_tokens: int
    threads: int

    @property
    def sequences(self) -> int:
        """Completions in a step."""
        return self.prompts * self.samples

    @property
    def total_steps(self) -> int:
        """Steps run: the timed ones, the warm-up before them and one after them.

        The one after is left out because a run's last step also saves a checkpoint.
        """
        return WARM_UP_STEPS + self.steps + 1


# --- one framework, in its own process ------------------------------------------------------------


class StepClock:
    """Measures the wall-clock time of each step and of its phases."""

    def __init__(self) -> None:
        self._ends: list[float] = []
        self._cpu_ends: list[float] = []
        self._phases: list[dict[str, float]] = []

    def end_step(self, *, generate: float, score: float) -> None:
        """Record the end of a step."""
        self._ends.append(time.perf_counter())
        self._cpu_ends.append(time.process_time())
        self._phases.append({"generate": generate, "score": score})

    def timed_steps(self) -> list[dict[str, float]]:
        """Return the seconds of each timed step, from the end of the step before to its own.

        What is neither generation nor scoring counts as training: nothing in the loop is left out.
        """
        steps = []
        for number in range(WARM_UP_STEPS, len(self._ends) - 1):
            total = self._ends[number] - self._ends[number - 1]
            phases = self._phases[number]
            train = total - sum(phases.values())
            cpu = self._cpu_ends[number] - self._cpu_ends[number - 1]
            steps.append({"step": total, **phases, "train": train, "cpu": cpu})
        return steps


def run_trustbatch(work: Workload) -> dict[str, Any]:
    """Run trustbatch's synchronous loop, as `trustbatch.train` does, with a clock in it."""
    task, clock = GradedSums(), StepClock()
    config = parse_config(trustbatch_settings(work))
    session = build_session(config, task)

    class TimedProgress(Progress):
        def update(self, step: int, metrics: Mapping[str, float]) -> None:
            super().update(step, metrics)
            generate = metrics["time/generate_seconds"]
            score = metrics["time/step_seconds"] - generate - metrics["time/train_seconds"]
            clock.end_step(generate=generate, score=score)
            lengths.update((metrics["response/length_mean"], metrics["response/length_max"]))
            rewards.append(metrics["reward/mean"])

    lengths: set[float] = set()
    rewards: list[float] = []
    try:
        train_session(session, TimedProgress(work.size, work.total_steps))
    finally:
        session.close()
    return {
        "steps": clock.timed_steps(),
        "completion_tokens": sorted(lengths),
        "first_reward": rewards[0],
    }


def trustbatch_settings(work: Workload) -> dict[str, Any]:
    """Return the configuration of trustbatch for this workload."""
    return {
        "seed": SEED,
        "model": {"name": work.model, "device": "cpu", "precision": "float32"},
        "task": {"name": "step_workload:GradedSums", "level": SUMS_LEVEL},
        "objective": {"name": "grpo", "clip_low": 0.2, "clip_high": 0.2},
        "rollout": {
            "prompts_per_step": work.prompts,
            "samples_per_prompt": work.samples,
            "max_tokens": work.max_tokens,
            "temperature": 1.0,
            "max_sequences": work.sequences,
        },
        "training": {
            "steps": work.total_steps,
            "micro_batch_tokens": work.sequences * (PROMPT_TOKENS + work.max_tokens),
            "learning_rate": LEARNING_RATE,
            "betas": BETAS,
            "weight_decay": WEIGHT_DECAY,
            "gradient_clip": GRADIENT_CLIP,
            "schedule": "constant",
            "warmup_fraction": 0.0,
        },
        "run": {
            "name": "trustbatch",
            "folder": work.folder,
            "checkpoint_every": work.total_steps,
            "rollouts_every": work.total_steps,
            "rollouts_logged": 0,
        },
    }


def run_trl(work: Workload) -> dict[str, Any]:
    """Run TRL's GRPOTrainer with a clock in it."""
    # imported here, so that it does not affect the other framework's process
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    clock, spent = StepClock(), dict.fromkeys(("generate", "prepare"), 0.0)

    def timed(name: str, call: Callable[[Any], Any], argument: Any) -> Any:
        start = time.perf_counter()
        result = call(argument)
        spent[name] += time.perf_counter() - start
        return result

    class TimedTrainer(GRPOTrainer):
        def _generate(self, prompts: list[Any]) -> Any:
            return timed("generate", super()._generate, prompts)

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            # generation, rewards, advantages and padding
            return timed("prepare", super()._prepare_inputs, generation_batch)

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.end_step(generate=spent["generate"], score=spent["prepare"] - spent["generate"])
            spent.update(generate=0.0, prepare=0.0)

    lengths: set[int] = set()
    rewards: list[list[float]] = []

    def reward(
        completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any
    ) -> list[float]:
        rewards.append([even_share(completion) for completion in completions])
        lengths.update(map(len, completion_ids))
        return rewards[-1]

    task = GradedSums()
    prompts = [task.prompt(i).text for i in range(work.prompts * work.total_steps)]
    trainer = TimedTrainer(
        model=work.model,
        reward_funcs=reward,
        args=GRPOConfig(**trl_settings(work)),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(work.model),
        callbacks=[Clock()],
    )
    trainer.train()
    return {
        "steps": clock.timed_steps(),
        "completion_tokens": sorted(lengths),
        "first_reward": statistics.fmean(rewards[0]),
    }


def trl_settings(work: Workload) -> dict[str, Any]:
    """Return the arguments of GRPOConfig for this workload."""
    return {
        "output_dir": f"{work.folder}/trl",
        "seed": SEED,
        "use_cpu": True,
        "bf16": False,
        "model_init_kwargs": {"dtype": "float32"},
        "max_steps": work.total_steps,
        # one generation of the whole batch, then one optimizer step on it
        "per_device_train_batch_size": work.sequences,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "num_iterations": 1,
        "num_generations": work.samples,
        "max_completion_length": work.max_tokens,
        "temperature": 1.0,
        "shuffle_dataset": False,
        "loss_type": "dapo",  # the mean over all tokens of the step, as in trustbatch
        "epsilon": 0.2,
        "beta": 0.0,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": GRADIENT_CLIP,
        "optim": "adamw_torch_fused",
        # features that would only cost time here
        "use_vllm": False,
        "gradient_checkpointing": False,
        "torch_compile": False,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def run_worker(framework: str, work: Workload, output: Path) -> None:
    """Run one framework and write what it measured."""
    torch.set_num_threads(work.threads)
    result = (run_trustbatch if framework == "trustbatch" else run_trl)(work)
    result["torch"] = torch_settings()
    output.write_text(json.dumps(result), encoding="utf-8")


def torch_settings() -> dict[str, Any]:
    """Return the settings that decide how fast torch is on this CPU, after the run."""
    return {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.is_available(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


# --- both frameworks ------------------------------------------------------------------------------


def measure(framework: str, work: Workload) -> dict[str, Any]:
    """Run one framework in its own process and return what it measured."""
    with tempfile.TemporaryDirectory(prefix="cpu-step-") as folder:
        work = Workload(**{**asdict(work), "folder": folder})
        output = Path(folder) / "result.json"
        arguments = ["--worker", framework, "--work", json.dumps(asdict(work))]
        threads = str(work.threads)
        answer = subprocess.run(
            [sys.executable, __file__, *arguments, "--output", str(output)],
            env=os.environ
            | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if answer.returncode != 0:
            raise SystemExit(f"{framework} failed:\n{answer.stderr}")
        result = json.loads(output.read_text(encoding="utf-8"))
    check_same_work(framework, work, result)
    return result


def check_same_work(framework: str, work: Workload, result: Mapping[str, Any]) -> None:
    """Refuse a run that did not do exactly the workload."""
    lengths, threads = result["completion_tokens"], result["torch"]["threads"]
    if lengths != [work.max_tokens] or len(result["steps"]) != work.steps:
        raise SystemExit(
            f"{framework} sampled completions of {lengths} tokens in {len(result['steps'])} timed "
            f"steps, not {work.max_tokens} tokens in {work.steps} steps."
        )
    if threads != work.threads:
        raise SystemExit(f"{framework} ran on {threads} threads, not {work.threads}.")


def compare(size: str, max_tokens: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run both frameworks in turn on one size of model and one length of completions."""
    with tempfile.TemporaryDirectory(prefix="cpu-step-model-") as model:
        parameters = make_checkpoint(size, Path(model))
        work = Workload(
            size=size,
            model=model,
            folder="",
            steps=arguments.steps,
            prompts=arguments.prompts,
            samples=arguments.samples,
            max_tokens=max_tokens,
            threads=arguments.threads,
        )
        rounds: list[dict[str, dict[str, Any]]] = []
        for number in range(1, arguments.repeats + 1):
            rounds.append({framework: measure(framework, work) for framework in FRAMEWORKS})
            seconds = {name: median_of(run["steps"], "step") for name, run in rounds[-1].items()}
            shown = ", ".join(f"{name} {value:.3f} s" for name, value in seconds.items())
            label = f"{size}, {max_tokens} tokens, round {number}/{arguments.repeats}"
            print(f"{label}: {shown}", flush=True)
    return {
        "size": size,
        "max_tokens": max_tokens,
        "parameters": parameters,
        **summarize(rounds),
        "rounds": rounds,
    }


def summarize(rounds: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return medians over all timed steps of each framework, and ratios of the medians."""
    medians = {
        framework: {
            phase: median_of([step for run in rounds for step in run[framework]["steps"]], phase)
            for phase in COLUMNS
        }
        for framework in FRAMEWORKS
    }
    by_round = [
        median_of(run["trl"]["steps"], "step") / median_of(run["trustbatch"]["steps"], "step")
        for run in rounds
    ]
    return {
        "median_seconds": medians,
        "ratio": medians["trl"]["step"] / medians["trustbatch"]["step"],
        "cpu_ratio": medians["trl"]["cpu"] / medians["trustbatch"]["cpu"],
        "ratio_by_round": by_round,
        "torch": rounds[0]["trustbatch"]["torch"],
    }


def median_of(steps: Sequence[Mapping[str, float]], phase: str) -> float:
    """Return the median seconds of a phase."""
    return statistics.median(step[phase] for step in steps)


def print_comparison(comparison: Mapping[str, Any]) -> None:
    """Print the table of one size of model and one length of completions."""
    size = f"{comparison['size']} ({comparison['parameters'] / 1e6:.2f}M parameters)"
    print(f"\n{size}, {comparison['max_tokens']} tokens a completion")
    print(f"{'median seconds':16}" + "".join(f"{name:>10}" for name in COLUMNS))
    for framework in FRAMEWORKS:
        medians = comparison["median_seconds"][framework]
        cells = "".join(f"{medians[phase]:10.4f}" for phase in COLUMNS)
        print(f"{framework:16}{cells}")
    low, high = min(comparison["ratio_by_round"]), max(comparison["ratio_by_round"])
    print(
        f"TRL / trustbatch: {comparison['ratio']:.2f} (by round {low:.2f} to {high:.2f}; "
        f"in CPU time {comparison['cpu_ratio']:.2f})"
    )


def describe_machine() -> dict[str, Any]:
    """Return versions and hardware."""
    return {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
        "load_average": os.getloadavg(),
    }


def cpu_name() -> str:
    """Return the model of the CPU, if the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="timed steps in each run")
    parser.add_argument("--prompts", type=int, default=32, help="prompts per step")
    parser.add_argument("--samples", type=int, default=8, help="completions of each prompt")
    parser.add_argument(
        "--max-tokens", nargs="+", type=int, default=[4, 16, 64], help="tokens of each completion"
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of each framework")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["tiny"], help="models")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--result", type=Path, default=RESULT_FILE, help="where the JSON goes")
    parser.add_argument("--worker", choices=FRAMEWORKS, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Compare both frameworks, print the ratio and write the result."""
    arguments = parse_arguments()
    logging.disable_progress_bar()
    if arguments.worker:
        run_worker(arguments.worker, Workload(**arguments.work), arguments.output)
        return
    machine = describe_machine()
    shape = {
        name: getattr(arguments, name)
        for name in ("steps", "prompts", "samples", "max_tokens", "repeats", "threads")
    }
    command = f"python benchmarks/cpu_step.py {' '.join(sys.argv[1:])}".strip()
    print(command)
    print(", ".join(f"{name} {number}" for name, number in machine["packages"].items()))
    print(f"{machine['cpu']}, {machine['cpu_cores']} cores, load {machine['load_average'][0]:.1f}")
    print(", ".join(f"{name} {value}" for name, value in shape.items()))
    comparisons = [
        compare(size, max_tokens, arguments)
        for size in arguments.sizes
        for max_tokens in arguments.max_tokens
    ]
    for comparison in comparisons:
        print_comparison(comparison)
    print(f"\ntorch: {comparisons[0]['torch']}")
    result = {"command": command, "workload": shape, **machine, "comparisons": comparisons}
    arguments.result.parent.mkdir(parents=True, exist_ok=True)
    arguments.result.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"written: {arguments.result}")


if __name__ == "__main__":
    main()
