"""The terms that rewards are made of."""

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from trustbatch.config import parse_config
from trustbatch.errors import ConfigError
from trustbatch.rewards.config import RewardConfig
from trustbatch.rewards.terms import FormatTerm, HttpTerm, OverlongTerm, Sample, build_term
from trustbatch.types import GradeStatus, Prompt

TREE: dict[str, Any] = {"model": {"name": "m"}, "task": {"name": "arithmetic"}}


def sample(completion: str, *, num_tokens: int = 1, answer: str = "5") -> Sample:
    prompt = Prompt(id="0", text="2+3=", answer=answer)
    return Sample(prompt=prompt, completion=completion, num_tokens=num_tokens)


@pytest.mark.parametrize(
    ("options", "completion", "value"),
    [
        ({"boxed": True}, r"so \boxed{5}", 1.0),
        ({"boxed": True}, "so 5", 0.0),
        ({"boxed": True}, r"so \boxed{5", 0.0),
        ({"think": True}, "<think>a</think>b", 1.0),
        ({"think": True}, " <think>a</think>b", 1.0),
        ({"think": True}, "a</think>b", 1.0),
        ({"think": True}, "<think>a", 0.0),
        ({"think": True}, "a", 0.0),
        ({"think": True}, "<think>a</think>b</think>", 0.0),
        ({"think": True}, "<think>a</think><think>b", 0.0),
        ({"think": True}, "a<think>b</think>c", 0.0),
        ({"pattern": r"^<a>.*</a>$"}, "<a>\n</a>", 1.0),
        ({"pattern": r"^<a>.*</a>$"}, "x<a></a>", 0.0),
        ({"boxed": True, "think": True}, r"a</think>\boxed{5}", 1.0),
        ({"boxed": True, "think": True}, r"\boxed{5}", 0.0),
    ],
)
def test_format(options: dict[str, Any], completion: str, value: float) -> None:
    assert FormatTerm(**options).grade(sample(completion)) == value


def test_overlong_is_the_penalty_of_dapo() -> None:
    # paper: L_max = 16384 expected + 4096 of cache; 0 up to 16384, -1 at 20480, linear between
    term = OverlongTerm(buffer=4096, max_tokens=20_480)
    lengths = [1, 16_384, 17_408, 18_432, 20_480, 30_000]
    values = [term.grade(sample("", num_tokens=length)) for length in lengths]
    assert values == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("mathe", {}, "no reward term 'mathe' .did you mean 'math'"),
        ("format", {"boxd": True}, "no option 'boxd' .did you mean 'boxed'"),
        ("task", {"task": 1}, "it has no options"),
        ("overlong", {"buffer": "long"}, r"overlong\.buffer = 'long' must be an integer"),
        ("overlong", {}, r"needs the option buffer: set overlong\.buffer"),
        ("function", {}, r"needs the option path: set function\.path"),
    ],
)
def test_wrong_names_and_options_are_refused_with_the_configuration(
    name: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        build_term(name, options)
    with pytest.raises(ConfigError, match=words):
        parse_config({**TREE, "reward": {"terms": [{"name": name, **options}]}})


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("format", {}, "format needs boxed = true"),
        ("format", {"pattern": "("}, "not a regular expression"),
        ("overlong", {"buffer": 65}, "must be from 1 to the 64 tokens"),
        ("overlong", {"buffer": 0}, "must be from 1"),
        ("function", {"path": "no_colon"}, "must be module:name"),
        ("function", {"path": "no_such_module:f"}, "neither in this folder nor installed"),
        ("function", {"path": "no/such/file.py:f"}, "which does not exist"),
        ("batch_function", {"path": "json:loads", "time_limit": 0}, "must be above 0"),
        ("http", {"url": "localhost:8000"}, "must start with http"),
        ("http", {"url": "http://h:70000"}, "has a port that is not a number"),
        ("http", {"url": "http://h:x"}, "has a port that is not a number"),
        ("http", {"url": "http://h", "batch_size": 0}, "must be above 0"),
        ("http", {"url": "http://h", "token_variable": "NOT_SET_AT_ALL"}, "export it"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    name: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        build_term(name, options).check(max_tokens=64)


def test_overlong_needs_to_know_the_longest_completion() -> None:
    with pytest.raises(ValueError, match="overlong needs max_tokens"):
        build_term("overlong", {"buffer": 8}).check(max_tokens=None)


def test_parts_have_unique_names() -> None:
    terms = [{"name": "function", "path": "a:f"}, {"name": "function", "path": "b:f"}]
    with pytest.raises(ConfigError, match="two called 'f': give each a label"):
        parse_config({**TREE, "reward": {"terms": terms}})
    terms[1]["label"] = "g"
    config = parse_config({**TREE, "reward": {"terms": terms}})
    assert [term.part for term in config.reward.terms] == ["f", "g"]
    again = RewardConfig.model_validate(config.to_dict()["reward"])
    assert again == config.reward


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"ungraded": "ignore"}, "ungraded"),
        ({"time_limit": 0}, "time_limit"),
        ({"workers": 0}, "workers"),
        ({"term": []}, "did you mean 'reward.terms'"),
        ({"terms": [{"weight": 1.0}]}, "name is missing"),
        ({"terms": [{"name": "task", "weight": float("inf")}]}, "finite"),
        ({"terms": [{"name": "task", "label": "a/b"}]}, "label"),
    ],
)
def test_a_wrong_table_is_refused(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config({**TREE, "reward": table})


Answer = Callable[[dict[str, Any], int], tuple[int, bytes]]


@contextmanager
def serving(answer: Answer) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A local server with the given responses; yields its address and requests."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append({**body, "token": self.headers["Authorization"], "path": self.path})
            status, content = answer(body, len(requests))
            with suppress(BrokenPipeError):  # who asked may have gone by now
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def lengths(body: dict[str, Any], _: int) -> tuple[int, bytes]:
    return 200, json.dumps({"rewards": [len(text) for text in body["completions"]]}).encode()


def test_rewards_from_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "secret")
    with serving(lengths) as (url, requests):
        term = HttpTerm(url=f"{url}/score?a=1", batch_size=2, token_variable="REWARD_TOKEN")
        term.check(max_tokens=None)
        outcomes = term.outcomes([sample("a"), sample("bb"), sample("ccc", answer="7")])
    assert [outcome.value for outcome in outcomes] == [1.0, 2.0, 3.0]
    assert [request["completions"] for request in requests] == [["a", "bb"], ["ccc"]]
    assert requests[1] | {"token": None} == {
        "prompts": ["2+3="], "completions": ["ccc"], "answers": ["7"], "token": None,
        "path": "/score?a=1",
    }  # fmt: skip
    assert requests[0]["token"] == "Bearer secret"


def test_requests_to_a_busy_server_are_retried() -> None:
    def busy_first(body: dict[str, Any], number: int) -> tuple[int, bytes]:
        return (503, b"") if number == 1 else (429, b"") if number == 2 else lengths(body, number)

    with serving(busy_first) as (url, requests):
        (outcome,) = HttpTerm(url=url).outcomes([sample("a")])
    assert outcome.value == 1.0
    assert len(requests) == 3


@pytest.mark.parametrize("first", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.0 200 OK\r\n\r\n"])
def test_a_response_that_trickles_in_ends_at_the_timeout(first: bytes) -> None:
    """In the header, or in a body whose connection the response has taken over."""
    listener = socket.create_server(("127.0.0.1", 0))

    def trickle() -> None:
        connection, _ = listener.accept()
        with suppress(OSError), connection:  # who asked has gone by then
            connection.recv(1 << 16)
            connection.sendall(first)
            for number in range(100):
                connection.sendall(b"X-%d: x\r\n" % number)
                time.sleep(0.1)

    threading.Thread(target=trickle, daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    start = time.monotonic()
    (outcome,) = HttpTerm(url=url, timeout=0.5, deadline=0.6).outcomes([sample("a")])
    assert time.monotonic() - start < 4.0
    assert outcome.status is GradeStatus.TIMED_OUT
    listener.close()


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "caf\u00e9"])
def test_a_token_that_no_header_can_have_is_refused_and_not_shown(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWARD_TOKEN", token)
    term = HttpTerm(url="http://localhost/", token_variable="REWARD_TOKEN")
    with pytest.raises(ValueError, match="REWARD_TOKEN, whose value is empty or has") as caught:
        term.check(max_tokens=None)
    assert not token or token not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["http://me:hidden@host/", "http://host/?api_key=hidden", "http://host/?a=1&Token=hidden"],
)
def test_a_secret_in_the_address_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ValueError, match="looks like a secret") as caught:
        HttpTerm(url=url).check(max_tokens=None)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, b""), "answered with status 404"),
        ((200, b"no json"), "must answer"),
        ((200, b"[1, 2]"), "must answer"),
        ((200, b"[" * 200_000), "must answer"),
        ((200, b'{"rewards": [1%s, 1%s]}' % (b"0" * 400, b"0" * 400)), "answered 1000"),
        ((200, b'{"rewards": [1]}'), "must answer 2 rewards for 2 completions"),
        ((200, b'{"rewards": 1}'), "must answer 2 rewards"),
    ],
)
def test_an_invalid_response_fails_at_once(answer: tuple[int, bytes], words: str) -> None:
    with serving(lambda *_: answer) as (url, requests):
        outcomes = HttpTerm(url=url).outcomes([sample("a"), sample("b")])
    assert [outcome.status for outcome in outcomes] == [GradeStatus.FAILED] * 2
    assert words in outcomes[0].reason
    assert len(requests) == 1


def test_single_rewards_may_be_missing() -> None:
    content = b'{"rewards": [1, null, NaN, "1", true]}'
    with serving(lambda *_: (200, content)) as (url, _):
        outcomes = HttpTerm(url=url).outcomes([sample("a")] * 5)
    assert [outcome.status for outcome in outcomes] == [
        GradeStatus.GRADED,
        *[GradeStatus.FAILED] * 4,
    ]


def test_the_deadline_holds_whatever_the_server_does() -> None:
    def slow(body: dict[str, Any], number: int) -> tuple[int, bytes]:
        time.sleep(1.0)
        return lengths(body, number)

    with serving(slow) as (url, requests):
        start = time.monotonic()
        (outcome,) = HttpTerm(url=url, timeout=0.2, deadline=0.9).outcomes([sample("a")])
        assert time.monotonic() - start < 1.5
    assert outcome.status is GradeStatus.TIMED_OUT
    assert "gave no rewards within 0.9 seconds" in outcome.reason
    assert len(requests) > 1


def test_the_deadline_is_of_the_whole_batch() -> None:
    def slow(body: dict[str, Any], number: int) -> tuple[int, bytes]:
        time.sleep(0.4)
        return lengths(body, number)

    with serving(slow) as (url, _):
        start = time.monotonic()
        term = HttpTerm(url=url, deadline=0.6, batch_size=1)
        outcomes = term.outcomes([sample("a")] * 6)
        assert time.monotonic() - start < 1.5
    assert outcomes[0].status is GradeStatus.GRADED
    assert {outcome.status for outcome in outcomes[1:]} == {GradeStatus.TIMED_OUT}


def test_an_unreachable_server_times_out() -> None:
    term = HttpTerm(url="http://127.0.0.1:9", deadline=0.5)
    (outcome,) = term.outcomes([sample("a")])
    assert outcome.status is GradeStatus.TIMED_OUT
    assert "Connection refused" in outcome.reason


def test_functions_are_found_by_file_and_by_module(tmp_path: Path) -> None:
    file = tmp_path / "my_rewards.py"
    file.write_text("def one(prompt, completion, answer):\n    return 1.0\n")
    term = build_term("function", {"path": f"{file}:one"})
    term.check(max_tokens=None)
    assert term.grade(sample("a")) == 1.0  # type: ignore[union-attr]
    term = build_term("function", {"path": "tests.support.pool_graders:brevity"})
    term.check(max_tokens=None)
    assert term.grade(sample("abc")) == 0.25  # type: ignore[union-attr]
    missing = build_term("function", {"path": f"{file}:two"})
    missing.check(max_tokens=None)
    with pytest.raises(ImportError, match="has no two"):
        missing.grade(sample("a"))  # type: ignore[union-attr]


def test_a_file_does_not_replace_a_module_of_python(tmp_path: Path) -> None:
    file = tmp_path / "random.py"
    file.write_text("def one(prompt, completion, answer):\n    return 1.0\n")
    before = sys.modules["random"]
    term = build_term("function", {"path": f"{file}:one"})
    assert term.grade(sample("a")) == 1.0  # type: ignore[union-attr]
    assert sys.modules["random"] is before


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("brevty", r"rewards\.py:brevty.*has no brevty .did you mean 'brevity'"),
        ("number", r"rewards\.py:number' is not a function, but int"),
        ("short", r"must take .prompt, completion, answer., but it takes .text."),
    ],
)
def test_unusable_functions_are_refused_at_load(tmp_path: Path, name: str, words: str) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(
        "number = 1\ndef brevity(prompt, completion, answer, details):\n    return 1.0\n"
        "def short(text):\n    return 1.0\n"
    )
    build_term("function", {"path": f"{file}:brevity"}).prepare()  # type: ignore[union-attr]
    with pytest.raises((ImportError, TypeError), match=words):
        build_term("function", {"path": f"{file}:{name}"}).prepare()  # type: ignore[union-attr]
