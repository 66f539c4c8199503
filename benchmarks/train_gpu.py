"""Tokens per second and model FLOPs utilization (MFU) of the trainer alone, on one GPU.

    python benchmarks/train_gpu.py [--shapes 0.6b,1.7b,4b] [--lengths 4096,16384]

`Trainer.train` on sequences of one length (a short prompt, random tokens; one optimizer step on
65,536 tokens) of Qwen3's shapes with random weights: with P3O, whose totals depend on the policy,
and with GRPO, whose do not. The log-probs of the behavior policy are the policy's own with some
noise, as those of an engine in bfloat16 are. The trainer is the one that a run with the same
configuration has. Each shape and length has a process of its own. Results are JSON lines in
benchmarks/results/train_gpu.jsonl as they come, and a table at the end.

    MFU = model FLOPs / seconds / peak FLOP/s              (peak: 989e12, H200, bfloat16, dense)
    model FLOPs = 6 P N                                    P parameters of all layers, N tokens
                + 6 V H R                                  output head, at R response tokens
                + 12 L A D sum over sequences of n^2 / 2   attention

with V tokens in the vocabulary, H hidden size, L layers, A heads of dimension D, and n tokens in a
sequence: a forward pass has 2 operations for each parameter and token, a backward pass twice as
many; attention has two products of 2 A D operations for each pair of positions, half of which are
masked; n / 2 is a position's mean context. The embedding table is looked up, not multiplied. With
LoRA a frozen parameter counts 4 and not 6, since it has no gradient of its own; an adapter's has 6.

N counts all tokens that are trained on: with --samples the prompt of each of its sequences too, as
a trainer without shared prompts would compute it. The hardware utilization does not.

What is computed more than once, P3O's pre-pass above all, costs time and is no model FLOP. The
hardware utilization counts it: a third of the model FLOPs of full training for the pre-pass where
one was seen, and the layers' forward pass where gradient checkpointing repeats it. Neither counts
logits that the loss computes again, nor elementwise work.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from memory_watch import MemoryWatch
from qwen3_shapes import SHAPES, make_checkpoint
from train_flops import count_flops, share_computed
from train_workload import PassesWithoutGradient, make_sequences, nearly_on_policy
from worker_process import (
    Results,
    describe_machine,
    end_here,
    refuse_missing,
    run_worker,
)

from trustbatch.build.session import Session, build_session
from trustbatch.config import Config, apply_override, parse_config
from trustbatch.plan import estimate_memory
from trustbatch.types import TrainSequence

RESULT_FILE = Path(__file__).parent / "results" / "train_gpu.jsonl"
H200_PEAK = 989e12
CONTEXT = 32768
PROMPT_TOKENS = 64
SEED = 0
SHORTEST_RUN_SECONDS = 45.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape and length; everything a worker needs."""

    shape: str
    length: int
    model: str
    objectives: tuple[str, ...]
    tokens_per_step: int
    micro_batch_tokens: int
    warm_up: int
    steps: int
    overrides: tuple[str, ...]
    peak_flops: float
    profile: bool = False
    longest_prompt: int = PROMPT_TOKENS
    samples: int = 1
    output: str
    run: str

    @property
    def name(self) -> str:
        """Short name, of logs too."""
        return f"{self.shape}-{self.length}"

    @property
    def num_sequences(self) -> int:
        """Sequences in an optimizer step."""
        return max(self.tokens_per_step // self.length, 1)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt: at most half of the sequence."""
        return min(self.longest_prompt, self.length // 2)


# --- one case, in its own process -----------------------------------------------------------------


def run_case(case: Case) -> None:
    """Time every objective and write a line for each."""
    watch = MemoryWatch()
    with tempfile.TemporaryDirectory(prefix="train-gpu-") as folder:
        session = build_session(configure(case, case.objectives[0], folder))
        session.engine.sleep()
        try:
            sequences = nearly_on_policy(session, make_sequences(case, seed=SEED), seed=SEED)
            computed = share_computed(session, sequences)
            for objective in case.objectives:
                config = configure(case, objective, folder)
                # the same trainer with another loss: loading and compiling again would take minutes
                session.trainer.objective = config.objective.build()
                forget_memory(session)
                watch.restart()
                seconds, num_extra = time_steps(case, session, sequences)
                if case.profile:
                    profile_step(case, session, sequences, objective)
                result = describe_result(
                    case, session, objective, seconds, num_extra=num_extra, computed=computed
                )
                memory = {
                    "measured_gib": watch.peaks_gib(),
                    "estimated_gib": estimated_gib(config),
                }
                Results(Path(case.output), case.run).add({**result, "memory": memory})
        finally:
            watch.close()
            session.engine.close()
            session.run.close()


def forget_memory(session: Session) -> None:
    """Free the memory of the last objective, so that the peak is that of the next one."""
    session.trainer.optimizer.zero_grad(set_to_none=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def configure(case: Case, objective: str, folder: str) -> Config:
    """Return the configuration of a run that would train so."""
    tree: dict[str, Any] = {
        "seed": SEED,
        "model": {"name": case.model},
        "task": {"name": "arithmetic"},  # no prompt of it is sampled
        "objective": {"name": objective},
        "rollout": {
            "prompts_per_step": max(case.num_sequences // 2, 1),
            "samples_per_prompt": 2,
            "max_tokens": case.length - case.prompt_tokens,
            "canary_every": 0,
        },
        "training": {
            "micro_batch_tokens": case.micro_batch_tokens,
            # hardly any: all steps train on the same completions, which shall stay near on-policy
            "learning_rate": 1e-12,
            "schedule": "constant",
            "warmup_fraction": 0.0,
        },
        "run": {"folder": folder},
    }
    for override in case.overrides:
        apply_override(tree, f"--{override}")
    return parse_config(tree)


def time_steps(
    case: Case, session: Session, sequences: Sequence[TrainSequence]
) -> tuple[list[float], int]:
    """Return the seconds of each optimizer step after the warm-up, and their pre-passes."""
    seconds, num_extra = [], 0
    for number in range(case.warm_up + case.steps):
        start = time.perf_counter()
        with PassesWithoutGradient(session) as passes:
            metrics = session.trainer.train(sequences)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
        sys.stderr.write(f"{case.name} step {number + 1}: {elapsed:.3f} s\n")
        if metrics["steps/skipped"]:
            raise SystemExit("An optimizer step was skipped: its time would not count.")
        if number >= case.warm_up:
            seconds.append(elapsed)
            num_extra += passes.number
    return seconds, num_extra


def describe_result(
    case: Case,
    session: Session,
    objective: str,
    seconds: Sequence[float],
    *,
    num_extra: int,
    computed: float,
) -> dict[str, Any]:
    """Return tokens per second and utilization, with all that they depend on."""
    median = statistics.median(seconds)
    flops = count_flops(case, session, has_pre_pass=num_extra > 0, share_computed=computed)
    num_tokens = case.num_sequences * case.length
    return {
        "shape": case.shape,
        "length": case.length,
        "objective": objective,
        "overrides": list(case.overrides),
        "micro_batch_tokens": session.config.training.micro_batch_tokens,
        "tokens_per_step": num_tokens,
        "prompt_tokens": case.prompt_tokens,
        "samples_per_prompt": case.samples,
        "share_computed": computed,
        "seconds": list(seconds),
        "tokens_per_second": num_tokens / median,
        "passes_without_gradient": num_extra,
        "flops": asdict(flops),
        "mfu": flops.model / median / case.peak_flops,
        "hardware_utilization": flops.all / median / case.peak_flops,
    }


def estimated_gib(config: Config) -> float:
    """Return the peak of training that `--dry-run` estimates; nothing is generated here."""
    return estimate_memory(config).phase("train").total / 2**30


def profile_step(
    case: Case, session: Session, sequences: Sequence[TrainSequence], objective: str
) -> None:
    """Write which kernels an optimizer step spends its time in, beside the results."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        session.trainer.train(sequences)
    by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table = profile.key_averages().table(sort_by=by, row_limit=45, max_name_column_width=90)
    Path(f"{case.output}.{case.name}-{objective}.profile.txt").write_text(table)


# --- all cases ------------------------------------------------------------------------------------


def cases(arguments: argparse.Namespace, run: str) -> Iterator[Case]:
    """Yield every shape with every length."""
    for shape in arguments.shapes:
        for length in arguments.lengths:
            yield Case(
                shape=shape,
                length=length,
                model=str(arguments.folder / f"trustbatch-train-{shape}"),
                objectives=tuple(arguments.objectives),
                tokens_per_step=arguments.tokens_per_step,
                micro_batch_tokens=max(arguments.micro_batch_tokens, length),
                warm_up=arguments.warm_up,
                steps=arguments.steps,
                overrides=overrides_of(arguments.set, shape, length),
                peak_flops=arguments.peak_flops,
                profile=arguments.profile,
                longest_prompt=arguments.prompt_tokens,
                samples=arguments.samples,
                output=str(arguments.output),
                run=run,
            )


def overrides_of(given: Sequence[str], shape: str, length: int) -> tuple[str, ...]:
    """Return those settings that are for all, for this shape, or for this shape and length."""
    own = ("", shape, f"{shape}/{length}")
    chosen = []
    for text in given:
        key, equals, value = text.partition("=")
        scope, colon, rest = key.partition(":")
        if not colon:
            scope, rest = "", key
        if scope in own:
            chosen.append(f"{rest}{equals}{value}")
    return tuple(chosen)


def measure(case: Case, deadline: float) -> None:
    """Run one case, and again with smaller micro-batches while memory runs out."""
    results = Results(Path(case.output), case.run)
    while True:
        left = deadline - time.monotonic()
        if left < SHORTEST_RUN_SECONDS:
            print(f"{case.name}: left out, only {left:.0f} s of --seconds are left")
            results.add({"worker": case.name, "ending": "left out"})
            return
        arguments = ["--case", json.dumps(asdict(case))]
        ending = run_worker(case.name, arguments, results, seconds=left, show=describe_line)
        if ending != "out of memory" or case.micro_batch_tokens <= case.length:
            return
        half = max(case.micro_batch_tokens // 2, case.length)
        case = replace(case, micro_batch_tokens=half)


HEADINGS = (
    "shape", "length", "objective", "micro-batch", "tokens/s", "s/step", "MFU", "hardware",
    "device GiB", "allocated", "estimated",
)  # fmt: skip


def cells(line: Mapping[str, Any]) -> list[str]:
    """Return a result as the cells of a table."""
    memory = line["memory"]
    peaks = [memory["measured_gib"].get(name) for name in ("device", "torch_allocated")]
    return [
        line["shape"],
        f"{line['length']:,}",
        line["objective"],
        f"{line['micro_batch_tokens']:,}",
        f"{line['tokens_per_second']:,.0f}",
        f"{statistics.median(line['seconds']):.3f}",
        f"{line['mfu']:.1%}",
        f"{line['hardware_utilization']:.1%}",
        *["-" if gib is None else f"{gib:.1f}" for gib in (*peaks, memory["estimated_gib"])],
    ]


def describe_line(line: Mapping[str, Any]) -> str:
    """Return a result as a line of text."""
    if "mfu" not in line:
        return json.dumps(line)
    return "  ".join(f"{h} {c}" for h, c in zip(HEADINGS, cells(line), strict=True))


def print_table(lines: Sequence[Mapping[str, Any]]) -> None:
    """Print all results as a Markdown table."""
    print("\n| " + " | ".join(HEADINGS) + " |")
    print("|---" * len(HEADINGS) + "|")
    for line in lines:
        if "mfu" in line:
            print("| " + " | ".join(cells(line)) + " |")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="0.6b,1.7b,4b", help=", ".join(SHAPES))
    parser.add_argument("--lengths", default="4096,16384", help="tokens of a sequence")
    parser.add_argument("--objectives", default="p3o,grpo")
    parser.add_argument("--tokens-per-step", type=int, default=65536)
    parser.add_argument(
        "--micro-batch-tokens", type=int, default=16384, help="halved if the memory is too small"
    )
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--samples", type=int, default=1, help="sequences that have a prompt")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="[SHAPE[/LENGTH]:]TABLE.KEY=VALUE",
        help="change the configuration, of one shape alone where it is named; may be repeated",
    )
    parser.add_argument("--peak-flops", type=float, default=H200_PEAK, help="of the device")
    parser.add_argument(
        "--profile", action="store_true", help="write the kernels' times beside the results"
    )
    parser.add_argument("--seconds", type=float, default=570.0, help="for all cases together")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="of the checkpoints"
    )
    parser.add_argument("--output", type=Path, default=RESULT_FILE, help="file for JSON lines")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--prepare", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.shapes = arguments.shapes.split(",")
    arguments.lengths = [int(length) for length in arguments.lengths.split(",")]
    arguments.objectives = arguments.objectives.split(",")
    for shape in arguments.shapes:
        if shape not in SHAPES:
            parser.error(f"there is no shape {shape!r}: choose of {', '.join(SHAPES)}")
    return arguments


def prepare(arguments: argparse.Namespace) -> None:
    """Write the checkpoints and a description of the machine.

    In its own process, so that the GPU is empty when the first case starts.
    """
    results = Results(arguments.output, arguments.prepare)
    results.add(describe_machine())
    for shape in arguments.shapes:
        folder = arguments.folder / f"trustbatch-train-{shape}"
        make_checkpoint(SHAPES[shape], folder, context=CONTEXT)
        results.add({"checkpoint": str(folder)})


def main() -> None:
    """Run every case in its own process, then print the table."""
    arguments = parse_arguments()
    if arguments.prepare:
        prepare(arguments)
        return
    if arguments.case:
        case = Case(**arguments.case)
        run_case(case)
        end_here()
    refuse_missing(["trustbatch", "tomli_w", "tensorboard"])
    deadline = time.monotonic() + arguments.seconds
    results = Results(arguments.output, run=time.strftime("%Y-%m-%dT%H:%M:%S"))
    results.add({"command": f"python {' '.join(sys.argv)}"})
    for case in cases(arguments, results.run):
        for objective in case.objectives:
            configure(case, objective, "runs")  # refuse a wrong setting before the work begins
    ending = run_worker(
        "prepare",
        [*sys.argv[1:], "--prepare", results.run],
        results,
        seconds=arguments.seconds,
        show=describe_line,
    )
    if ending != "done":
        raise SystemExit("The checkpoints could not be made.")
    for case in cases(arguments, results.run):
        measure(case, deadline)
    print_table(results.read())
    print(f"written: {arguments.output}")


if __name__ == "__main__":
    main()
