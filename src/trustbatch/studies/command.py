"""`trustbatch study`: from the command line to a finished study."""

import argparse
import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from trustbatch.errors import ConfigError, did_you_mean
from trustbatch.studies.definitions import DEFINITIONS
from trustbatch.studies.study import Arm, Scale, Study
from trustbatch.utils.tables import set_key
from trustbatch.utils.terminal import is_quiet

if TYPE_CHECKING:  # they import torch, which --list does not need
    from trustbatch.studies.jobs import Job
    from trustbatch.studies.runner import Pace

SCALES = ("smoke", "cpu", "gpu", "paper", "paper-1.5b")
BENCHMARKS = "benchmarks"
DEFAULT_FOLDER = Path("runs/studies")
STEPS = "training.steps"
PAGE_SHARE = 0.2
"""of a scale's `end_seconds`: the rest is for running jobs to stop"""


def add_study_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("name", nargs="?", help="name of the study; --list shows all")
    parser.add_argument("--list", action="store_true", help="show all studies")
    parser.add_argument("--scale", choices=SCALES, default="cpu", help="default: cpu")
    parser.add_argument(
        "--seeds", help="a list such as 0,1,2, or a number of seeds such as 5; 4, is seed 4 alone"
    )
    parser.add_argument("--arms", help="run only these arms, e.g. p3o,grpo-0.2")
    parser.add_argument("--steps", type=_positive_int, help="steps of each run")
    parser.add_argument("--model", help="folder or name of the model to train")
    parser.add_argument("--second-model", help="model that generates a share of mixed rollouts")
    parser.add_argument("--task", choices=("gsm8k", "deepscaler"), help="task of the gpu scale")
    parser.add_argument("--data", help="folder with NAME.jsonl.gz for each named task")
    parser.add_argument("--out", help="folder of the study; default: runs/studies/NAME-SCALE")
    parser.add_argument("--models", help="folder for tiny models; default: models beside --out")
    parser.add_argument(
        "--from", dest="source", help="folder of the study whose checkpoints are evaluated"
    )
    parser.add_argument(
        "--parallel", type=_positive_int, default=1, help="runs at a time; default: 1"
    )
    parser.add_argument("--minutes", type=_minutes, help="time limit; the same command continues")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="set a key for all arms"
    )
    parser.add_argument(
        "--no-eval", action="store_true", help="skip the held-out evaluation after training"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show arms and memory plan, and run nothing"
    )
    parser.add_argument(
        "--page-only",
        action="store_true",
        help="write the page from existing results, and run nothing",
    )
    parser.add_argument(
        "--records",
        metavar="FILE",
        help="keep a line for each finished run instead of its checkpoint; runs in it are done",
    )
    parser.add_argument(
        "--before", action="store_true", help="with --records: evaluate before training, too"
    )
    parser.add_argument("--commit", help="with --records: the code's, where git does not know it")
    parser.add_argument("--retry-failed", action="store_true", help="run failed runs again")


def _positive_int(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return number


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0.0 < minutes < 100_000.0:
        raise argparse.ArgumentTypeError(f"must be a number of minutes above 0, not {text!r}")
    return minutes


def study_command(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Run `trustbatch study`, and return the exit status."""
    began = time.monotonic()
    console = Console(soft_wrap=True, highlight=False)
    if options.list:
        _show_studies(console)
        return 0
    known = [*DEFINITIONS, BENCHMARKS]
    if options.name not in known:
        wrong = "" if options.name is None else f" {options.name!r}"
        hint = did_you_mean(options.name or "", known)
        raise ConfigError(f"There is no study{wrong}{hint}: choose one of {', '.join(known)}.")
    _check_records(options)
    out = Path(options.out or DEFAULT_FOLDER / f"{options.name}-{options.scale}")
    if options.page_only and options.records is None:
        return _write_page(console, out)
    models = Path(options.models or out.parent / "models")
    study, scale = requested_study(options)
    if options.page_only:
        # what was recorded must be of this study, as where it is continued
        _jobs(options, study, scale, out=out, models=models)
        return _page_of_records(console, study, scale, options, out=out, words=words)
    if options.dry_run:
        from trustbatch.studies.dry_run import show_plan

        show_plan(console, study, scale, out=out, models=models)
        return 0
    pace = requested_pace(options, scale, began)
    jobs = _jobs(options, study, scale, out=out, models=models)
    return _run(console, study, scale, jobs, options, pace=pace, out=out, words=words)


def requested_pace(options: argparse.Namespace, scale: Scale, began: float) -> "Pace":
    """Return how many runs at a time and for how long, counted from `began`."""
    from trustbatch.studies.runner import STOP_SECONDS, Pace

    seconds = None
    if options.minutes is not None:
        least = scale.end_seconds + scale.least_seconds
        if 60 * options.minutes <= least:
            raise ConfigError(
                f"--minutes {options.minutes:g} leaves no time to start anything: give more than "
                f"{least / 60:.2g} at the {scale.name} scale."
            )
        # the last checkpoints and the page must be written before the time is over
        seconds = began + 60 * options.minutes - scale.end_seconds - time.monotonic()
    return Pace(
        parallel=options.parallel,
        seconds=seconds,
        least_seconds=scale.least_seconds,
        end_seconds=min(STOP_SECONDS, (1 - PAGE_SHARE) * scale.end_seconds),
        threads=scale.threads,
    )


def requested_study(options: argparse.Namespace) -> tuple[Study, Scale]:
    """Return the study with the changes of the command line, and its scale."""
    scale = _scale(options)
    return _chosen(_defined(options, scale), options), scale


def _defined(options: argparse.Namespace, scale: Scale) -> Study:
    if options.name != BENCHMARKS:
        return DEFINITIONS[options.name](scale)
    from trustbatch.studies.benchmarks import benchmarks

    if options.source is None:
        raise ConfigError(
            "The study benchmarks requires --from with the folder of a study that has trained."
        )
    return benchmarks(scale, Path(options.source))


def _jobs(
    options: argparse.Namespace, study: Study, scale: Scale, *, out: Path, models: Path
) -> "list[Job]":
    if options.name == BENCHMARKS:
        from trustbatch.studies.benchmarks import benchmark_jobs

        return benchmark_jobs(
            study, scale, source=Path(options.source), out=out, models=models, data=options.data
        )
    from trustbatch.studies.jobs import Records, training_jobs

    held_out = None if options.no_eval else scale.held_out
    records = None
    if options.records is not None:
        if held_out is None:
            raise ConfigError(
                f"--records is not for --scale {scale.name}, whose runs are not evaluated on "
                "held-out prompts: leave it out, or choose another scale."
            )
        file = Path(options.records).resolve()
        records = Records(file=file, commit=options.commit, before=options.before)
    return training_jobs(study, out=out, models=models, held_out=held_out, records=records)


def _run(
    console: Console,
    study: Study,
    scale: Scale,
    jobs: "list[Job]",
    options: argparse.Namespace,
    *,
    pace: "Pace",
    out: Path,
    words: Sequence[str],
) -> int:
    from trustbatch.studies.folder import StudyFolder
    from trustbatch.studies.runner import run_jobs

    folder = StudyFolder(out)
    lock = folder.lock()
    about = _about(options, scale, words)
    if options.records is not None:
        file = Path(options.records)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()  # one that is missing later is a mistake
    try:
        folder.write(study, about=about, state="running")
        tally = run_jobs(
            jobs, pace=pace, logs=out / "logs", lock=lock, retry_failed=options.retry_failed
        )
        folder.write(study, about=about, state="finished" if tally.is_over else "unfinished")
    finally:
        folder.unlock()
    if not is_quiet():
        console.print(f"{tally.done} of {tally.total} done.", markup=False)
    for name in tally.failed:
        console.print(f"Failed  {name}: run it again with --retry-failed.", markup=False)
    if tally.left:
        shown = ", ".join(tally.left[:5]) + (", ..." if len(tally.left) > 5 else "")
        console.print(
            f"{len(tally.left)} left ({shown}): the same command continues.", markup=False
        )
    status = _write_page(console, out)
    if tally.was_interrupted:
        return 130
    return 1 if tally.failed else status


def _about(options: argparse.Namespace, scale: Scale, words: Sequence[str]) -> dict[str, Any]:
    """Return what study.json says of this start."""
    from trustbatch.observe.run_folder import describe_environment

    return {
        "command": shlex.join(["trustbatch", *words]),
        "environment": describe_environment(),
        "held_out": None if options.no_eval or not scale.held_out else asdict(scale.held_out),
        "records": options.records and str(Path(options.records).resolve()),
    }


def _check_records(options: argparse.Namespace) -> None:
    if options.records is None:
        for name in ("before", "commit"):
            if getattr(options, name):
                raise ConfigError(f"--{name} is for --records: name the file of records, too.")
    elif options.name == BENCHMARKS or options.no_eval:
        wrong = "--no-eval" if options.no_eval else f"the study {BENCHMARKS}"
        raise ConfigError(f"--records is not for {wrong}: a record is a held-out reward.")
    elif options.page_only and not Path(options.records).is_file():
        raise ConfigError(f"{options.records} does not exist: name a file of records.")


def _page_of_records(
    console: Console,
    study: Study,
    scale: Scale,
    options: argparse.Namespace,
    *,
    out: Path,
    words: Sequence[str],
) -> int:
    """Write the page of recorded runs, also where nothing was run on this machine."""
    from trustbatch.studies.folder import PAGE_ONLY, StudyFolder

    folder = StudyFolder(out)
    folder.lock()
    try:
        about = _about(options, scale, words)
        tree = folder.read() or {"state": PAGE_ONLY}
        if tree["state"] == PAGE_ONLY:
            folder.write(study, about=about, state=PAGE_ONLY)
        elif tree.get("records") != about["records"]:
            raise ConfigError(f"{out} holds a study with other records: choose another --out.")
    finally:
        folder.unlock()
    return _write_page(console, out)


def _write_page(console: Console, out: Path) -> int:
    from trustbatch.studies.page import write_csv, write_study_page
    from trustbatch.studies.verdict import verdict

    page = write_study_page(out)
    tables = write_csv(out)
    if not is_quiet():
        console.print(verdict(out), markup=False)
    console.print(f"Page    {page}", markup=False)
    for table in () if is_quiet() else tables:
        console.print(f"Curves  {table}", markup=False)
    return 0


def _show_studies(console: Console) -> None:
    from trustbatch.studies.benchmarks import benchmarks

    table = Table(box=None, show_header=False)
    for name, definition in {**DEFINITIONS, BENCHMARKS: benchmarks}.items():
        table.add_row(name, (definition.__doc__ or "").splitlines()[0])
    console.print(table)


def _scale(options: argparse.Namespace) -> Scale:
    """Build the scale with the changes of the command line."""
    if options.task is not None and options.scale != "gpu":
        raise ConfigError("--task requires --scale gpu: remove it, or set that scale.")
    from trustbatch.studies.scales import build_scale

    scale = build_scale(options.scale, task=options.task, data=options.data)
    if options.second_model is not None:
        scale = replace(scale, other_model=options.second_model)
    return scale


def _chosen(study: Study, options: argparse.Namespace) -> Study:
    """Apply --seeds, --arms, --steps, --model and --set."""
    base = json.loads(json.dumps(dict(study.base)))
    if options.steps is not None:
        set_key(base, STEPS, options.steps)
        # also where an arm has a number of its own
        study = replace(study, arms=tuple(_with_steps(arm, options.steps) for arm in study.arms))
    if options.model is not None:
        set_key(base, "model.name", options.model)
    for word in options.set:
        _apply(base, word, study)
    seeds = study.seeds if options.seeds is None else _seeds(options.seeds)
    arms = study.arms if options.arms is None else _arms(options.arms, study)
    return replace(study, base=base, seeds=seeds, arms=arms)


def _with_steps(arm: Arm, steps: int) -> Arm:
    changes = {key: steps if key == STEPS else value for key, value in arm.changes.items()}
    return replace(arm, changes=changes)


def _apply(base: dict[str, Any], word: str, study: Study) -> None:
    from trustbatch.config import apply_override

    key = word.partition("=")[0]
    for arm in study.arms:
        for compared in arm.changes:
            if compared == key or compared.startswith(f"{key}.") or key.startswith(f"{compared}."):
                raise ConfigError(
                    f"--set {word}: {compared} is what the study compares: change another key."
                )
    apply_override(base, f"--{word}")


def _seeds(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.removesuffix(",").split(",")]
    if not all(part.isdecimal() for part in parts) or text == "0":
        raise ConfigError(
            f"--seeds {text}: give a number of seeds such as 5, or a list such as 0,1,2 or 4, (one "
            "seed and a comma)."
        )
    if "," not in text:
        return tuple(range(int(parts[0])))
    return tuple(dict.fromkeys(int(part) for part in parts))


def _arms(text: str, study: Study) -> tuple[Arm, ...]:
    wanted = [part.strip() for part in text.split(",")]
    names = [arm.name for arm in study.arms]
    for name in wanted:
        if name not in names:
            raise ConfigError(
                f"{study.name} has no arm {name!r}{did_you_mean(name, names)}: its arms are "
                f"{', '.join(names)}."
            )
    return tuple(arm for arm in study.arms if arm.name in wanted)
