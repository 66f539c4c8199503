"""Time one RL step of trustbatch beside TRL's GRPOTrainer with colocated vLLM, on one GPU.

    python benchmarks/step_gpu.py [--frameworks trustbatch,trl] [--set training.compile=true]

64 prompts x 8 samples x 512 tokens on Qwen3-0.6B's shape with random weights. Each framework runs
in its own process, one after the other; the first steps warm up, the others are timed. Every
step is a JSON line in benchmarks/results/step_gpu.jsonl as soon as it has ended. See
benchmarks/README.md for what is compared. Without a GPU, `--shape tiny` with small sizes shows that
the script runs: TRL then generates by transformers, and the figures mean nothing.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from memory_watch import MemoryWatch
from qwen3_shapes import SHAPES, make_checkpoint
from step_summary import describe_line, print_summary, summarize
from step_workload import SEED, RandomPrompts, Workload, even_share
from worker_process import (
    Results,
    describe_machine,
    end_here,
    refuse_missing,
    run_worker,
)

TRL_VARIANTS: dict[str, dict[str, Any]] = {
    "trl": {},
    "trl-checkpointing": {"gradient_checkpointing": True},
    "trl-liger": {"use_liger_kernel": True},
}
"""what each changes in `trl_settings`; liger's kernels are of layers, TRL brings its own loss"""
OUR_VARIANTS: dict[str, tuple[str, ...]] = {
    "trustbatch": (),
    "trustbatch-kv8": ('rollout.kv_precision="fp8"',),
}
"""what each changes in the configuration"""
FRAMEWORKS = (*OUR_VARIANTS, *TRL_VARIANTS)
RESULT_FILE = Path(__file__).parent / "results" / "step_gpu.jsonl"
CONTEXT = 4096
ROOM = 16
"""tokens of vLLM's context that no sequence needs"""
LEARNING_RATE, BETAS, WEIGHT_DECAY, GRADIENT_CLIP = 1e-6, (0.9, 0.95), 0.01, 1.0
HALVINGS = 2
"""of the micro-batch, if the GPU's memory is too small for it"""
SHORTEST_RUN_SECONDS = 60.0


# --- one framework, in its own process ------------------------------------------------------------


class StepClock:
    """Measures each step, from the end of the one before to its own, and writes the results.

    What is not generation counts as training: nothing in the loop is left out.
    """

    def __init__(self, work: Workload) -> None:
        self._work = work
        self._results = Results(Path(work.output), work.run)
        self._watch = MemoryWatch()
        self._last_end = self._start = time.perf_counter()
        self._num_steps = 0
        self._warm_up_peaks: dict[str, float] = {}

    @property
    def is_done(self) -> bool:
        """Whether all steps have been timed."""
        return self._num_steps == self._work.total_steps

    def end_step(self, *, generate: float, tokens: int, details: Mapping[str, float]) -> None:
        """Record the end of a step; refuse one with other work than configured."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        seconds, self._last_end = now - self._last_end, now
        self._num_steps += 1
        expected = self._work.sequences * self._work.tokens
        if tokens != expected:
            raise SystemExit(f"The step sampled {tokens} tokens, not {expected}.")
        self._results.add(
            {
                "framework": self._work.framework,
                "step": self._num_steps,
                # the first one includes the start of the process, of engines and of compilers
                "is_timed": self._num_steps > self._work.warm_up,
                "seconds": seconds,
                "generate": generate,
                "train": seconds - generate,
                "details": dict(details),
            }
        )
        if self._num_steps == self._work.warm_up:
            self._warm_up_peaks = self._watch.peaks_gib()
            self._watch.restart()
        if self.is_done:
            self._write_memory()

    def _write_memory(self) -> None:
        timed = self._watch.peaks_gib()
        whole = {
            name: max(peak, self._warm_up_peaks.get(name, 0.0)) for name, peak in timed.items()
        }
        self._watch.close()
        self._results.add(
            {
                "framework": self._work.framework,
                "peak_gib": {"timed_steps": timed, "whole_run": whole},
                "micro_batch_tokens": self._work.micro_batch_tokens,
                "trl_batch": self._work.trl_batch,
                "seconds_in_all": time.perf_counter() - self._start,
            }
        )


class EnoughError(Exception):
    """Ends a run after its last timed step, without the checkpoint of a finished run."""


def run_trustbatch(work: Workload) -> None:
    """Run the synchronous loop as `trustbatch.train` does, with a clock in it."""
    from session_loop import train_session

    from trustbatch.build.session import build_session
    from trustbatch.observe.progress import Progress

    clock = StepClock(work)
    task = RandomPrompts(tokens=work.prompt_tokens, vocabulary=SHAPES[work.shape].vocabulary)

    class ClockedProgress(Progress):
        def update(self, step: int, metrics: Mapping[str, float]) -> None:
            super().update(step, metrics)
            clock.end_step(
                generate=metrics["time/generate_seconds"],
                tokens=round(metrics["response/length_mean"] * work.sequences),
                details={
                    name: value
                    for name, value in metrics.items()
                    if name.startswith(("time/", "memory/", "reward/", "gradient/"))
                    or name == "one_minus_ess"
                },
            )
            if clock.is_done:
                raise EnoughError

    with tempfile.TemporaryDirectory(prefix="step-gpu-") as folder:
        session = build_session(configure_trustbatch(work, folder), task)
        try:
            train_session(session, ClockedProgress(work.framework, work.total_steps))
        except EnoughError:
            pass
        finally:
            session.close()


def configure_trustbatch(work: Workload, folder: str) -> Any:
    """Return the configuration of trustbatch for this workload."""
    from trustbatch.config import apply_override, parse_config

    one_more = work.total_steps + 1  # the last step of a run saves a checkpoint
    tree = {
        "seed": SEED,
        "model": {"name": work.model},
        "task": {"name": "step_workload:RandomPrompts"},
        "objective": {"name": "p3o"},
        "rollout": {
            "engine": "native",
            "prompts_per_step": work.prompts,
            "samples_per_prompt": work.samples,
            "max_tokens": work.tokens,
            "temperature": 1.0,
            "max_sequences": work.sequences,
        },
        "training": {
            "steps": one_more,
            "micro_batch_tokens": work.micro_batch_tokens,
            "learning_rate": LEARNING_RATE,
            "betas": list(BETAS),
            "weight_decay": WEIGHT_DECAY,
            "gradient_clip": GRADIENT_CLIP,
            "schedule": "constant",
            "warmup_fraction": 0.0,
        },
        "run": {
            "name": "trustbatch",
            "folder": folder,
            "checkpoint_every": one_more,
            "rollouts_every": one_more,
        },
    }
    for override in (*OUR_VARIANTS[work.framework], *work.overrides):
        apply_override(tree, f"--{override}")
    return parse_config(tree)


def run_trl(work: Workload) -> None:
    """Run TRL's GRPOTrainer with a clock in it."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    clock = StepClock(work)
    spent = dict.fromkeys(("generate", "publish"), 0.0)
    sampled: list[int] = []
    rewards: list[float] = []

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*arguments: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            result = call(*arguments, **keywords)
            spent[name] += time.perf_counter() - start
            return result

        return timed_call

    class TimedTrainer(GRPOTrainer):
        def _generate(self, prompts: list[Any]) -> Any:
            return timed("generate", super()._generate)(prompts)

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.end_step(
                # TRL publishes the weights on its way to generate; trustbatch in its training time
                generate=spent["generate"] - spent["publish"],
                tokens=sum(sampled),
                details={
                    "publish": spent["publish"],
                    "reward/mean": statistics.fmean(rewards),
                },
            )
            spent.update(generate=0.0, publish=0.0)
            sampled.clear()
            rewards.clear()

    def reward(
        completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any
    ) -> list[float]:
        sampled.extend(map(len, completion_ids))
        graded = [even_share(completion) for completion in completions]
        rewards.extend(graded)
        return graded

    task = RandomPrompts(tokens=work.prompt_tokens, vocabulary=SHAPES[work.shape].vocabulary)
    prompts = [task.text(index) for index in range(work.prompts * work.total_steps)]
    with tempfile.TemporaryDirectory(prefix="step-gpu-") as folder:
        trainer = TimedTrainer(
            model=work.model,
            reward_funcs=reward,
            args=GRPOConfig(**trl_settings(work, folder)),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=AutoTokenizer.from_pretrained(work.model),
            callbacks=[Clock()],
        )
        if trainer.use_vllm:
            engine = trainer.vllm_generation
            engine.sync_weights = timed("publish", engine.sync_weights)
        trainer.train()


def trl_settings(work: Workload, folder: str) -> dict[str, Any]:
    """Return the arguments of GRPOConfig for this workload."""
    has_gpu = torch.cuda.is_available()
    batch = min(work.trl_batch, work.sequences)
    if work.sequences % batch:
        raise SystemExit(f"--trl-batch must divide the {work.sequences} completions of a step.")
    settings = {
        "output_dir": folder,
        "seed": SEED,
        "use_cpu": not has_gpu,
        # parameters in float32 and products in bfloat16, as in trustbatch
        "bf16": has_gpu,
        "model_init_kwargs": {"dtype": "float32"},
        "max_steps": work.total_steps,
        # one generation of all completions, then one optimizer step on them
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": work.sequences // batch,
        "steps_per_generation": work.sequences // batch,
        "num_iterations": 1,
        "num_generations": work.samples,
        "max_completion_length": work.tokens,
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
        "use_vllm": has_gpu,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": work.prompt_tokens + work.tokens + ROOM,
        "generation_kwargs": {"ignore_eos": True} if has_gpu else None,  # of vLLM
        # not needed at this size, and recomputation takes time
        "gradient_checkpointing": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    } | TRL_VARIANTS[work.framework]
    for override in work.trl_overrides:
        name, _, text = override.partition("=")
        settings[name] = json.loads(text)
    return settings


# --- both frameworks ------------------------------------------------------------------------------


def start_worker(work: Workload, seconds: float) -> str:
    """Run one framework; returns how it ended."""
    arguments = ["--work", json.dumps(asdict(work))]
    results = Results(Path(work.output), work.run)
    return run_worker(work.framework, arguments, results, seconds=seconds, show=describe_line)


def measure(work: Workload, deadline: float) -> None:
    """Run one framework, and again with smaller micro-batches if memory runs out."""
    for _ in range(1 + HALVINGS):
        left = deadline - time.monotonic()
        if left < SHORTEST_RUN_SECONDS:
            print(f"{work.framework}: left out, only {left:.0f} s of --seconds are left")
            return
        if start_worker(work, left) != "out of memory":
            return
        work = work.halved()


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frameworks", default="trustbatch,trl", help=", ".join(FRAMEWORKS))
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--prompts", type=int, default=64, help="prompts per step")
    parser.add_argument("--samples", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each completion")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=2, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=2, help="timed steps")
    parser.add_argument(
        "--micro-batch-tokens", type=int, default=16384, help="of trustbatch, halved if too large"
    )
    parser.add_argument(
        "--trl-batch", type=int, default=32, help="sequences in a micro-batch of TRL, likewise"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="change trustbatch's configuration; may be repeated",
    )
    parser.add_argument(
        "--trl-set",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="change an argument of GRPOConfig; may be repeated",
    )
    parser.add_argument("--seconds", type=float, default=570.0, help="for all frameworks together")
    parser.add_argument("--folder", type=Path, help="folder of the checkpoint; made if missing")
    parser.add_argument("--output", type=Path, default=RESULT_FILE, help="file for JSON lines")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--prepare", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.frameworks = arguments.frameworks.split(",")
    for framework in arguments.frameworks:
        if framework not in FRAMEWORKS:
            parser.error(
                f"there is no framework {framework!r}: choose from {', '.join(FRAMEWORKS)}"
            )
    return arguments


def needed_modules(frameworks: Sequence[str]) -> list[str]:
    """Return the packages that must be installed."""
    needed = ["trustbatch", "tomli_w", "tensorboard"]
    if any(framework in TRL_VARIANTS for framework in frameworks):
        needed += ["trl", "datasets", *(["vllm"] if torch.cuda.is_available() else [])]
    return [*needed, *(["liger_kernel"] if "trl-liger" in frameworks else [])]


def workloads(arguments: argparse.Namespace, model: str, run: str) -> Iterator[Workload]:
    """Yield the work of each framework."""
    for framework in arguments.frameworks:
        yield Workload(
            framework=framework,
            shape=arguments.shape,
            model=model,
            prompts=arguments.prompts,
            samples=arguments.samples,
            tokens=arguments.tokens,
            prompt_tokens=arguments.prompt_tokens,
            warm_up=arguments.warm_up,
            steps=arguments.steps,
            micro_batch_tokens=arguments.micro_batch_tokens,
            trl_batch=arguments.trl_batch,
            overrides=tuple(arguments.set),
            trl_overrides=tuple(arguments.trl_set),
            output=str(arguments.output),
            run=run,
        )


def prepare(arguments: argparse.Namespace) -> None:
    """Write the checkpoint and a description of the machine.

    In its own process, so that the GPU is empty when the first framework starts.
    """
    folder, run = arguments.prepare
    make_checkpoint(SHAPES[arguments.shape], Path(folder), context=CONTEXT)
    Results(arguments.output, run).add(describe_machine())


def main() -> None:
    """Run every framework in its own process, then print medians and ratios."""
    arguments = parse_arguments()
    if arguments.prepare:
        prepare(arguments)
        return
    if arguments.work:
        work = Workload(**arguments.work)
        run = run_trustbatch if work.framework in OUR_VARIANTS else run_trl
        run(work)
        end_here()
    refuse_missing(needed_modules(arguments.frameworks))
    deadline = time.monotonic() + arguments.seconds
    results = Results(arguments.output, run=time.strftime("%Y-%m-%dT%H:%M:%S"))
    results.add({"command": f"python {' '.join(sys.argv)}"})
    temporary = Path(tempfile.gettempdir()) / f"trustbatch-step-{arguments.shape}"
    folder = arguments.folder or temporary
    works = list(workloads(arguments, str(folder), results.run))
    for work in works:  # refuse a wrong setting before the work begins
        configure = configure_trustbatch if work.framework in OUR_VARIANTS else trl_settings
        configure(work, "runs")
    options = ["--shape", arguments.shape, "--output", str(arguments.output)]
    ending = run_worker(
        "prepare",
        [*options, "--prepare", str(folder), results.run],
        results,
        seconds=arguments.seconds,
        show=describe_line,
    )
    if ending != "done":
        raise SystemExit("The checkpoint could not be made.")
    for work in works:
        results.add({"start_of": work.framework, "work": asdict(work)})
        measure(work, deadline)
    summary = summarize(results.read(), arguments.frameworks)
    results.add({"summary": summary})
    print_summary(summary, arguments.frameworks[0])
    print(f"written: {arguments.output}")


if __name__ == "__main__":
    main()
