"""Headless Chromium over its debugging pipe: what a page draws, says and asks for.

Nothing but the browser is needed (Debian's package is called chromium), and nothing listens.
"""

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
SECONDS = 60.0
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    # a request that would leave the machine fails here, whatever the policy of the page
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)
_READS, _WRITES = 3, 4
"""the descriptors that Chromium's pipe has"""


class OpenPage:
    """A page that was loaded, with what it has said and asked for so far."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._unread = b""
        self._last_id = 0
        self._session: str | None = None
        self._loaded = False
        self.complaints: list[str] = []
        """errors and warnings in the console, and exceptions"""
        self.requests: list[str] = []
        self.dialogs: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def load(self, file: Path | str, *, width: int = 1300, dark: bool = False) -> None:
        """Open a file or an address in a window of this width."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        address = file if isinstance(file, str) else file.as_uri()
        self._call("Page.navigate", url=address)
        deadline = time.monotonic() + SECONDS
        while not self._loaded:
            self._note(self._next(deadline, f"{address} to load"))

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript in the page; a promise is awaited."""
        answer = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression of JavaScript is true."""
        deadline = time.monotonic() + SECONDS
        while not self.evaluate(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expression} was not true within {SECONDS:g} s.")
            time.sleep(0.02)

    def point_at(self, x: float, y: float) -> None:
        """Move the pointer there."""
        self._mouse("mouseMoved", x, y)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the button at one place, and let go at another."""
        self._mouse("mousePressed", *start, button="left", buttons=1, clickCount=1)
        self._mouse("mouseMoved", *end, button="left", buttons=1)
        self._mouse("mouseReleased", *end, button="left", clickCount=1)

    def click(self, x: float, y: float, *, times: int = 1) -> None:
        """Click, or with `times` = 2 double click, at a place."""
        for count in range(1, times + 1):
            self._mouse("mousePressed", x, y, button="left", buttons=1, clickCount=count)
            self._mouse("mouseReleased", x, y, button="left", clickCount=count)

    def save_downloads(self, folder: Path) -> None:
        """Let the page write what it offers as a file into this folder."""
        allowed = {"behavior": "allow", "downloadPath": str(folder)}
        self._call("Browser.setDownloadBehavior", **allowed)

    def _mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def picture(self, file: Path) -> None:
        """Write a PNG of the whole page."""
        answer = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(b64decode(answer["data"]))

    def press(self, key: str) -> None:
        """Press and release a key, such as "Enter" or "a"."""
        text = {"text": key} if len(key) == 1 else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            answer = self._next(deadline, f"an answer to {method}")
            if answer.get("id") == self._last_id:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _next(self, deadline: float, awaited: str) -> dict[str, Any]:
        while b"\0" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise TimeoutError(f"Chromium took more than {SECONDS:g} s for {awaited}.")
            part = os.read(self._answers, 1 << 16)
            if not part:
                raise ConnectionError(f"Chromium ended while it was to give {awaited}.")
            self._unread += part
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, values = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(values["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(values["args"]))
        elif method == "Log.entryAdded":
            self.complaints.append(values["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(values["message"])
            self._last_id += 1
            close = {"id": self._last_id, "method": "Page.handleJavaScriptDialog"}
            close |= {"params": {"accept": True}, "sessionId": self._session}
            os.write(self._commands, json.dumps(close).encode() + b"\0")


@contextmanager
def chromium(profile: Path) -> Iterator[OpenPage]:
    """Start a browser with an empty profile; it ends with the block."""
    assert PROGRAM is not None
    theirs_in, commands = os.pipe()
    answers, theirs_out = os.pipe()
    # out of the way of the two numbers that they are to have
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (theirs_in, theirs_out)]

    def place() -> None:
        os.dup2(ends[0], _READS)
        os.dup2(ends[1], _WRITES)

    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    process = subprocess.Popen(
        [PROGRAM, *FLAGS, *sandbox, f"--user-data-dir={profile}"],
        preexec_fn=place,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for end in (theirs_in, theirs_out, *ends):
        os.close(end)
    try:
        yield OpenPage(commands, answers)
    finally:
        os.close(commands)  # it ends when no one can ask it any more
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)
        os.close(answers)
