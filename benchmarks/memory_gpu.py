"""Estimated against measured memory of a run, on one GPU.

    python benchmarks/memory_gpu.py [--cases 0.6b,1.7b,4b,4b-checkpointing] [--steps 2]
    python benchmarks/memory_gpu.py --cases 8b-lora-24gb,14b-nf4-lora-24gb --steps 5

Models of Qwen3's shapes with random weights, whose completions never end by themselves. Each case
is a process of its own that runs steps of the synchronous loop. What is measured are the peaks of
torch's allocator in the last step, while completions are sampled and while the policy is trained;
what is estimated is what `trustbatch train --dry-run` says. GRPO is the objective, since it makes
no use of memory that happens to be free. Results are JSON lines in
benchmarks/results/memory_gpu.jsonl. Without a GPU the steps are run and nothing is measured.

The cases for 24 GB limit the process (model.gpu_memory_limit_gib), and their models are made in
memory. All completions of the second step have the full length, and are what is compared with the
estimate; the other steps have completions of many lengths, as a trained model would.
"""

import argparse
import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from memory_watch import MemoryWatch
from qwen3_shapes import SHAPES, Shape, make_checkpoint, make_model, make_outline
from session_loop import train_session
from step_gpu import EnoughError, RandomPrompts
from worker_process import Results, describe_machine, end_here, run_worker

import trustbatch.models.loading as loading
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
    in_memory: bool = False
    """whether the model is made where it is used, and not read from a folder"""
    varies: bool = False
    """whether completions have many lengths, but for those of step `FULL_STEP`"""


FULL_STEP = 2
SPREAD = (1.0, 0.7, 0.45, 0.3, 0.2, 0.15, 0.1, 0.08)
"""of the full length, by prompt"""
LIMITED = (
    "model.gpu_memory_limit_gib=24",
    "model.lora.rank=32",
    "training.gradient_checkpointing=true",
    "training.learning_rate=1e-5",
    "rollout.canary_every=0",
)
EIGHT = Case(  # sequences of 2,048 tokens, prompts included
    shape="8b",
    prompts=8,
    tokens=2048 - PROMPT_TOKENS,
    micro_batch_tokens=2048,
    overrides=LIMITED,
    in_memory=True,
    varies=True,
)
FOURTEEN = replace(EIGHT, shape="14b", overrides=(*LIMITED, "model.quantization=nf4"))
TINY = Case(shape="tiny", prompts=2, samples=2, tokens=8, micro_batch_tokens=32)
FP8_CACHE = "rollout.kv_precision=fp8"

CASES = {
    "0.6b": Case(shape="0.6b", prompts=64),
    "1.7b": Case(shape="1.7b", prompts=16),
    "4b": Case(shape="4b", prompts=8),
    "4b-checkpointing": Case(
        shape="4b", prompts=8, overrides=("training.gradient_checkpointing=true",)
    ),
    "8b-lora-24gb": EIGHT,
    "8b-lora-24gb-fp8": replace(EIGHT, overrides=(*EIGHT.overrides, FP8_CACHE)),
    "14b-nf4-lora-24gb": FOURTEEN,
    "14b-nf4-lora-24gb-fp8": replace(FOURTEEN, overrides=(*FOURTEEN.overrides, FP8_CACHE)),
    "tiny": TINY,
    "tiny-limited": replace(TINY, overrides=FOURTEEN.overrides, in_memory=True, varies=True),
}
"""by name; "tiny" and "tiny-limited" show on a CPU that the script runs"""


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
    """Peaks of torch's allocator and of the device during calls of functions, by name and call."""

    def __init__(self, note: Callable[[dict[str, Any]], None]) -> None:
        self.of: dict[str, list[dict[str, float]]] = {}
        self._note = note
        self._watch = MemoryWatch()

    def watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, watched."""

        @functools.wraps(call)
        def watched_call(*arguments: Any, **keywords: Any) -> Any:
            if torch.cuda.is_available():
                # unused memory of the allocator would count as reserved by this call
                torch.cuda.empty_cache()
            self._watch.restart()
            start = time.perf_counter()
            result = call(*arguments, **keywords)
            peaks = {
                f"{kind.removeprefix('torch_')}_gib": peak
                for kind, peak in self._watch.peaks_gib().items()
            }
            calls = self.of.setdefault(name, [])
            calls.append(peaks)
            seconds = round(time.perf_counter() - start, 2)
            self._note({"call": name, "number": len(calls), "seconds": seconds, **peaks})
            return result

        return watched_call

    def chosen(self, name: str, *, varies: bool) -> dict[str, float]:
        """Return the peaks of a function's call that is compared with the estimate."""
        calls = self.of.get(name, [{}])
        return calls[min(FULL_STEP, len(calls)) - 1] if varies else calls[-1]


def with_lengths(case: Case, generate: Callable[..., Any]) -> Callable[..., Any]:
    """Return an engine's function that gives prompts different lengths, but for one step."""
    num_calls = 0

    @functools.wraps(generate)
    def varied(requests: Sequence[Any]) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == FULL_STEP:
            return generate(requests)
        return generate(
            [
                replace(
                    request,
                    sampling=replace(
                        request.sampling,
                        max_tokens=max(int(request.sampling.max_tokens * SPREAD[i % 8]), 1),
                    ),
                )
                for i, request in enumerate(requests)
            ]
        )

    return varied


@contextmanager
def made_in_memory(shape: Shape) -> Iterator[None]:
    """Load a model that is made in place of one that is read from a disk."""
    read = loading._load_folder
    loading._load_folder = lambda *_, **__: make_model(shape, context=CONTEXT)
    try:
        yield
    finally:
        loading._load_folder = read


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
    name: str,
    case: Case,
    model: str,
    *,
    steps: int,
    objective: str,
    note: Callable[[dict[str, Any]], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Run the steps of a case, and return a record per phase; `note` gets one of each call."""
    shape = SHAPES[case.shape]
    task = RandomPrompts(tokens=PROMPT_TOKENS, vocabulary=shape.vocabulary)
    peaks = Peaks(note)
    with tempfile.TemporaryDirectory(prefix="memory-gpu-") as folder:
        config = configure(case, model=model, folder=folder, steps=steps, objective=objective)
        plan = estimate_memory(config, task=task)
        start = time.perf_counter()
        with made_in_memory(shape) if case.in_memory else nullcontext():
            session = build_session(config, task)
        note({"call": "load", "number": 1, "seconds": round(time.perf_counter() - start, 2)})
        session.canary.at_start(version=0)  # before its calls would be counted
        session.canary.at_start = lambda **_: None
        session.engine.generate = peaks.watched("generate", session.engine.generate)
        if case.varies:
            session.engine.generate = with_lengths(case, session.engine.generate)
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
            # keys and values get what there is, and others wait
            "estimated_gib": min(phase.total, max(plan.capacity, phase.needed)) / GIB,
            "parts_gib": {part.name: part.num_bytes / GIB for part in phase.parts},
            **peaks.chosen(phase.name, varies=case.varies),
        }
        if "allocated_gib" in record:
            record["estimated_to_measured"] = record["estimated_gib"] / record["allocated_gib"]
        records.append(record)
    return records


def show(line: Mapping[str, Any]) -> str:
    """Format a record for people."""
    if "call" in line:
        peaks = ", ".join(f"{key[:-4]} {line[key]:.2f}" for key in line if key.endswith("_gib"))
        return f"{line['case']:18} {line['call']} {line['number']}: {line['seconds']} s  {peaks}"
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
    if case.in_memory:
        folder = folder.with_name(f"{folder.name}-outline")
    if arguments.prepare:  # in its own process, so that the GPU is empty for the case
        make = make_outline if case.in_memory else make_checkpoint
        make(SHAPES[case.shape], folder, context=CONTEXT)
        return
    for record in compare(
        arguments.one,
        case,
        str(folder),
        steps=arguments.steps,
        objective=arguments.objective,
        note=lambda record: results.add({"case": arguments.one, **record}),
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
