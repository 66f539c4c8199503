"""Invalid tasks and options are refused before anything is sampled."""

import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.own_task import Plain

import trustbatch
from trustbatch.build.session import configured_task
from trustbatch.config import parse_config
from trustbatch.errors import ConfigError
from trustbatch.models.policy import Policy
from trustbatch.rollout.collect import collect
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.tasks import build_task, check_task
from trustbatch.types import Prompt, SamplingParams

OWN = Path(__file__).parents[1] / "support" / "own_task.py"


class Nameless(Plain):
    name = ""


class Ungraded(Plain):
    grade = None  # type: ignore[assignment]


class Texts(Plain):
    def prompt(self, index: int) -> Any:
        return f"{index}="


class NoIds(Plain):
    def prompt(self, index: int) -> Prompt:
        return Prompt(id="", text="1=", answer="1")


class OneId(Plain):
    def prompt(self, index: int) -> Prompt:
        return Prompt(id="same", text=f"{index}=", answer="1")


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Plain, r"Plain is a class, not a task: pass Plain\(...\)"),
        (Nameless(), "The task Nameless has no name"),
        (Ungraded(), "The task Ungraded has no method 'grade'"),
        (Texts(), r"prompt\(0\) of the task plain is '0=': return a trustbatch.types.Prompt"),
        (NoIds(), r"prompt\(0\) of the task plain has the id ''"),
    ],
)
def test_an_object_that_is_not_a_task_is_refused(tiny_folder: Path, task: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_task(task)
    with pytest.raises(ConfigError, match=words):
        trustbatch.train(model=tiny_folder, task=task)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def broken(:\n", r"can't be imported \(SyntaxError: invalid syntax, line 1\): fix it"),
        ("import no_such_module_at_all\n", "ModuleNotFoundError: No module named 'no_such_mod"),
        ("from math import no_such\n", "ImportError: cannot import name 'no_such'"),
        ("class Mine:\n    name = 'mine'\n", "The task Mine has no method 'prompt'"),
    ],
)
def test_a_file_without_a_task_is_refused(tmp_path: Path, text: str, words: str) -> None:
    name = f"file_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    tree = {"model": {"name": "m"}, "task": {"name": f"{tmp_path / name}.py:Mine"}}
    try:
        with pytest.raises(ConfigError, match=words):
            configured_task(parse_config(tree))
    finally:
        sys.modules.pop(name, None)
        sys.path[:] = [each for each in sys.path if each != str(tmp_path)]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("file", {"shuffle": "False"}, "task.shuffle = 'False' must be true or false: write false"),
        ("file", {"shuffle": 0}, "task.shuffle = 0 must be true or false"),
        (
            "file",
            {"max_prompt_tokens": "many"},
            "task.max_prompt_tokens = 'many' must be an integer",
        ),
        ("file", {"max_prompt_tokens": True}, "task.max_prompt_tokens = True must be an integer"),
        ("file", {"system": 3}, "task.system = 3 must be a string"),
        ("file", {"exclude": [3]}, "task.exclude has 3: each entry must be a string"),
        ("guess_number", {"highest": "ten"}, "task.highest = 'ten' must be an integer"),
        ("mixture", {"parts": ["a"]}, "task.parts has 'a': each entry must be a table"),
        ("mixture", {"parts": "a"}, "task.parts must be a list"),
        ("mixture", {}, "The task mixture needs the option parts: set task.parts"),
        ("file", {"path": "x", "curriculum": {"low": "no"}}, "task.path = 'x' is not a file"),
        (f"{OWN}:Plain", {"first": "a"}, "task.first = 'a' must be an integer"),
        (
            f"{OWN}:Short",
            {"curriculum": {"low": "no"}},
            "task.curriculum.low = 'no' must be a number",
        ),
    ],
)
def test_options_of_the_wrong_type_are_refused(
    name: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        build_task(name, seed=0, **options)


def test_two_prompts_with_the_same_id_are_refused(policy: Policy) -> None:
    sampling = SamplingParams(max_tokens=2, stop_token_ids=policy.stop_token_ids)
    task = OneId()
    with pytest.raises(ConfigError, match="Two prompts of a batch have the id 'same'"):
        collect(
            NativeEngine(policy, seed=0),
            policy,
            [task.prompt(0), task.prompt(1)],
            task=task,
            num_samples=2,
            sampling=sampling,
        )


def test_a_character_without_a_token_is_named(policy: Policy) -> None:
    with pytest.raises(ConfigError, match=r"can't encode prompt 'p7': it has no token for some"):
        policy.encode(Prompt(id="p7", text="é=", answer="1"))
