"""Environments with a state: sessions in processes that can be killed."""

import pickle
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from trustbatch.errors import ConfigError, ReplyError
from trustbatch.tasks import build_task
from trustbatch.tasks.base import Spoken, Step, is_environment, is_stateful
from trustbatch.tasks.environments.live import LiveEnvironment
from trustbatch.types import GradeStatus, Prompt, Role, Turn

HERE = "tests.support.live_environments"


def environment(factory: str, **options: Any) -> LiveEnvironment:
    return LiveEnvironment(factory=f"{HERE}:{factory}", **options)


def said(*texts: str) -> tuple[Turn, ...]:
    """Turns of the policy, with replies that nobody reads between them."""
    turns = [Turn(role=Role.POLICY, text=text) for text in texts]
    reply = Turn(role=Role.ENVIRONMENT, text="?")
    return tuple(each for turn in turns for each in (reply, turn))[1:]


def play(task: LiveEnvironment, prompt: Prompt, *texts: str, sample: int = 0) -> list[Step]:
    """Say some texts in one episode; returns a step for each."""
    key = prompt.id, sample
    heard = [said(*texts[: number + 1]) for number in range(len(texts))]
    spoken = [Spoken(key=key, prompt=prompt, turns=turns) for turns in heard]
    steps = [task.step_sessions([each])[0] for each in spoken]
    task.end_sessions([key])
    return steps


@pytest.fixture
def counting() -> Iterator[LiveEnvironment]:
    with closing(environment("Counting")) as task:
        yield task


def test_prompts_are_a_function_of_seed_and_index(counting: LiveEnvironment) -> None:
    prompts = [counting.prompt(index) for index in range(4)]
    assert prompts == [counting.prompt(index) for index in range(4)]
    assert len({prompt.text for prompt in prompts}) > 1
    assert len({prompt.id for prompt in prompts}) == 4
    with closing(environment("Counting", seed=1)) as other:
        assert other.prompt(0).details != prompts[0].details


def test_steps_keep_their_state_and_rewards(counting: LiveEnvironment) -> None:
    prompt = counting.prompt(0)
    assert is_environment(counting)
    assert is_stateful(counting)
    first, second = play(counting, prompt, "12", "3")
    assert first == Step(reply=prompt.text.replace("=", "+"), reward=2.0)
    assert second == Step(reply=None, reward=1.0)


def test_the_reward_is_the_sum_of_the_steps_or_the_last(counting: LiveEnvironment) -> None:
    turns = [Turn(role=Role.POLICY, text="", reward=reward) for reward in (2.0, 0.5, None)]
    prompt = Prompt(id="p", text="", answer="")
    assert counting.grade_turns(prompt, turns) == 2.5
    assert environment("Counting", rewards="last").grade_turns(prompt, turns) == 0.5
    assert counting.grade_turns(prompt, turns[2:]) == 0.0


def test_sessions_side_by_side_do_not_mix_and_processes_are_used_again(
    counting: LiveEnvironment,
) -> None:
    prompt = counting.prompt(0)
    for _ in range(2):
        episodes = [Spoken(key=("p", n), prompt=prompt, turns=said("1" * n)) for n in range(3)]
        assert [step.reward for step in counting.step_sessions(episodes)] == [0.0, 1.0, 2.0]
        assert counting._pool().num_live == 3
        counting.end_sessions([each.key for each in episodes])
        assert counting._pool().num_live == 0
        assert len(counting._pool()._processes) == 3


def test_an_environment_is_closed_with_its_episode(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with closing(environment("Counting", options={"log": str(log)})) as task:
        prompt = task.prompt(0)
        assert log.read_text() == "closed after 0\n"  # the one that showed the prompt
        play(task, prompt, "1")
        assert log.read_text().splitlines()[1:] == ["closed after 1"]


def test_its_own_limit_of_turns_is_told_from_its_end() -> None:
    with closing(environment("Counting", options={"turns": 5, "limit": 1})) as task:
        (step,) = play(task, task.prompt(0), "1")
    assert step == Step(reply=None, reward=1.0, truncated=True)


@pytest.mark.parametrize(
    ("trouble", "status", "reason"),
    [
        ("hangs", GradeStatus.TIMED_OUT, "it took longer than 5 seconds (task.step_seconds)"),
        ("dies", GradeStatus.FAILED, "its process ended with exit code 3 while it played"),
        ("raises", GradeStatus.FAILED, "RuntimeError: the dice are lost"),
        ("gives no number", GradeStatus.FAILED, "TypeError: the reward nan is not a finite number"),
    ],
)
def test_a_session_in_trouble_is_lost_alone(trouble: str, status: GradeStatus, reason: str) -> None:
    options = {"trouble": trouble}
    with closing(environment("Troubled", options=options, step_seconds=5.0)) as task:
        prompts = [task.prompt(index) for index in range(8)]
        even = next(p for p in prompts if int(p.text[:2]) % 2 == 0)
        odd = next(p for p in prompts if int(p.text[:2]) % 2)
        for texts in (("1",), ("1", "2")):
            episodes = [Spoken(key=(p.id, 0), prompt=p, turns=said(*texts)) for p in (even, odd)]
            bad, good = task.step_sessions(episodes)
        assert good.failure is None
        assert good.reward == 1.0
        assert bad.failure is not None
        assert (bad.failure.status, bad.failure.reason) == (status, reason)
        task.end_sessions([(even.id, 0), (odd.id, 0)])
        # the next episode has a process again
        assert play(task, odd, "1", "2", "3")[-1] == Step(reply=None, reward=1.0)


def test_a_session_whose_process_was_killed_between_two_turns_has_failed(
    counting: LiveEnvironment,
) -> None:
    prompt = counting.prompt(0)
    key = ("p", 0)
    counting.step_sessions([Spoken(key=key, prompt=prompt, turns=said("1"))])
    (process,) = counting._pool()._processes
    process._process.kill()
    process._process.wait()
    (step,) = counting.step_sessions([Spoken(key=key, prompt=prompt, turns=said("1", "2"))])
    assert step.failure is not None
    assert "its process" in step.failure.reason


def test_a_reset_that_ignores_its_seed_is_noticed() -> None:
    with closing(environment("Forgetful")) as task:
        prompt = task.prompt(0)
        steps = [play(task, prompt, "1", sample=sample)[0] for sample in range(4)]
    reasons = [step.failure.reason for step in steps if step.failure]
    assert reasons
    assert "make `reset(seed)` return the same observation for the same seed" in reasons[0]


def test_the_shape_of_old_gym() -> None:
    with closing(environment("OldGym")) as task:
        assert play(task, task.prompt(0), "2") == [Step(reply=None, reward=1.0)]


def test_the_shape_of_skyrl_gym() -> None:
    with closing(environment("make_sky")) as task:
        prompt = task.prompt(0)
        assert (prompt.system, prompt.text) == ("0", "3+4=")
        first, second = play(task, prompt, "6", "7")
    assert first == Step(reply=[{"role": "user", "content": "+"}], reward=0.0)
    assert second == Step(reply=None, reward=1.0)


def test_the_shape_of_openenv() -> None:
    options = {"action": f"{HERE}:Action", "observation": f"{HERE}:observed"}
    with closing(environment("Open", **options)) as task:
        prompt = task.prompt(0)
        assert prompt.text == f"{prompt.details['seed'] % 10}="
        assert prompt.chat["tools"][0]["function"]["name"] == "echo"
        first, second = play(task, prompt, "12", "")
    assert first == Step(reply="21", reward=0.5)
    assert second == Step(reply=None, reward=0.5)


def test_a_task_is_sent_to_other_processes_without_its_own(counting: LiveEnvironment) -> None:
    counting.prompt(0)
    twin = pickle.loads(pickle.dumps(counting))
    assert twin == counting
    assert "_sessions" not in vars(twin)


def test_a_mixture_with_a_task_that_has_no_sessions() -> None:
    parts = [
        {"name": "environment", "factory": f"{HERE}:Counting", "sessions": 3},
        {"name": "guess_number", "highest": 3},
        {"name": "arithmetic"},
    ]
    mixture: Any = build_task("mixture", seed=0, parts=parts)
    with closing(mixture):
        assert is_stateful(mixture)
        assert mixture.max_sessions == 3
        prompts = [mixture.prompt(index) for index in range(3)]
        turns = said("9")
        episodes = [Spoken(key=(each.id, 0), prompt=each, turns=turns) for each in prompts]
        labels = [each.task for each in prompts]
        steps = dict(zip(labels, mixture.step_sessions(episodes), strict=True))
        assert steps["environment"].reward == 1.0
        assert steps["guess_number"] == Step(reply="lower")
        assert steps["arithmetic"] == Step()
        rewarded = [Turn(role=Role.POLICY, text="9", reward=1.0)]
        by_task = {each.task: each for each in prompts}
        assert mixture.grade_turns(by_task["environment"], rewarded) == 1.0
        mixture.end_sessions([each.key for each in episodes])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"factory": "nowhere:make"}, "names the module nowhere, which is neither in this folder"),
        ({"factory": "make"}, "'make' must be module:name or path/to/file.py:name"),
        ({"rewards": "mean"}, "task.rewards = 'mean' must be 'sum' or 'last'."),
        ({"sessions": 0}, "task.sessions must be at least 1."),
        ({"step_seconds": 0}, "task.step_seconds must be above 0."),
        ({"stepseconds": 1}, r"has no option 'stepseconds' \(did you mean 'step_seconds'\?\)"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        build_task("environment", seed=0, **{"factory": f"{HERE}:Counting", **options})


@pytest.mark.parametrize(
    ("factory", "error", "sentence"),
    [
        ("make_nothing", ReplyError, "object has neither reset nor init: make the factory return"),
        ("Open", ReplyError, "is neither text nor chat messages: name a function that makes text"),
        ("absent", ConfigError, "has no absent; check the name after the colon"),
    ],
)
def test_what_is_no_environment_is_refused(factory: str, error: Any, sentence: str) -> None:
    with closing(environment(factory)) as task, pytest.raises(error, match=sentence):
        task.prompt(0)


def test_a_variable_that_is_not_set_is_refused() -> None:
    task = environment("Counting", variables=["TRUSTBATCH_NO_SUCH_KEY"])
    with pytest.raises(ConfigError, match=r"task\.variables names TRUSTBATCH_NO_SUCH_KEY, which"):
        task.prompt(0)
