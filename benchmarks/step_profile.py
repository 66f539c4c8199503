"""Where an RL step of trustbatch spends a GPU's time: its kernels, and the gaps between them.

    python benchmarks/step_profile.py [--set training.compile=true] [--folder FOLDER]

The step of step_gpu.py. After warm-up, generation and training are profiled one after the other; of
each there is a table of kernels in FOLDER (default: benchmarks/results), and on the terminal how
long the GPU was busy and how long it waited: in gaps of which length, and before which kernels.
Profiling itself takes time on the host, so gaps are upper bounds. On a CPU there are tables alone.
"""

import argparse
import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from qwen3_shapes import SHAPES, make_checkpoint
from session_loop import train_session
from step_gpu import CONTEXT, EnoughError, configure_trustbatch
from step_workload import RandomPrompts, Workload
from torch.profiler import ProfilerActivity, profile

from trustbatch.build.session import build_session
from trustbatch.observe.progress import Progress

FOLDER = Path(__file__).parent / "results"
GAP_CLASSES = (1, 10, 100, 1000, 10_000)
"""microseconds: a gap counts to the largest that it reaches"""
LONGEST = 8


@dataclass(frozen=True)
class Gap:
    """A time without a kernel, in microseconds since the first one."""

    begin: float
    length: float
    before: str
    """name of the kernel that ended it"""


def gaps_of(spans: Sequence[tuple[float, float, str]]) -> tuple[float, list[Gap]]:
    """Return for how long some kernel ran, of (begin, end, name), and the gaps between them."""
    busy, reached, gaps = 0.0, None, []
    for begin, end, name in sorted(spans):
        if reached is None:
            first = reached = begin
        if begin > reached:
            gaps.append(Gap(reached - first, begin - reached, name))
        busy += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return busy, gaps


def by_class(gaps: Sequence[Gap]) -> dict[int, float]:
    """Return the summed microseconds of gaps by their class; shorter ones are of class 0."""
    sums = dict.fromkeys((0, *GAP_CLASSES), 0.0)
    for gap in gaps:
        sums[max((each for each in GAP_CLASSES if each <= gap.length), default=0)] += gap.length
    return sums


def report(name: str, profiled: Any, folder: Path) -> None:
    """Write the table of kernels, and print busy time and gaps."""
    by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table = profiled.key_averages().table(sort_by=by, row_limit=60, max_name_column_width=90)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"step_profile-{name}.txt"
    file.write_text(table)
    print(f"{name}: {file}")
    device = torch.autograd.DeviceType.CUDA
    spans = [
        (event.start_ns() / 1e3, (event.start_ns() + event.duration_ns()) / 1e3, event.name())
        for event in profiled.profiler.kineto_results.events()
        if event.device_type() == device
    ]
    if not spans:
        return
    busy, gaps = gaps_of(spans)
    print(f"  {len(spans):,} kernels, busy {busy / 1e6:.3f} s, idle between them "
          f"{sum(gap.length for gap in gaps) / 1e6:.3f} s")  # fmt: skip
    for least, total in by_class(gaps).items():
        print(f"  in gaps of {least:,} us and more: {total / 1e6:.3f} s")
    for gap in sorted(gaps, key=lambda gap: -gap.length)[:LONGEST]:
        print(f"  {gap.length / 1e3:8.2f} ms at {gap.begin / 1e6:.3f} s, before {gap.before[:70]}")


def profiled(name: str, call: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """Return a function that is profiled."""
    kind = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU

    @functools.wraps(call)
    def profiled_call(*arguments: Any, **keywords: Any) -> Any:
        with profile(activities=[kind]) as found:
            result = call(*arguments, **keywords)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        report(name, found, folder)
        return result

    return profiled_call


def run(work: Workload, folder: Path) -> None:
    """Take the steps of a run; the last one is profiled."""
    task = RandomPrompts(tokens=work.prompt_tokens, vocabulary=SHAPES[work.shape].vocabulary)
    with tempfile.TemporaryDirectory(prefix="step-profile-") as runs:
        session = build_session(configure_trustbatch(work, runs), task)

        class ProfiledLastStep(Progress):
            def update(self, step: int, metrics: Mapping[str, float]) -> None:
                super().update(step, metrics)
                if step > work.warm_up:
                    raise EnoughError
                if step == work.warm_up:
                    engine, trainer = session.engine, session.trainer
                    engine.generate = profiled("generate", engine.generate, folder)
                    trainer.train = profiled("train", trainer.train, folder)

        try:
            train_session(session, ProfiledLastStep("step", work.total_steps))
        except EnoughError:
            pass
        finally:
            session.close()


def main() -> None:
    """Make the checkpoint and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--prompts", type=int, default=64, help="prompts per step")
    parser.add_argument("--samples", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each completion")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=2, help="steps before the profiled one")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the tables")
    arguments = parser.parse_args()
    model = Path(tempfile.gettempdir()) / f"trustbatch-step-{arguments.shape}"
    make_checkpoint(SHAPES[arguments.shape], model, context=CONTEXT)
    work = Workload(
        framework="trustbatch",
        shape=arguments.shape,
        model=str(model),
        prompts=arguments.prompts,
        samples=arguments.samples,
        tokens=arguments.tokens,
        prompt_tokens=arguments.prompt_tokens,
        warm_up=arguments.warm_up,
        steps=1,
        micro_batch_tokens=arguments.micro_batch_tokens,
        trl_batch=1,
        overrides=tuple(arguments.set),
        trl_overrides=(),
        output="",
        run="",
    )
    run(work, arguments.folder)


if __name__ == "__main__":
    main()
