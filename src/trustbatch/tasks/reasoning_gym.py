"""Reasoning Gym: more than a hundred procedural tasks of the package reasoning-gym, in any mixture.

A problem is a function of the data set's options and of its number. It is generated in a process
with a time limit, since some generators search for long; the grader's process generates it again,
so that a prompt carries nothing but the number.
"""

import ast
import hashlib
import inspect
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar

from trustbatch.errors import ConfigError, did_you_mean
from trustbatch.tasks.base import HELD_OUT_SEED
from trustbatch.tasks.mixture import Rotation, shares_of
from trustbatch.tasks.problems import ProblemTask
from trustbatch.types import GradeStatus, Prompt
from trustbatch.utils.imports import require_package
from trustbatch.utils.worker_pool import Words, WorkerPool

BLOCK = 512
"""problems of one data set object: its n-th has the seed of the object plus n"""
NUM_BLOCKS = 2**22
"""in each half of the seeds below 2**32: training has the lower half, evaluation the upper one"""
MEMORY_GIB = 4.0
OWN_OPTIONS = ("seed", "size")
"""of a data set: the run has the seed, and problems have no end"""
WORDS = Words(
    function="Reasoning Gym",
    process="process that generates problems",
    processes="processes that generate problems",
    worked="generated",
    items="problems",
    limit="task.generate_seconds",
)


@dataclass(frozen=True, kw_only=True)
class ReasoningGym:
    """An endless stream of problems; with `size`, that many problems, in epochs."""

    datasets: Sequence[str] | Mapping[str, Mapping[str, Any]]
    """names, or a table with a `weight` and the options of each"""
    system_prompt: str = "default"
    """says how to answer: the name of one of Reasoning Gym's, or a text"""
    answer_tags: bool = True
    """whether the answer stands between <answer> and </answer>, or is the whole completion"""
    size: int | None = None
    """number of problems; default: no end"""
    generate_seconds: float = 60.0
    """time limit of generating a problem"""
    seed: int = 0
    name: str = "reasoning_gym"
    system: str = field(init=False, repr=False)
    options: dict[str, dict[str, Any]] = field(init=False, repr=False)
    """of the data sets, by name"""
    rotation: Rotation = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_package("reasoning_gym", extra="reasoning-gym", what=f"The task {self.name}")
        if self.size is not None and self.size < 1:
            raise ValueError("task.size must be at least 1.")
        if not self.generate_seconds > 0:
            raise ValueError("task.generate_seconds must be above 0.")
        _check_system_prompt(self.system_prompt, answer_tags=self.answer_tags)
        options = _checked(self.datasets)
        weights = {name: table.pop("weight", 1) for name, table in options.items()}
        rotation = Rotation(shares_of(weights, where="task.datasets"))
        own = {"options": options, "rotation": rotation, "system": _system(self.system_prompt)}
        for name, value in own.items():
            object.__setattr__(self, name, value)

    def bounded(self) -> "ReasoningGym | ReasoningProblems":
        """Return the task with an end, which can have a curriculum, where there is a size."""
        if self.size is None:
            return self
        return ReasoningProblems(source=self, name=self.name, seed=self.seed)

    def prompt(self, index: int) -> Prompt:
        """Return the index-th problem; data sets take turns by their weights."""
        dataset, turn = self.rotation.at(index)
        number = self.number_of(turn)
        (outcome,) = self._pool().run([(dataset, self.options[dataset], number)])
        if outcome.status is not GradeStatus.GRADED:
            raise ConfigError(
                f"Problem {number} of {dataset} can't be generated ({outcome.reason}): change the "
                f"options of task.datasets.{dataset}, or leave it out."
            )
        question, answer = outcome.value
        return Prompt(
            id=f"{dataset}:{self.seed}:{turn}",
            text=question,
            answer=answer,
            task=dataset,
            details={"dataset": dataset, "number": number},
            system=self.system,
        )

    def grade(self, prompt: Prompt, completion: str) -> float:
        """Return Reasoning Gym's score of what is between the last tags, or of all of it."""
        from reasoning_gym.utils import extract_answer

        dataset, number = prompt.details["dataset"], prompt.details["number"]
        data, entry = _entry(dataset, repr(self.options[dataset]), number)
        if entry["question"] != prompt.text:
            raise ValueError(f"{dataset} does not generate problem {number} a second time")
        answer = extract_answer(completion) if self.answer_tags else completion.strip()
        return float(data.score_answer(answer, entry))

    def close(self) -> None:
        """End the process that generates problems."""
        pool = self.__dict__.pop("_generator", None)
        if pool is not None:
            pool.close()

    def number_of(self, turn: int) -> int:
        """Return the number of a data set's n-th problem in the run.

        Every seed starts elsewhere, and stays in its half: evaluations have one of their own.
        """
        half = NUM_BLOCKS * BLOCK
        digest = hashlib.blake2b(str(self.seed).encode(), digest_size=8).digest()
        first = int.from_bytes(digest) % NUM_BLOCKS * BLOCK
        return (first + turn) % half + half * (self.seed == HELD_OUT_SEED)

    def _pool(self) -> WorkerPool:
        if "_generator" not in self.__dict__:
            pool = WorkerPool(
                generate,
                workers=1,
                time_limit=self.generate_seconds,
                memory_limit_gib=MEMORY_GIB,
                words=WORDS,
            )
            object.__setattr__(self, "_generator", pool)
            weakref.finalize(self, pool.close)
        return self.__dict__["_generator"]

    def __getstate__(self) -> dict[str, Any]:
        # a grader has no use for the process
        return {name: value for name, value in self.__dict__.items() if name != "_generator"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)


@dataclass(frozen=True, kw_only=True)
class ReasoningProblems(ProblemTask):
    """The first problems of the stream, as many as its size."""

    default_template: ClassVar[str] = "plain"
    drops_duplicates: ClassVar[bool] = False
    """puzzles of the same words may differ in a sign"""

    source: ReasoningGym

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """Generate the problems."""
        assert self.source.size is not None
        try:
            for number in range(self.source.size):
                prompt = self.source.prompt(number)
                yield {
                    "id": prompt.id,
                    "problem": prompt.text,
                    "answer": prompt.answer,
                    "details": prompt.details,
                }
        finally:
            self.source.close()

    def details(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the data set and the number of a problem."""
        return dict(row["details"])

    def _problem(self, key: str, row: Mapping[str, Any], template: str) -> tuple[str, Prompt]:
        statement, prompt = super()._problem(key, row, template)
        dataset = prompt.details["dataset"]
        return statement, replace(prompt, task=dataset, system=self.source.system)

    def grade(self, prompt: Prompt, completion: str) -> float:
        """Return Reasoning Gym's score."""
        return self.source.grade(prompt, completion)


def generate(item: tuple[str, Mapping[str, Any], int]) -> tuple[str, str]:
    """Return a problem and an answer, which is empty where the data set has none to show."""
    dataset, options, number = item
    _, entry = _entry(dataset, repr(options), number)
    answer = entry["answer"]
    return str(entry["question"]), "" if answer is None else str(answer)


@lru_cache(maxsize=256)
def _entry(dataset: str, options: str, number: int) -> tuple[Any, dict[str, Any]]:
    """Return a data set object and one of its problems; the samples of a prompt share them."""
    block, place = divmod(number, BLOCK)
    data = _data(dataset, options, block)
    return data, data[place]


@lru_cache(maxsize=256)
def _data(dataset: str, options: str, block: int) -> Any:
    import reasoning_gym

    given = ast.literal_eval(options)
    return reasoning_gym.create_dataset(dataset, seed=block * BLOCK, size=BLOCK, **given)


def _check_system_prompt(system_prompt: str, *, answer_tags: bool) -> None:
    """Raise a sentence for an unknown name, which has no spaces, and for tags nobody asks for."""
    from reasoning_gym.utils import SYSTEM_PROMPTS

    if system_prompt in SYSTEM_PROMPTS:
        if not answer_tags:
            raise ValueError(
                f"task.system_prompt = {system_prompt!r} asks for <answer> tags, which "
                "task.answer_tags = false does not read: write a text of your own."
            )
    elif system_prompt and " " not in system_prompt.strip():
        raise ValueError(
            f"task.system_prompt = {system_prompt!r} is not known"
            f"{did_you_mean(system_prompt, SYSTEM_PROMPTS)}: choose one of "
            f"{', '.join(SYSTEM_PROMPTS)}, or write a text."
        )


def _system(system_prompt: str) -> str:
    """Return the text that a name stands for, or the text itself."""
    from reasoning_gym.utils import SYSTEM_PROMPTS

    return SYSTEM_PROMPTS.get(system_prompt, system_prompt).strip()


def _checked(datasets: Any) -> dict[str, dict[str, Any]]:
    """Return the options of each data set, with its weight among them."""
    if isinstance(datasets, str):
        raise ValueError(f"task.datasets must be a list: write [{datasets!r}].")
    if not datasets or not isinstance(datasets, Mapping | list | tuple):
        raise ValueError('task.datasets needs a name, such as ["chain_sum"].')
    if not isinstance(datasets, Mapping):
        repeated = [name for name in datasets if list(datasets).count(name) > 1]
        if repeated:
            raise ValueError(f"task.datasets has {repeated[0]!r} twice: give it a weight instead.")
        datasets = {name: {} for name in datasets}
    return {name: _checked_options(name, table) for name, table in datasets.items()}


def _checked_options(name: Any, options: Any) -> dict[str, Any]:
    """Return the options of a data set, after making it once."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    where = f"task.datasets.{name}"
    if name not in DATASETS or name == "composite":  # which is a mixture of its own
        raise ValueError(
            f"There is no data set {name!r} in Reasoning Gym{did_you_mean(str(name), DATASETS)}: "
            "change task.datasets."
        )
    if not isinstance(options, Mapping):
        raise ValueError(f"{where} = {options!r} must be a table: write {{weight = 2}}.")
    known = list(inspect.signature(DATASETS[name][1]).parameters)
    for option in options:
        if option != "weight" and (option not in known or option in OWN_OPTIONS):
            others = [each for each in known if each not in OWN_OPTIONS]
            raise ValueError(
                f"{where} has no option {option!r}{did_you_mean(option, others)}; its options are "
                f"weight, {', '.join(others)}."
            )
    own = {key: value for key, value in options.items() if key != "weight"}
    try:
        reasoning_gym.create_dataset(name, seed=0, size=BLOCK, **own)
    except Exception as error:  # a data set may refuse its options with anything
        raise ValueError(
            f"{where} can't be used ({type(error).__name__}: {error}): change its options."
        ) from error
    return dict(options)
