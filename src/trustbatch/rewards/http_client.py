"""Requests to a server that grades, such as a reward model or a judge.

Request to a reward server, a POST with a JSON body:
    {"prompts": ["..."], "completions": ["..."], "answers": ["..."]}
Response, status 200 with a JSON body, one number per completion, null where it has none:
    {"rewards": [0.5, null]}

Responses with status 429 or 5xx and failed connections are retried until the deadline; any other
response is an error at once.
"""

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

FIRST_RETRY_DELAY, MAX_RETRY_DELAY = 0.2, 5.0
MAX_RESPONSE_BYTES = 16 * 2**20


class InvalidResponse(Exception):
    """The server responds, but not with rewards."""


class DeadlineExceeded(Exception):
    """No request succeeded before the deadline."""


class _Retry(Exception):
    """The request may succeed later."""


@dataclass(frozen=True)
class JsonServer:
    """An HTTP server that answers to JSON."""

    url: str
    timeout: float
    """seconds per request"""
    token_variable: str | None = None
    """environment variable with a bearer token"""

    def ask(self, body: Mapping[str, Any], *, end: float) -> bytes:
        """Return the response; retries until the time `end`, by `time.monotonic`."""
        content = json.dumps(body).encode()
        delay = FIRST_RETRY_DELAY
        while True:
            try:
                if time.monotonic() >= end:
                    raise _Retry("earlier requests used up the deadline")
                return self._post(content, end)
            except (_Retry, OSError, http.client.HTTPException) as error:
                if time.monotonic() + delay >= end:
                    raise DeadlineExceeded(str(error)) from error
            time.sleep(delay)
            delay = min(2 * delay, MAX_RETRY_DELAY)

    def _post(self, body: bytes, end: float) -> bytes:
        parts = urlsplit(self.url)
        connection_class = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        seconds = min(self.timeout, max(end - time.monotonic(), 0.001))
        connection = connection_class(parts.hostname or "", parts.port, timeout=seconds)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.token_variable is not None:
            headers["Authorization"] = f"Bearer {os.environ[self.token_variable]}"
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        # the socket's own timeout is per packet: a header that trickles in would never end
        is_late = threading.Event()
        watchdog = threading.Timer(seconds, _abort, [connection, is_late])
        watchdog.daemon = True
        try:
            watchdog.start()
            connection.connect()
            if is_late.is_set():  # before there was a socket to shut down
                raise _Retry("it was not reached in time")
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            content = _read(response, is_late)
        finally:
            watchdog.cancel()
            connection.close()
        if is_late.is_set():
            raise _Retry("its response did not end in time")
        if response.status == 429 or response.status >= 500:
            raise _Retry(f"it answered with status {response.status}")
        if response.status != 200:
            raise InvalidResponse(f"{self.url} answered with status {response.status}")
        return content


@dataclass(frozen=True)
class RewardServer(JsonServer):
    """An HTTP server that returns rewards."""

    def rewards(self, batch: Mapping[str, Sequence[str]], *, end: float) -> list[Any]:
        """Return one value per completion; retries until the time `end`, by `time.monotonic`."""
        return self._parse(self.ask(batch, end=end), len(batch["completions"]))

    def _parse(self, content: bytes, count: int) -> list[Any]:
        try:
            rewards = json.loads(content)["rewards"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InvalidResponse(
                f'{self.url} must answer {{"rewards": [...]}}, not {content[:80]!r}'
            ) from None
        if not isinstance(rewards, list) or len(rewards) != count:
            raise InvalidResponse(f"{self.url} must answer {count} rewards for {count} completions")
        return rewards


def _abort(connection: http.client.HTTPConnection, is_late: threading.Event) -> None:
    """End a request from another thread: for whoever reads, the response ends at once."""
    is_late.set()
    sock = connection.sock  # None once the response has taken it over: `_read` looks itself
    if sock is not None:
        with contextlib.suppress(OSError):  # it was closed meanwhile
            sock.shutdown(socket.SHUT_RDWR)


def _read(response: http.client.HTTPResponse, is_late: threading.Event) -> bytes:
    content = bytearray()
    while chunk := response.read1(1 << 16):
        content += chunk
        if is_late.is_set():
            raise _Retry("its response did not end in time")
        if len(content) > MAX_RESPONSE_BYTES:
            raise InvalidResponse(f"its response is longer than {MAX_RESPONSE_BYTES} bytes")
    if response.length:  # bytes that were announced and did not come
        raise _Retry("its response ended too early")
    return bytes(content)
