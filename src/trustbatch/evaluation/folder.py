"""The folder of an evaluation: settings, samples and results.

settings.json    what determines the samples; a start with other settings is refused
samples.jsonl    one line per problem: its completions with their grades
results.json     scores with intervals, and the outcome of every problem
results.md       the table
pass_at_k.html   the page: the table, the plot, and some samples
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trustbatch.errors import ConfigError
from trustbatch.evaluation.report import pass_at_k_page, results_table
from trustbatch.evaluation.results import RESULTS_FILE, EvaluationResults, ProblemOutcome
from trustbatch.evaluation.sample_page import spread_samples
from trustbatch.evaluation.suite import EvaluatedTask
from trustbatch.observe.page_parts import as_bytes
from trustbatch.utils.files import AppendedFile, lock_folder, write_atomically


class EvaluationFolder:
    """Stores samples as they are graded, so that an interrupted evaluation can continue."""

    def __init__(self, path: Path, *, model: str, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.model = model
        self.settings = settings
        path.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(
            path,
            in_use=f"Another process is evaluating in {path}: wait for it, or choose another "
            "--output.",
        )
        try:
            self._refuse_other_settings()
            self.outcomes = self._read_outcomes()
            write_atomically(self._settings_file, _written(self._all_settings()))
            self._samples = AppendedFile(self._samples_file)
        except BaseException:
            self._lock.close()
            raise

    def done(self, task: str) -> set[str]:
        """Return the ids of a task's finished problems."""
        return {problem for name, problem in self.outcomes if name == task}

    def add(self, record: Mapping[str, Any]) -> ProblemOutcome:
        """Append one problem's line."""
        self._samples.write(json.dumps(record).encode() + b"\n")
        outcome = ProblemOutcome.of_record(record)
        self.outcomes[record["task"], record["id"]] = outcome
        return outcome

    def finish(
        self, suite: Sequence[EvaluatedTask], environment: Mapping[str, Any]
    ) -> EvaluationResults:
        """Write table, plot and results; results.json comes last, so it implies the others."""
        results = EvaluationResults(
            model=self.model,
            settings=self.settings,
            outcomes={
                task.name: [self.outcomes[task.name, problem.id] for problem in task.problems]
                for task in suite
            },
            environment=environment,
        )
        write_atomically(self.path / "results.md", results_table(results))
        page = pass_at_k_page([results], spread_samples(self._samples_file))
        write_atomically(self.path / "pass_at_k.html", as_bytes(page))
        write_atomically(self.path / RESULTS_FILE, _written(results.to_dict()))
        return results

    def close(self) -> None:
        """Close the files, and release the lock of the folder."""
        self._samples.close()
        self._lock.close()

    @property
    def _settings_file(self) -> Path:
        return self.path / "settings.json"

    @property
    def _samples_file(self) -> Path:
        return self.path / "samples.jsonl"

    def _all_settings(self) -> dict[str, Any]:
        return {"model": self.model, **self.settings}

    def _refuse_other_settings(self) -> None:
        # without a finished problem, the settings may change
        has_samples = self._samples_file.is_file() and b"\n" in self._samples_file.read_bytes()
        if not self._settings_file.is_file() or not has_samples:
            return
        try:
            before = json.loads(self._settings_file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(
                f"{self._settings_file} is not JSON: delete {self.path} to start again."
            ) from error
        now = json.loads(_written(self._all_settings()))
        for key in now.keys() | before.keys():
            if before.get(key) != now.get(key):
                raise ConfigError(
                    f"{self.path} holds an evaluation with other settings ({key} was "
                    f"{_shown(before.get(key))}, now {_shown(now.get(key))}): choose another "
                    "--output, or delete that folder."
                )

    def _read_outcomes(self) -> dict[tuple[str, str], ProblemOutcome]:
        """Return the finished problems; an incomplete last line is removed from the file."""
        if not self._samples_file.is_file():
            return {}
        content = self._samples_file.read_bytes()
        complete = content.rfind(b"\n") + 1
        if complete < len(content):
            with self._samples_file.open("r+b") as file:
                file.truncate(complete)
        outcomes: dict[tuple[str, str], ProblemOutcome] = {}
        for number, line in enumerate(content[:complete].split(b"\n")[:-1], start=1):
            try:
                record = json.loads(line)
                outcomes[record["task"], record["id"]] = ProblemOutcome.of_record(record)
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"Line {number} of {self._samples_file} can't be read: remove the line, so "
                    "that its problem is sampled again."
                ) from error
        return outcomes


def _written(tree: Mapping[str, Any]) -> str:
    return json.dumps(tree, indent=2) + "\n"


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)
