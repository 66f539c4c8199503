"""The files of a run that others need: a model or its adapters, the configuration, and a card."""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trustbatch.checkpoints.load import list_checkpoints, newest_checkpoint, step_of
from trustbatch.checkpoints.manifest import MANIFEST_FILE, verify
from trustbatch.config import Config, load_config
from trustbatch.errors import CheckpointError, ConfigError
from trustbatch.evaluation.results import RESULTS_FILE, EvaluationResults, read_results
from trustbatch.hub.card import CardFacts, model_card
from trustbatch.models.lora import WEIGHTS_FILE as ADAPTER_WEIGHTS
from trustbatch.models.policy import ADAPTER_FOLDER
from trustbatch.observe.run_folder import read_metrics

CARD_FILE, CONFIG_FILE = "README.md", "trustbatch.toml"
ADAPTER_CONFIG = "adapter_config.json"
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
)


@dataclass(frozen=True)
class ExportedRun:
    """A checkpoint of a run, and what is said about it."""

    checkpoint: Path
    config: Config
    base_model: str | None
    """a name that others can load; None for a model of this machine alone"""
    evaluations: tuple[EvaluationResults, ...]

    @property
    def is_adapter(self) -> bool:
        """Whether the run has trained adapters, which are exported without the model."""
        return self.config.model.lora is not None


def open_run(
    run: Path,
    *,
    step: int | None = None,
    base_model: str | None = None,
    evaluations: Sequence[Path] = (),
) -> ExportedRun:
    """Find the checkpoint of a run and its evaluations; refuses what can't be exported."""
    if not (run / "config.toml").is_file():
        raise ConfigError(f"{run} is no run folder: name one that `trustbatch train` has made.")
    checkpoint = _find_checkpoint(run, step)
    config = load_config(run / "config.toml")
    base = base_model or (config.model.name if _is_hub_name(config.model.name) else None)
    if config.model.lora is not None and base is None:
        raise ConfigError(
            f"The adapters belong to {config.model.name}, which others can't load: name the same "
            "model on the hub with --base-model."
        )
    own = run / "evaluations" / f"step-{step_of(checkpoint):06d}"
    folders = [*([own] if (own / RESULTS_FILE).is_file() else []), *evaluations]
    return ExportedRun(checkpoint, config, base, tuple(map(read_results, folders)))


def write_export(exported: ExportedRun, run: Path, folder: Path, *, name: str) -> list[Path]:
    """Write the files of a repository into an empty folder; returns them in order."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: choose another --folder, or delete it.")
    for file in _files(exported):
        shutil.copyfile(file, folder / file.name)
    if exported.is_adapter:
        _name_base_model(folder / ADAPTER_CONFIG, exported.base_model)
    (folder / CONFIG_FILE).write_text(exported.config.to_toml(), encoding="utf-8")
    environment = run / "environment.json"
    facts = CardFacts(
        name=name,
        config=exported.config,
        step=step_of(exported.checkpoint),
        base_model=exported.base_model,
        metrics=read_metrics(run),
        evaluations=exported.evaluations,
        environment=json.loads(environment.read_text()) if environment.is_file() else {},
    )
    (folder / CARD_FILE).write_text(model_card(facts), encoding="utf-8")
    return sorted(folder.iterdir())


def _find_checkpoint(run: Path, step: int | None) -> Path:
    folder = run / "checkpoints"
    if step is None:
        newest = newest_checkpoint(folder) if folder.is_dir() else None
        if newest is None:
            raise ConfigError(f"The run {run} has no checkpoint yet: wait for the first one.")
        return newest
    found = {step_of(each): each for each in list_checkpoints(folder)}
    if step not in found:
        known = ", ".join(map(str, found)) or "none"
        raise ConfigError(
            f"The run {run} has no checkpoint of step {step}: choose one of those it has ({known})."
        )
    try:
        verify(found[step])
    except CheckpointError as error:
        raise CheckpointError(
            f"{found[step]} is damaged ({error}): choose another step."
        ) from error
    return found[step]


def _files(exported: ExportedRun) -> Iterator[Path]:
    """Yield what is copied; never the trainer's state."""
    checkpoint = exported.checkpoint
    if not exported.is_adapter:
        names = (path for path in sorted(checkpoint.iterdir()) if path.is_file())
        yield from (path for path in names if path.name not in (MANIFEST_FILE, CARD_FILE))
        return
    yield checkpoint / ADAPTER_FOLDER / ADAPTER_CONFIG
    yield checkpoint / ADAPTER_FOLDER / ADAPTER_WEIGHTS
    for pattern in TOKENIZER_FILES:
        yield from sorted(checkpoint.glob(pattern))


def _name_base_model(file: Path, base_model: str | None) -> None:
    tree = json.loads(file.read_text(encoding="utf-8"))
    tree["base_model_name_or_path"] = base_model
    file.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def _is_hub_name(name: str) -> bool:
    """Whether a model is named as on the hub: owner/name, and no folder or file here."""
    is_local = name.endswith(".gguf") or name.startswith((".", "/", "~")) or Path(name).exists()
    return name.count("/") == 1 and not is_local
