"""Fingerprints of a run's data and of its user's code: an edit is noticed when the run resumes.

The files are hashed when a run starts, and each checkpoint has the hashes. On several ranks every
rank hashes its own files, and all must agree: machines may have copies of their own.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trustbatch.checkpoints.load import FINGERPRINTS_FILE
from trustbatch.config import Config
from trustbatch.errors import CheckpointError, ConfigError
from trustbatch.evaluation.suite import EvaluatedTask
from trustbatch.tasks import ProblemSet, Task
from trustbatch.tasks.base import ReadsDataSets, ReadsFiles
from trustbatch.tasks.data_source import is_data_path
from trustbatch.tasks.rows import RowTask
from trustbatch.utils.distributed import all_gather
from trustbatch.utils.files import digest_of
from trustbatch.utils.imports import code_path, given
from trustbatch.utils.sources import source_files

SHORT = 12
"""characters of a fingerprint in sentences, and in `run.accept_changes`"""


@dataclass(frozen=True)
class Fingerprints:
    """What a run has read."""

    files: Mapping[str, str]
    """SHA-256 of data and source files, by name"""
    prompts: str = ""
    """SHA-256 of all prompts of a finite task, in their order; empty for an endless one"""
    num_prompts: int = 0

    def to_record(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return asdict(self)


def fingerprint_files(config: Config, task: Task, suite: Sequence[EvaluatedTask]) -> dict[str, str]:
    """Return the fingerprints of all files that a run depends on. Collective."""
    found: dict[str, str] = {}
    for each in (task, *(evaluated.task for evaluated in suite)):
        if isinstance(each, ReadsFiles):
            found |= {name: digest_of(Path(path)) for name, path in each.files.items()}
        if isinstance(each, ReadsDataSets):
            found |= each.digests
    found |= fingerprint_code(config, task)
    for rank, others in enumerate(all_gather(found)):
        for name in sorted(found.keys() & others.keys()):
            if found[name] != others[name]:
                raise ConfigError(
                    f"Rank {rank} has another {name} than other ranks: copy the same file to all "
                    "machines."
                )
    return found


def fingerprint_code(config: Config, task: Task | None) -> dict[str, str]:
    """Return the fingerprints of a user's code: of its files, or of what a script defines."""
    found: dict[str, str] = {}
    own: dict[str, Any] = {}
    if task is not None and code_path(type(task)) == config.task.name:
        own[config.task.name] = type(task)
    for term in config.reward.terms:
        if callable(path := term.options.get("path")):
            own[code_path(path)] = path
    for path in {**dict.fromkeys(_code_paths(config)), **own}:
        known = own.get(path) or given(path)
        if known is not None and (path.startswith("__main__:") or "<" in path):
            found |= _own_source(path, known)
        else:
            sources = source_files(path)
            found |= {name: digest_of(Path(file)) for name, file in sources.items()}
    return found


def fingerprint_prompts(files: Mapping[str, str], task: Task) -> Fingerprints:
    """Return the fingerprints of a run: of its files, and of all prompts if they have an end."""
    prompts = task.seats if isinstance(task, RowTask) else ()
    if not prompts and isinstance(task, ProblemSet):
        prompts = task.problems
    if not prompts:
        return Fingerprints(files)
    found = hashlib.sha256()
    for prompt in prompts:
        fields: tuple[Any, ...] = (prompt.id, prompt.text, prompt.answer, prompt.system)
        if prompt.history:  # without one, the fingerprint is that of versions without the field
            fields += (prompt.history,)
        found.update(repr(fields).encode())
    return Fingerprints(files, found.hexdigest(), len(prompts))


def refuse_changed_files(
    config: Config,
    checkpoint: Path | None,
    files: Mapping[str, str],
    say: Callable[[str], None],
) -> None:
    """Refuse to resume from a checkpoint after a file was edited, unless the edit is accepted.

    A file that only one of both has is none of this: which files are read is in the configuration.
    """
    before = _read(checkpoint)
    if checkpoint is None or before is None:
        return
    for name in sorted(before.files.keys() & files.keys()):
        if before.files[name] == files[name]:
            continue
        if not _is_accepted(config, files[name]):
            raise ConfigError(
                f"{name} was edited after {checkpoint.name} of {config.run.path} was written, so "
                "the run would not go on as it began: restore the file, choose another run.name, "
                f"or accept the edit with {_accept(config, files[name])}."
            )
        say(f"{name} was edited after {checkpoint.name}, as run.accept_changes allows.")


def refuse_changed_prompts(
    config: Config, checkpoint: Path | None, now: Fingerprints, say: Callable[[str], None]
) -> None:
    """Refuse to resume with other prompts from the same files, unless that is accepted."""
    before = _read(checkpoint)
    if checkpoint is None or before is None or before.prompts == now.prompts:
        return
    if any(before.files.get(name, found) != found for name, found in now.files.items()):
        return  # an edit that was accepted
    if not _is_accepted(config, now.prompts):
        raise ConfigError(
            f"The task has other prompts than when {checkpoint.name} of {config.run.path} was "
            f"written ({now.num_prompts:,}, and {before.num_prompts:,} then), in another order: "
            "undo what changed them, such as [evaluation], whose problems are left out, choose "
            f"another run.name, or accept the change with {_accept(config, now.prompts)}."
        )
    say(f"The task has other prompts than at {checkpoint.name}, as run.accept_changes allows.")


def _read(checkpoint: Path | None) -> Fingerprints | None:
    """Return the fingerprints in a checkpoint; None if it has none."""
    file = None if checkpoint is None else checkpoint / FINGERPRINTS_FILE
    if file is None or not file.is_file():
        return None
    try:
        return Fingerprints(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{file} can't be read ({error}): restore it.") from error


def _is_accepted(config: Config, fingerprint: str) -> bool:
    return fingerprint[:SHORT] in config.run.accept_changes


def _accept(config: Config, fingerprint: str) -> str:
    accepted = json.dumps([*config.run.accept_changes, fingerprint[:SHORT]])
    return f"run.accept_changes = {accepted}"


def _code_paths(config: Config) -> Iterable[str]:
    """Yield the objects of a user's code, as the configuration names them."""
    options = config.task.options
    parts = options.get("parts") or ()
    yield from _with_colon(config.task.name, *(options.get("exclude") or ()))
    for part in parts:
        yield from _with_colon(str(part.get("name")), *(part.get("exclude") or ()))
    for table in (options, *parts):  # of an environment
        named = (table.get(key) for key in ("factory", "action", "observation"))
        yield from _with_colon(*(path for path in named if isinstance(path, str)))
    yield from _with_colon(config.objective.name)
    for term in config.reward.terms:
        if isinstance(path := term.options.get("path"), str):
            yield from _with_colon(path)
    if config.evaluation.every:
        yield from _with_colon(*(entry.name for entry in config.evaluation.suite))


def _with_colon(*names: str) -> Iterable[str]:
    return (name for name in names if ":" in name and not is_data_path(name))


def _own_source(path: str, found: Any) -> dict[str, str]:
    """Return the fingerprint of a class or function in the script itself, without what it calls.

    An interactive session has no source, except in a notebook.
    """
    code = found if inspect.isclass(found) or inspect.isroutine(found) else type(found)
    try:
        source = inspect.getsource(code)
    except (OSError, TypeError):
        return {}
    kind = "class" if inspect.isclass(code) else "function"
    name = path.rpartition(":")[2].rpartition(".")[2]
    return {f"the {kind} {name}": hashlib.sha256(source.encode()).hexdigest()}
