"""A language model as the judge: a real server on 127.0.0.1 answers as OpenAI's do."""

import json
import logging
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.rewards.test_reward_terms import serving

import trustbatch
from trustbatch.errors import ConfigError, RewardError
from trustbatch.rewards.base import Sample
from trustbatch.rewards.judge import JudgeTerm, NoScore
from trustbatch.types import GradeStatus, Prompt

TEMPLATE = "Problem: {problem} Reference: {answer} Solution: {completion}"


def sample(completion: str) -> Sample:
    prompt = Prompt(id="0", text="2+3=", answer="5")
    return Sample(prompt=prompt, completion=completion, num_tokens=1)


def judge(url: str = "http://127.0.0.1:9/v1", **options: Any) -> JudgeTerm:
    given = {"base_url": url, "model": "judge-1", "prompt": TEMPLATE, **options}
    term = JudgeTerm(**given)
    term.check(max_tokens=None)
    return term


def replying(reply: str) -> tuple[int, bytes]:
    return 200, json.dumps({"choices": [{"message": {"content": reply}}]}).encode()


def length_of_solution(body: dict[str, Any], _: int) -> tuple[int, bytes]:
    """Score a solution by its length, out of 10."""
    solution = body["messages"][0]["content"].rpartition("Solution: ")[2]
    return replying(f"Of 3 points, I give this a {len(solution)}")


def test_the_request_and_the_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with serving(length_of_solution) as (url, requests):
        term = judge(f"{url}/v1/", scale=10.0, token_variable="JUDGE_KEY", max_tokens=7)
        outcomes = term.outcomes([sample("ab"), sample("abcde")])
    assert [outcome.value for outcome in outcomes] == [0.2, 0.5]
    first = min(requests, key=lambda request: len(request["messages"][0]["content"]))
    assert first == {
        "model": "judge-1",
        "messages": [{"role": "user", "content": "Problem: 2+3= Reference: 5 Solution: ab"}],
        "temperature": 0.0,
        "max_tokens": 7,
        "path": "/v1/chat/completions",
        "token": "Bearer secret",
    }


def test_a_completion_can_not_ask_for_the_answer() -> None:
    with serving(length_of_solution) as (url, requests):
        judge(url, scale=100.0).outcomes([sample("{answer} {problem}")])
    assert requests[0]["messages"][0]["content"].endswith("Solution: {answer} {problem}")


@pytest.mark.parametrize(
    ("options", "reply", "score"),
    [
        ({}, "0.75", 0.75),
        ({}, "At first 0.2, but then 1", 1.0),
        ({"scale": 5.0}, "Score: 4/5, so 4", 0.8),
        ({"pattern": r"score:\s*(\S+)"}, "Score: 0.5\nof 1", 0.5),
        ({"pattern": r"\[\[(.*?)\]\]", "scale": 10.0}, "[[3]] no, [[7]]. 9", 0.7),
        ({"choices": {"A": 1.0, "B": 0.0}}, "a is tempting, but: B", 0.0),
        ({"choices": {"right": 1.0, "not right": -1.0}}, "It is not right.", -1.0),
        ({"choices": {"yes": 1, "no": 0}, "pattern": "verdict: (.*)"}, "no\nVerdict: YES ", 1.0),
        ({}, "<think>0.1</think> 0.9", 0.9),
    ],
)
def test_scores_are_read(options: dict[str, Any], reply: str, score: float) -> None:
    assert judge(**options).read_score(reply) == pytest.approx(score)


@pytest.mark.parametrize(
    ("options", "reply", "words"),
    [
        ({}, "I can't say.", 'gave no score, but "I can\'t say."'),
        ({}, "<think>0.9", "gave no score"),
        ({}, "2", r"the score 2, not 0 to 1"),
        ({}, "-0.5", r"the score -0\.5, not 0 to 1"),
        ({"pattern": "score: (.*)"}, "score: high", "'high', which is no number"),
        ({"pattern": "score: (.*)"}, "score: nan", "score nan, not 0 to 1"),
        ({"choices": {"A": 1.0}}, "Bad", "gave no score"),
        ({"choices": {"A": 1.0}, "pattern": "(.)$"}, "B", "chose 'B', which is none"),
    ],
)
def test_a_reply_without_a_score_has_no_reward(
    options: dict[str, Any], reply: str, words: str
) -> None:
    with pytest.raises(NoScore, match=words):
        judge(**options).read_score(reply)
    with serving(lambda *_: replying(reply)) as (url, _):
        (outcome,) = judge(url, **options).outcomes([sample("a")])
    assert outcome.status is GradeStatus.FAILED
    assert outcome.value is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"base_url": "localhost"}, "judge.base_url = 'localhost' must start with http"),
        ({"base_url": "http://h/?api_key=1"}, "judge.base_url contains what looks like a secret"),
        ({"prompt": "Is {answer} right?"}, "must contain {completion}"),
        ({"concurrency": 0}, "must be above 0"),
        ({"scale": 0.0}, "must be above 0"),
        ({"choices": {}}, "judge.choices is a table of numbers"),
        ({"choices": {"A": "1"}}, "judge.choices is a table of numbers"),
        ({"pattern": "("}, "not a regular expression"),
        ({"pattern": "score"}, "needs brackets around the score"),
        ({"token_variable": "NOT_SET_AT_ALL"}, "judge.token_variable names .* export it"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        judge(**options)


def test_replies_are_paid_for_once(tmp_path: Path) -> None:
    samples = [sample("a"), sample("bb"), sample("a")]
    with serving(length_of_solution) as (url, requests):
        term = judge(url, scale=10.0, cache=str(tmp_path / "judge"))
        assert [outcome.value for outcome in term.outcomes(samples)] == [0.1, 0.2, 0.1]
        assert len(requests) == 2  # equal completions are asked for once
        assert [outcome.value for outcome in term.outcomes(samples)] == [0.1, 0.2, 0.1]
        assert len(requests) == 2
        # the reply is kept, not the score: reading it in another way costs nothing
        again = judge(url, scale=10.0, cache=str(tmp_path / "judge"), pattern=r"Of (\d)")
        assert [outcome.value for outcome in again.outcomes(samples)] == [0.3] * 3
        assert len(requests) == 2
        judge(url, cache=str(tmp_path / "judge"), model="judge-2", scale=10.0).outcomes(samples)
        assert len(requests) == 4


def test_a_failed_reply_is_not_kept(tmp_path: Path) -> None:
    with serving(lambda _, number: replying("?" if number == 1 else "1")) as (url, requests):
        term = judge(url, cache=str(tmp_path))
        assert term.outcomes([sample("a")])[0].status is GradeStatus.FAILED
        assert term.outcomes([sample("a")])[0].value == 1.0
    assert len(requests) == 2


def test_a_damaged_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "replies.sqlite").write_bytes(b"x" * 5000)
    with pytest.raises(RewardError, match=r"replies.sqlite, which .* delete it, or name another"):
        judge(cache=str(tmp_path)).outcomes([sample("a")])


def test_a_busy_server_is_asked_again() -> None:
    def busy_first(body: dict[str, Any], number: int) -> tuple[int, bytes]:
        return (429, b"") if number == 1 else (500, b"") if number == 2 else replying("1")

    with serving(busy_first) as (url, requests):
        (outcome,) = judge(url).outcomes([sample("a")])
    assert outcome.value == 1.0
    assert len(requests) == 3


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ((401, b'{"error": "bad key secret"}'), GradeStatus.FAILED, "answered with status 401"),
        ((200, b'{"choices": []}'), GradeStatus.FAILED, "must answer with a chat completion"),
        ((200, b"no json"), GradeStatus.FAILED, "must answer with a chat completion"),
        ((503, b""), GradeStatus.TIMED_OUT, "gave no reply within 0.5 seconds: .* status 503"),
    ],
)
def test_a_server_that_fails_is_no_reward(
    answer: tuple[int, bytes], status: GradeStatus, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with serving(lambda *_: answer) as (url, _):
        term = judge(url, deadline=0.5, token_variable="JUDGE_KEY")
        (outcome,) = term.outcomes([sample("a")])
    assert outcome.status is status
    assert re.search(words, outcome.reason)
    assert "secret" not in outcome.reason


def test_requests_run_at_the_same_time() -> None:
    gate = threading.Barrier(4)  # each four requests wait for one another

    def answer(body: dict[str, Any], _: int) -> tuple[int, bytes]:
        gate.wait(timeout=30)
        return replying("1")

    with serving(answer) as (url, _):
        outcomes = judge(url, concurrency=4).outcomes([sample("a" * each) for each in range(8)])
    assert [outcome.value for outcome in outcomes] == [1.0] * 8


def test_no_more_requests_than_allowed_run_at_the_same_time() -> None:
    lock, running, most = threading.Lock(), [0], [0]

    def answer(body: dict[str, Any], _: int) -> tuple[int, bytes]:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.02)
        with lock:
            running[0] -= 1
        return replying("1")

    with serving(answer) as (url, _):
        judge(url, concurrency=2).outcomes([sample("a" * number) for number in range(8)])
    assert most[0] <= 2


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_with_a_judge(
    tiny_folder: Path,
    in_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A resumed run asks for nothing that it was told before; the key is written nowhere."""
    monkeypatch.setenv("JUDGE_KEY", "very-secret")
    caplog.set_level(logging.DEBUG)

    def some_fail(body: dict[str, Any], number: int) -> tuple[int, bytes]:
        return (400, b"") if number == 2 else length_of_solution(body, number)

    with serving(some_fail) as (url, requests):
        term = {
            "name": "judge", "base_url": url, "model": "m", "prompt": TEMPLATE, "scale": 100.0,
            "token_variable": "JUDGE_KEY",
        }  # fmt: skip
        arguments: dict[str, Any] = {
            "model": str(tiny_folder),
            "task": "arithmetic",
            "reward": {"terms": [term]},
            "rollout": {"prompts_per_step": 2, "samples_per_prompt": 4, "max_tokens": 4},
            "run": {"name": "judged", "checkpoint_every": 1},
        }
        result = trustbatch.train(**arguments, training={"steps": 2})
        assert result.metrics[0]["reward/failed"] == 1
        assert result.metrics[0]["reward/judge/mean"] > 0
        num_asked = len(requests)
        for path in (result.folder / "checkpoints").glob("step-2*"):
            (path / "manifest.json").unlink(missing_ok=True)
            path.rename(path.with_name("gone"))
        again = trustbatch.train(**arguments, training={"steps": 2})
    # the second step is computed again; its replies are on disk
    assert len(requests) == num_asked
    assert again.metrics[1]["reward/mean"] == result.metrics[1]["reward/mean"]
    assert (in_folder / "runs/judged/judge/replies.sqlite").is_file()
    written = [path for path in in_folder.rglob("*") if path.is_file()]
    assert len(written) > 5
    assert all(b"very-secret" not in path.read_bytes() for path in written)
    assert "very-secret" not in caplog.text
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="JUDGE_KEY, which is not set"):
        trustbatch.train(**arguments, training={"steps": 3})
