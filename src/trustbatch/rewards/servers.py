"""Rewards from a server of one's own, and what all terms that ask a server have in common."""

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from trustbatch.rewards.base import Sample, ServerTerm, failure, is_finite
from trustbatch.rewards.functions import texts_of
from trustbatch.rewards.http_client import DeadlineExceeded, InvalidResponse, RewardServer
from trustbatch.types import GradeStatus
from trustbatch.utils.worker import Outcome

SECRET = re.compile(r"(^|[&;])[^=]*(key|token|secret|passw|signature)[^=]*=", re.IGNORECASE)
TOKEN = re.compile(r"[\x21-\x7e]+")


def check_server(term: str, key: str, url: str, token_variable: str | None) -> None:
    """Refuse an invalid address, a secret in it, or a token that is missing or no header's."""
    parts = urlsplit(url)
    if parts.username or parts.password or SECRET.search(parts.query):
        raise ValueError(
            f"{term}.{key} contains what looks like a secret, which would be written to the run "
            f"folder: remove it, and name an environment variable as {term}.token_variable."
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{term}.{key} = {url!r} must start with http:// or https://.")
    try:
        _ = parts.port
    except ValueError:
        raise ValueError(
            f"{term}.{key} = {url!r} has a port that is not a number from 0 to 65535."
        ) from None
    if token_variable is None:
        return
    if token_variable not in os.environ:
        raise ValueError(
            f"{term}.token_variable names {token_variable}, which is not set: export it."
        )
    if not TOKEN.fullmatch(os.environ[token_variable]):
        raise ValueError(
            f"{term}.token_variable names {token_variable}, whose value is empty or has a "
            "character that no HTTP header may have, such as a space or a line break: set it again."
        )


@dataclass(frozen=True, kw_only=True)
class HttpTerm(ServerTerm):
    """Rewards from an HTTP server; `http_client` describes requests and responses."""

    url: str
    """such as http://localhost:8000/score"""
    timeout: float = 60.0
    """seconds per request"""
    deadline: float = 300.0
    """seconds for all requests of a batch, including retries"""
    batch_size: int = 64
    """completions per request"""
    token_variable: str | None = None
    """environment variable with a token, sent as "Authorization: Bearer TOKEN\""""

    def check(self, *, max_tokens: int | None) -> None:
        """Refuse an invalid address, a non-positive limit or a missing token."""
        check_server("http", "url", self.url, self.token_variable)
        if self.timeout <= 0 or self.deadline <= 0 or self.batch_size < 1:
            raise ValueError("http.timeout, http.deadline and http.batch_size must be above 0.")

    def outcomes(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return one outcome per sample; a failed request fails all samples in it."""
        outcomes: list[Outcome] = []
        end = time.monotonic() + self.deadline
        for start in range(0, len(samples), self.batch_size):
            outcomes += self._request(samples[start : start + self.batch_size], end)
        return outcomes

    def _request(self, samples: Sequence[Sample], end: float) -> list[Outcome]:
        server = RewardServer(self.url, self.timeout, self.token_variable)
        try:
            rewards = server.rewards(texts_of(samples), end=end)
        except InvalidResponse as error:
            return [failure(GradeStatus.FAILED, str(error))] * len(samples)
        except DeadlineExceeded as error:
            reason = f"{self.url} gave no rewards within {self.deadline:g} seconds: {error}"
            return [failure(GradeStatus.TIMED_OUT, reason)] * len(samples)
        return [
            Outcome(GradeStatus.GRADED, float(reward))
            if is_finite(reward) and not isinstance(reward, bool)
            else Outcome(GradeStatus.FAILED, reason=f"{self.url} answered {reward!r} for it")
            for reward in rewards
        ]
