"""The environments that come with the package, and how environments are graded."""

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from trustbatch.tasks import TASKS, build_task
from trustbatch.tasks.arithmetic import Arithmetic
from trustbatch.tasks.base import Environment, grade_completion
from trustbatch.tasks.environments.calculator import Calculator, calculate
from trustbatch.tasks.environments.guess_number import GuessNumber
from trustbatch.types import Prompt, Role, Turn


def conversation(*texts: str) -> list[Turn]:
    """Policy and environment by turns."""
    roles = [Role.POLICY, Role.ENVIRONMENT] * len(texts)
    return [Turn(role=role, text=text) for role, text in zip(roles, texts, strict=False)]


@pytest.mark.parametrize("name", ["guess_number", "calculator"])
def test_they_are_tasks_by_name_with_prompts_that_depend_on_seed_and_index(name: str) -> None:
    task = build_task(name, seed=3)
    assert isinstance(task, Environment)
    assert [task.prompt(i) for i in range(9)] == [TASKS[name](seed=3).prompt(i) for i in range(9)]
    assert len({task.prompt(index).answer for index in range(50)}) > 5
    assert len({task.prompt(index).id for index in range(50)}) == 50
    assert task.prompt(0) != build_task(name, seed=4).prompt(0)


def test_a_task_without_reply_is_not_an_environment() -> None:
    assert not isinstance(Arithmetic(), Environment)


def test_a_game_of_guesses() -> None:
    task = GuessNumber(highest=7, guesses=3)
    prompt = replace(task.prompt(0), answer="5")
    assert task.reply(prompt, conversation("4")) == "higher"
    assert task.reply(prompt, conversation("It is 6", "higher")[:1]) == "lower"
    assert task.reply(prompt, conversation("4", "higher", "6")) == "lower"
    for over in (["5"], ["4", "higher", "6", "lower", "7"], ["no idea"], ["4", "higher", ""]):
        assert task.reply(prompt, conversation(*over)) is None
    for completion, reward in (("5", 1.0), ("perhaps 4 or 5", 1.0), ("5 or 4", 0.0), ("", 0.0)):
        assert task.grade(prompt, completion) == reward
    secrets = {int(task.prompt(index).answer) for index in range(200)}
    assert secrets == set(range(1, 8))
    assert "from 1 to 7" in prompt.text
    assert "3 guesses" in prompt.text


def test_bisection_wins_every_game_of_the_default_size() -> None:
    task = GuessNumber()
    for secret in range(1, 8):
        prompt = replace(task.prompt(0), answer=str(secret))
        said: list[str] = ["4"]
        step = 2
        while (answer := task.reply(prompt, conversation(*said))) is not None:
            guess = int(said[-1]) + (step if answer == "higher" else -step)
            said += [answer, str(guess)]
            step //= 2
        assert task.grade(prompt, said[-1]) == 1.0


def test_a_guess_of_many_digits_is_not_a_number() -> None:
    task = GuessNumber()
    huge = "9" * 100_000
    assert task.reply(task.prompt(0), conversation(huge)) is None
    assert task.grade(task.prompt(0), huge) == 0.0


def test_a_call_of_the_calculator() -> None:
    task = Calculator(digits=2)
    prompt = task.prompt(0)
    problem, answer = prompt.text.split("?")[0].removeprefix("What is "), prompt.answer
    assert task.reply(prompt, conversation(f"I ask: <calc>{problem}</calc>")) == answer
    assert task.reply(prompt, conversation("<calc>1</calc> no, <calc> 2*(3+4) </calc>\n")) == "14"
    assert task.reply(prompt, conversation("<calc>two</calc>")) == "error"
    assert task.reply(prompt, conversation(f"<calc>{problem}</calc> is {answer}")) is None
    assert task.grade(prompt, f" {answer}\n") == 1.0
    assert task.grade(prompt, f"<calc>{problem}</calc>") == 0.0
    assert calculate(problem) == int(answer)


def test_a_call_may_have_another_form() -> None:
    task = Calculator(digits=1, opening="", closing="=", refusal="-", instruction="{problem}=")
    assert task.prompt(0).text == f"{task.prompt(0).text[:3]}="
    assert task.reply(task.prompt(0), conversation("7*8=")) == "56"
    assert task.reply(task.prompt(0), conversation("7*=")) == "-"
    assert task.reply(task.prompt(0), conversation("56")) is None


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*34", 408),
        ("2+3*4", 14),
        ("(2+3)*4", 20),
        ("-3--4", 1),
        ("7//2", 3),
        (" 1 + 1 ", 2),
        ("9" * 60, int("9" * 60)),
        ("7/2", None),
        ("1//0", None),
        ("9**9**9**9", None),
        ("1+", None),
        ("", None),
        (" ", None),
        ("()", None),
        ("1(2)", None),
        ("007", None),
        ("__import__('os')", None),
        ("1.5*2", None),
        ("1e9", None),
        ("\u0663+\u0661", None),
        ("(" * 64, None),
        ("9*" * 50_000 + "9", None),
    ],
)
def test_expressions_are_computed_or_refused_at_once(expression: str, value: int | None) -> None:
    start = time.perf_counter()
    assert calculate(expression) == value
    assert time.perf_counter() - start < 0.1


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("guess_number", {"guesses": 0}, "at least 1"),
        ("guess_number", {"highest": 10**12}, "not huge"),
        ("calculator", {"digits": 0}, "from 1 to 15"),
        ("calculator", {"closing": ""}, "must not be empty"),
        ("calculator", {"digit": 2}, "did you mean 'digits'"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    name: str, options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        build_task(name, seed=0, **options)


class Counts(GuessNumber):
    """Grades by whole episodes."""

    def grade_turns(self, prompt: Prompt, turns: Sequence[Turn]) -> float:
        right = [t.text for t in turns if t.role is Role.ENVIRONMENT].count("right")
        return right + len(turns) / 10


def test_a_policy_that_imitates_the_environment_earns_nothing() -> None:
    prompt = Prompt(id="p", text="", answer="5")
    fake = conversation("right", "lower", "right right environment: right")
    assert grade_completion(Counts(), prompt, fake[-1].text, fake) == pytest.approx(0.3)
    true = conversation("4", "right", "5")
    assert grade_completion(Counts(), prompt, true[-1].text, true) == pytest.approx(1.3)


def test_without_grade_turns_only_the_last_turn_is_graded() -> None:
    prompt = Prompt(id="p", text="", answer="5")
    turns = conversation("5", "lower", "4")
    assert grade_completion(GuessNumber(), prompt, "4", turns) == 0.0
    assert grade_completion(GuessNumber(), prompt, "5", ()) == 1.0
    # a completion that nobody answered is an episode of one turn
    assert grade_completion(Counts(), prompt, "5", ()) == pytest.approx(0.1)
