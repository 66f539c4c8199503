"""Estimated against measured memory of a run, on one GPU.

    python benchmarks/memory_gpu.py [--cases 0.6b,1.7b,4b,4b-checkpointing] [--steps 2]

Models of Qwen3's shapes with random weights, whose completions never end by themselves. Each case
is a process of its own that runs steps of the synchronous loop. What is measured are the peaks of
torch's allocator in the last step, while completions are sampled and while the policy is trained;
what is estimated is what `trustbatch train --dry-run` says. GRPO is the objective, since it makes
no use of memory that happens to be free. Results are JSON lines in
benchmarks/results/memory_gpu.jsonl. Without a GPU the steps are run and nothing is measured.
"""

import argparse
import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from qwen3_shapes import SHAPES, make_checkpoint
from session_loop import train_session
from step_gpu import EnoughError, RandomPrompts
from worker_process import Results, describe_machine, end_here, run_worker

from trustbatch.build.session import build_session
from trustbatch.config import Config, apply_override, parse_config
from trustbatch.observe.progress import Progress
from trustbatch.plan import estimate_memory

RESULT_FILE = Path(__file__).parent / "results" / "memory_gpu.jsonl"
GIB = 2**30
CONTEXT = 4096
PROMPT_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration to compare."""

    shape: str
    prompts: int
    samples: int = 8
    tokens: int = 512
    micro_batch_tokens: int = 8192
    overrides: tuple[str, ...] = ()


CASES = {
    "0.6b": Case(shape="0.6b", prompts=64),
    "1.7b": Case(shape="1.7b", prompts=16),
    "4b": Case(shape="4b", prompts=8),
    "4b-checkpointing": Case(
        shape="4b", prompts=8, overrides=("training.gradient_checkpointing=true",)
    ),
    "tiny": Case(shape="tiny", prompts=2, samples=2, tokens=8, micro_batch_tokens=32),
}
"""by name; "tiny" shows on a CPU that the script runs"""


def configure(case: Case, *, model: str, folder: str, steps: int, objective: str) -> Config:
    """Return the configuration of a case."""
    tree: dict[str, Any] = {
        "model": {"name": model},
        "task": {"name": "step_workload:RandomPrompts"},
        "objective": {"name": objective},
        "rollout": {
            "prompts_per_step": case.prompts,
            "samples_per_prompt": case.samples,
            "max_tokens": case.tokens,
        },
        # the last step of a run saves a checkpoint, which takes long and is not wanted here
        "training": {"steps": steps + 1, "micro_batch_tokens": case.micro_batch_tokens},
        "run": {"name": "memory", "folder": folder},
    }
    for override in case.overrides:
        apply_override(tree, f"--{override}")
    return parse_config(tree)


class Peaks:
    """Peaks of torch's allocator during calls of functions, by name: those of the last call."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, float]] = {}

    def watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, watched."""

        @functools.wraps(call)
        def watched_call(*arguments: Any, **keywords: Any) -> Any:
            if not torch.cuda.is_available():
                return call(*arguments, **keywords)
            # unused memory of the allocator would count as reserved by this call
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            result = call(*arguments, **keywords)
            self.of[name] = {
                "allocated_gib": torch.cuda.max_memory_allocated() / GIB,
                "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
            }
            return result

        return watched_call


class UntilStep(Progress):
    """Ends the run after the last step that is measured."""

    def __init__(self, name: str, last_step: int) -> None:
        super().__init__(name, last_step)
        self._last_step = last_step

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the step, then end the run if it was the last."""
        super().update(step, metrics)
        if step >= self._last_step:
            raise EnoughError


def compare(
    name: str, case: Case, model: str, *, steps: int, objective: str
) -> list[dict[str, Any]]:
    """Run the steps of a case, and return a record per phase."""
    task = RandomPrompts(tokens=PROMPT_TOKENS, vocabulary=SHAPES[case.shape].vocabulary)
    peaks = Peaks()
    with tempfile.TemporaryDirectory(prefix="memory-gpu-") as folder:
        config = configure(case, model=model, folder=folder, steps=steps, objective=objective)
        plan = estimate_memory(config, task=task)
        session = build_session(config, task)
        session.engine.generate = peaks.watched("generate", session.engine.generate)
        session.trainer.train = peaks.watched("train", session.trainer.train)
        try:
            train_session(session, UntilStep(name, steps))
        except EnoughError:
            pass
        finally:
            session.close()
    records = []
    for phase in plan.phases:
        record = {
            "case": name,
            "phase": phase.name,
            "estimated_gib": phase.total / GIB,
            "parts_gib": {part.name: part.num_bytes / GIB for part in phase.parts},
            **peaks.of.get(phase.name, {}),
        }
        if "allocated_gib" in record:
            record["estimated_to_measured"] = record["estimated_gib"] / record["allocated_gib"]
        records.append(record)
    return records


def show(line: Mapping[str, Any]) -> str:
    """Format a record for people."""
    if "phase" not in line:
        return json.dumps(dict(line))
    text = f"{line['case']:18} {line['phase']:9} estimated {line['estimated_gib']:7.2f} GiB"
    if "allocated_gib" not in line:
        return text
    return (
        f"{text}   measured {line['allocated_gib']:7.2f} allocated {line['reserved_gib']:7.2f} "
        f"reserved   estimated / measured {line['estimated_to_measured']:.3f}"
    )


def work(arguments: argparse.Namespace) -> None:
    """Make the checkpoint of a case, or run it, and write the results."""
    results = Results(arguments.output, arguments.run)
    case = CASES[arguments.one]
    folder = arguments.folder / f"trustbatch-memory-{case.shape}"
    if arguments.prepare:  # in its own process, so that the GPU is empty for the case
        make_checkpoint(SHAPES[case.shape], folder, context=CONTEXT)
        return
    for record in compare(
        arguments.one,
        case,
        str(folder),
        steps=arguments.steps,
        objective=arguments.objective,
    ):
        results.add({"settings": asdict(case), "objective": arguments.objective, **record})


def main() -> None:
    """Run each case in its own process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="0.6b,1.7b,4b,4b-checkpointing")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--objective", default="grpo")
    parser.add_argument("--seconds", type=float, default=600.0, help="for each case")
    parser.add_argument("--output", type=Path, default=RESULT_FILE)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--prepare", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        work(arguments)
        end_here()
    unknown = set(arguments.cases.split(",")) - set(CASES)
    if unknown:
        sys.exit(f"unknown case {unknown.pop()!r}: choose from {', '.join(CASES)}")
    results = Results(arguments.output, run=time.strftime("%Y-%m-%dT%H:%M:%S"))
    results.add({"command": f"python {' '.join(sys.argv)}", **describe_machine()})
    for name in arguments.cases.split(","):
        of_case = [*sys.argv[1:], "--one", name, "--run", results.run]
        for words in ([*of_case, "--prepare"], of_case):
            ending = run_worker(
                f"{name}{'-prepare' if '--prepare' in words else ''}",
                words,
                results,
                seconds=arguments.seconds,
                show=show,
            )
            if ending != "done":
                break
    print(f"written: {arguments.output}")


if __name__ == "__main__":
    main()
