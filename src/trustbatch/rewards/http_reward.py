"""Rewards from a server, such as a reward model.

Request, a POST with a JSON body:
    {"prompts": ["..."], "completions": ["..."], "answers": ["..."]}
Answer, status 200 with a JSON body, one number a completion, null where it has none:
    {"rewards": [0.5, null]}

An answer with status 429 or 5xx, and a connection that fails, are tried again until the deadline;
any other answer is an error at once.
"""

import http.client
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from trustbatch.rewards.term import BatchTerm, Sample, is_finite
from trustbatch.rewards.worker import LONGEST_REASON, Outcome
from trustbatch.types import GradeStatus

FIRST_WAIT, LONGEST_WAIT = 0.2, 5.0
LARGEST_ANSWER = 16 * 2**20


class _TryAgain(Exception):
    """The server may answer another time."""


class _BadAnswer(Exception):
    """The server answers, but not with rewards."""


@dataclass(frozen=True, kw_only=True)
class HttpTerm(BatchTerm):
    """Rewards from an HTTP server."""

    url: str
    """where to send the batch, such as http://localhost:8000/score"""
    timeout: float = 60.0
    """seconds that one request may take"""
    deadline: float = 300.0
    """seconds for all requests of a batch with their repetitions"""
    batch_size: int = 64
    """completions in a request"""
    token_variable: str | None = None
    """environment variable with a token, sent as "Authorization: Bearer TOKEN\""""

    def check(self, *, max_tokens: int | None) -> None:
        """Refuse what is no address."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"http.url = {self.url!r} must start with http:// or https://.")
        try:
            _ = parts.port
        except ValueError:
            raise ValueError(
                f"http.url = {self.url!r} has a port that is not a number from 0 to 65535."
            ) from None
        if self.timeout <= 0 or self.deadline <= 0 or self.batch_size < 1:
            raise ValueError("http.timeout, http.deadline and http.batch_size must be above 0.")
        if self.token_variable is not None and self.token_variable not in os.environ:
            raise ValueError(
                f"http.token_variable names {self.token_variable}, which is not set: export it."
            )

    def outcomes(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return one outcome a sample; a request that fails is the failure of all in it."""
        found: list[Outcome] = []
        end = time.monotonic() + self.deadline
        for start in range(0, len(samples), self.batch_size):
            found += self._request(samples[start : start + self.batch_size], end)
        return found

    def _request(self, samples: Sequence[Sample], end: float) -> list[Outcome]:
        body = json.dumps(
            {
                "prompts": [sample.prompt.text for sample in samples],
                "completions": [sample.completion for sample in samples],
                "answers": [sample.prompt.answer for sample in samples],
            }
        ).encode()
        wait = FIRST_WAIT
        while True:
            try:
                if time.monotonic() >= end:
                    raise _TryAgain("the requests before took all the time")
                return self._rewards(self._post(body, end), len(samples))
            except _BadAnswer as error:
                return _all_failed(GradeStatus.FAILED, str(error), len(samples))
            except (_TryAgain, OSError, http.client.HTTPException) as error:
                if time.monotonic() + wait >= end:
                    reason = f"{self.url} gave no rewards within {self.deadline:g} seconds: {error}"
                    return _all_failed(GradeStatus.TIMED_OUT, reason, len(samples))
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    def _post(self, body: bytes, end: float) -> bytes:
        parts = urlsplit(self.url)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        seconds = min(self.timeout, max(end - time.monotonic(), 0.001))
        connection = kind(parts.hostname or "", parts.port, timeout=seconds)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.token_variable is not None:
            headers["Authorization"] = f"Bearer {os.environ[self.token_variable]}"
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        try:
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            content = _read(response, time.monotonic() + seconds)
        finally:
            connection.close()
        if response.status == 429 or response.status >= 500:
            raise _TryAgain(f"it answered with status {response.status}")
        if response.status != 200:
            raise _BadAnswer(f"{self.url} answered with status {response.status}")
        return content

    def _rewards(self, content: bytes, count: int) -> list[Outcome]:
        try:
            rewards = json.loads(content)["rewards"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise _BadAnswer(
                f'{self.url} must answer {{"rewards": [...]}}, not {content[:80]!r}'
            ) from None
        if not isinstance(rewards, list) or len(rewards) != count:
            raise _BadAnswer(f"{self.url} must answer {count} rewards for {count} completions")
        return [
            Outcome(GradeStatus.GRADED, float(reward))
            if is_finite(reward) and not isinstance(reward, bool)
            else Outcome(GradeStatus.FAILED, reason=f"{self.url} answered {reward!r} for it")
            for reward in rewards
        ]


def _read(response: http.client.HTTPResponse, end: float) -> bytes:
    """Read an answer that may drip: the socket's own limit is for each packet."""
    content = bytearray()
    while chunk := response.read1(1 << 16):
        content += chunk
        if time.monotonic() > end:
            raise _TryAgain("its answer did not end in time")
        if len(content) > LARGEST_ANSWER:
            raise _BadAnswer(f"its answer is longer than {LARGEST_ANSWER} bytes")
    return bytes(content)


def _all_failed(status: GradeStatus, reason: str, count: int) -> list[Outcome]:
    return [Outcome(status, reason=reason[:LONGEST_REASON])] * count
