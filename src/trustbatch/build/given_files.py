"""Rows and models that were given as objects, as files of the run folder with their hash."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from trustbatch.errors import ConfigError
from trustbatch.utils.files import apply_umask

DIGITS = 12
"""of the hash in a name"""


@dataclass(frozen=True)
class GivenRows:
    """Rows of a list, or of a `datasets.Dataset`."""

    columns: tuple[str, ...]
    content: bytes
    """as JSONL"""

    @classmethod
    def of(cls, data: Any) -> Self:
        """Read the rows; refuses what is no list of dictionaries that JSON can hold."""
        if isinstance(data, Mapping):
            raise ConfigError(
                "data has several splits or columns: give rows, such as data['train'] or a list "
                "of dictionaries."
            )
        if (
            isinstance(data, bytes)
            or not isinstance(data, Iterable)
            or not hasattr(data, "__len__")
        ):
            raise ConfigError(
                f"data is of type {type(data).__name__}: give a list of dictionaries, a "
                "datasets.Dataset or the path of a file."
            )
        columns: dict[str, None] = {}
        lines = []
        for number, row in enumerate(data):
            if not isinstance(row, Mapping):
                raise ConfigError(f"data[{number}] is {row!r:.80}: give a dictionary.")
            columns.update(dict.fromkeys(map(str, row)))
            try:
                lines.append(json.dumps(dict(row), ensure_ascii=False) + "\n")
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"data[{number}] has a value that is no text, number or list ({error}): leave "
                    "out its column."
                ) from error
        if not lines:
            raise ConfigError("data has no rows: give some.")
        return cls(tuple(columns), "".join(lines).encode(errors="surrogatepass"))

    @cached_property
    def name(self) -> str:
        """Name of the file in the run folder."""
        return f"data-{hashlib.sha256(self.content).hexdigest()[:DIGITS]}.jsonl"

    def has_no_answers(self, table: Mapping[str, Any]) -> bool:
        """Whether no row has an answer, and none is expected by `task.columns`."""
        has_replies = "messages" in self.columns
        return "answer" not in (*self.columns, *(table.get("columns") or {})) and not has_replies

    def save(self, folder: Path) -> None:
        """Write the file unless it is there."""
        file = folder / self.name
        if file.is_file():
            return
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{self.name}.{os.getpid()}"  # several ranks may write it
        partial.write_bytes(self.content)
        partial.replace(file)


@dataclass(frozen=True)
class GivenModel:
    """A model of transformers with its tokenizer: what is trained is a copy of it."""

    model: Any
    tokenizer: Any

    @classmethod
    def of(cls, model: Any, tokenizer: Any) -> Self:
        """Refuse what is no model, or has no tokenizer."""
        from transformers import PreTrainedModel, PreTrainedTokenizerBase

        if not isinstance(model, PreTrainedModel):
            raise ConfigError(
                f"model is of type {type(model).__name__}: give a name, a folder or a model of "
                "transformers, and adapters of PEFT as model={'name': ..., 'lora': {}}."
            )
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ConfigError("A model that is an object needs its tokenizer: give tokenizer=...")
        return cls(model, tokenizer)

    @cached_property
    def name(self) -> str:
        """Name of the folder in the run folder, with the hash of all weights."""
        import torch

        found = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            flat = tensor.detach().cpu().contiguous().flatten()
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(flat.view(torch.uint8).numpy().data)
        found.update(json.dumps(self.tokenizer.get_vocab(), sort_keys=True).encode())
        found.update(str(self.tokenizer.chat_template).encode())
        return f"model-{found.hexdigest()[:DIGITS]}"

    def save(self, folder: Path) -> None:
        """Write the model unless it is there."""
        target = folder / self.name
        if target.is_dir():
            return
        partial = folder / f".{self.name}.{os.getpid()}"
        partial.mkdir(parents=True)
        try:
            self.model.save_pretrained(partial)
            self.tokenizer.save_pretrained(partial)
            apply_umask(partial)
            with contextlib.suppress(OSError):  # another rank was first
                partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
