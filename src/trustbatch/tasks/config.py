"""[task]: where prompts come from and how answers are graded."""

from typing import Any, ClassVar

from pydantic import model_serializer, model_validator

from trustbatch.tasks import Task, build_task, check_task_options
from trustbatch.tasks.data_source import is_data_path
from trustbatch.utils.tables import Choice


class TaskConfig(Choice):
    """[task]: a task by name or by the path of its class, with the arguments of the class."""

    kind: ClassVar[str] = "task"

    def check(self) -> None:
        """Check names and types; a class by path is imported only where the task is built."""
        if ":" not in self.name:
            check_task_options(self.name, self.options)

    def build(self, *, seed: int) -> Task:
        """Build the task, which reads its files."""
        return build_task(self.name, seed=seed, **self.options)


class SuiteTaskConfig(TaskConfig):
    """An entry of evaluation.suite: a name, a class by path, a file, or a table with options."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, data: Any) -> Any:
        return {"name": data} if isinstance(data, str) else data

    @model_serializer
    def _flatten(self) -> Any:
        return {"name": self.name, **self.options} if self.options else self.name

    @property
    def is_file(self) -> bool:
        """Whether the name is that of a file with problems."""
        return is_data_path(self.name)

    def check(self) -> None:
        """Check a file as the task `file`."""
        if self.is_file:
            check_task_options("file", self.options)
        else:
            super().check()
