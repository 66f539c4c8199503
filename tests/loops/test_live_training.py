"""Training with live sessions, and with tools, on a real tiny model."""

import runpy
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.support.episode_cases import episodes, sampling_of

from trustbatch.api import train_config
from trustbatch.build.fingerprints import fingerprint_files
from trustbatch.config import Config, parse_config
from trustbatch.errors import ConfigError
from trustbatch.models.policy import Policy
from trustbatch.observe.run_folder import read_metrics
from trustbatch.rewards import Scorer
from trustbatch.rollout.collect import collect
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.rollout.records import group_from_record, group_to_record
from trustbatch.rollout.reply_tokens import ReplyEncoder
from trustbatch.tasks.environments.live import LiveEnvironment
from trustbatch.tasks.tools import answer_tool_calls, tool_schemas
from trustbatch.types import FinishReason, GradeStatus, Prompt, Role, Turn

ROOT = Path(__file__).parents[2]
HERE = "tests.support.live_environments"
CHATML = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def live(factory: str = "Counting", **options: Any) -> LiveEnvironment:
    return LiveEnvironment(factory=f"{HERE}:{factory}", **options)


def configured(tiny: Path, folder: Path, name: str, **task: Any) -> Config:
    return parse_config(
        {
            "model": {"name": str(tiny), "device": "cpu"},
            "task": {"name": "environment", "factory": f"{HERE}:Counting", "sessions": 2, **task},
            "rollout": {"prompts_per_step": 3, "samples_per_prompt": 2, "max_tokens": 40},
            "training": {"steps": 3, "learning_rate": 1e-3},
            "run": {"name": name, "folder": str(folder), "checkpoint_every": 1},
        }
    )


def test_episodes_do_not_depend_on_the_number_of_sessions(policy: Policy) -> None:
    found = []
    for sessions in (1, 3, 12):
        with closing(live(sessions=sessions)) as task:
            groups = episodes(policy, environment=task, indices=range(3), top_logprobs=0)
            assert len(task._pool()._processes) <= sessions
            assert task._pool().num_live == 0
            found.append([(c.turns, c.finish_reason) for g in groups for c in g.completions])
    assert found[0] == found[1] == found[2]
    endings = {reason for _, reason in found[0]}
    assert FinishReason.STOP in endings
    played = [turns for turns, reason in found[0] if reason is FinishReason.STOP]
    for turns in played:
        own = [turn for turn in turns if turn.role is Role.POLICY]
        assert len(own) == 2
        assert [turn.reward for turn in own] == [
            sum(character.isdigit() for character in turn.text) for turn in own
        ]


def test_a_failed_episode_has_a_status_and_no_reward(policy: Policy) -> None:
    with closing(live("Troubled", options={"trouble": "dies"})) as task:
        groups = episodes(policy, environment=task, indices=range(8), top_logprobs=0)
        with closing(Scorer(task)) as scorer:
            graded = scorer.score(groups)
    pairs = [pair for group in graded for pair in zip(group.completions, group.grades, strict=True)]
    failed = [grade for completion, grade in pairs if completion.failure]
    assert failed
    assert {grade.status for grade in failed} == {GradeStatus.FAILED}
    assert all(grade.reward != grade.reward for grade in failed)  # NaN
    for completion, grade in pairs:
        if not completion.failure:
            assert grade.reward == sum(turn.reward or 0.0 for turn in completion.turns)
    # a checkpoint keeps rewards and failures
    for group in graded:
        again = group_from_record(group_to_record(group))
        assert [c.failure for c in again.completions] == [c.failure for c in group.completions]
        assert [c.turns for c in again.completions] == [c.turns for c in group.completions]


def test_sessions_end_where_the_engine_fails(policy: Policy, tmp_path: Path) -> None:
    class Failing(NativeEngine):
        def generate(self, requests: Any) -> Any:
            if any(request.turn for request in requests):
                raise RuntimeError("no more tokens")
            return super().generate(requests)

    log = tmp_path / "log"
    with closing(live(options={"log": str(log), "turns": 9}, sessions=2)) as task:
        prompts = [task.prompt(0)]
        with pytest.raises(RuntimeError, match="no more tokens"):
            collect(
                Failing(policy, seed=0),
                policy,
                prompts,
                task=task,
                num_samples=8,
                sampling=sampling_of(policy, top_logprobs=0),
            )
        assert task._pool().num_live == 0
    assert log.read_text().count("closed after 1\n") >= 1


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(tiny_folder: Path, tmp_path: Path) -> None:
    whole = train_config(configured(tiny_folder, tmp_path, "whole"))
    parts = configured(tiny_folder, tmp_path, "parts")
    train_config(parts, is_asked_to_stop=lambda: True)
    assert len(read_metrics(tmp_path / "parts")) == 1
    resumed = train_config(parts)
    keys = ("reward/mean", "ess", "episode/turns_mean", "response/length_mean")
    for one, other in zip(whole.metrics, resumed.metrics, strict=True):
        assert {key: one[key] for key in keys} == {key: other[key] for key in keys}
    assert whole.metrics[0]["reward/failed"] == 0


def test_an_edit_of_an_environment_is_noticed_when_a_run_resumes(
    tiny_folder: Path, tmp_path: Path
) -> None:
    config = configured(tiny_folder, tmp_path, "any", observation=f"{HERE}:observed")
    files = fingerprint_files(config, live(), [])
    assert [name for name in files if "live_environments" in name]


class Adder:
    """A tool in the tiny model's own characters: a call is anything that ends with "="."""

    name = "adder"

    def prompt(self, index: int) -> Prompt:
        tools = tool_schemas([double])
        return Prompt(id=str(index), text="1=", answer="", chat={"tools": tools})

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> Any:
        return [{"role": "tool", "content": "0"}, {"role": "tool", "content": "1"}]

    def grade(self, prompt: Prompt, completion: str) -> float:
        return 0.0


def double(number: int) -> int:
    """Double a number."""
    return 2 * number


def test_tool_messages_stand_in_the_template_and_sampled_tokens_stay(policy: Policy) -> None:
    policy.tokenizer.chat_template = CHATML
    encoder = ReplyEncoder.of(policy, {"tools": tool_schemas([double])}, ("tool", "tool"))
    assert encoder.between == (
        "\n<|im_start|>tool\n",
        "</s>\n<|im_start|>tool\n",
        "</s>\n<|im_start|>assistant\n",
    )
    policy.tokenizer.chat_template = (
        "{% if tools %}+{% endif %}{% for m in messages %}"
        "{{ {'user': '*', 'assistant': '-', 'tool': '='}[m.role] }}{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}-{% endif %}"
    )
    assert policy.tokenizer.decode(policy.encode(Adder().prompt(0))) == "+*1=</s>-"
    (group,) = episodes(policy, environment=Adder(), indices=[0], num_samples=8, max_turns=2)
    spoken = [c for c in group.completions if len(c.turns) == 3]
    assert spoken
    for completion in spoken:
        assert completion.sampled is not None
        replies = completion.token_ids[~completion.sampled].tolist()
        assert policy.tokenizer.decode(replies) == "=0</s>=1</s>-"
        assert completion.turns[1] == Turn(role=Role.ENVIRONMENT, text="0\n1")


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (None, "has no chat template: choose a model that was made for tools"),
        ("{{ messages[0].content }}", "has one without tools: choose a model"),
    ],
)
def test_a_model_that_would_not_see_its_tools_is_refused(
    policy: Policy, template: str | None, sentence: str
) -> None:
    policy.tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=sentence):
        policy.encode(Adder().prompt(0))


def test_a_template_that_refuses_tool_messages_is_named(policy: Policy) -> None:
    policy.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('users only') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(ConfigError, match=r"refuses a reply with messages of the role 'tool' \("):
        ReplyEncoder.of(policy, {}, ("tool",))


@pytest.mark.slow
def test_the_example_learns_to_call_its_tool(tmp_path: Path) -> None:
    """Six steps; with all fifteen the reward goes from 0.37 to 0.97."""
    example = runpy.run_path(str(ROOT / "examples" / "tool_use.py"))
    example["main"](tmp_path, steps=6)
    first, *_, last = read_metrics(tmp_path / "tool-use")
    assert first["reward/mean"] < 0.6
    assert last["reward/mean"] > first["reward/mean"] + 0.25
    assert last["episode/turns_mean"] > first["episode/turns_mean"] + 0.25
    # a call that can't be read is answered, in characters that the model has
    (message,) = answer_tool_calls(example["BEGIN"] + example["END"], []) or []
    assert example["make_tokenizer"]().encode(message["content"])
