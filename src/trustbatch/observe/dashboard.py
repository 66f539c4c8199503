"""`trustbatch dashboard`: a live page about the runs below a folder, for this machine alone.

It listens on 127.0.0.1 and answers only requests that name it as their host, so that no page of
another site can read it under a name of its own (DNS rebinding).
"""

import json
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from trustbatch.errors import ConfigError
from trustbatch.observe.dashboard_data import RunsBelow
from trustbatch.observe.page_parts import CHART_SCRIPTS, as_bytes, asset

HOST = "127.0.0.1"
SECONDS_TO_ASK = 10.0
"""after which a connection that says nothing is closed"""
SCRIPTS = (*CHART_SCRIPTS, "dashboard.js")
STYLES = ("report.css", "dashboard.css")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
WRITTEN_PAGE_POLICY = (
    "sandbox allow-scripts allow-downloads; default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
)
"""of a page that lies in a run's folder: it may draw, but has no access to the dashboard"""


class Dashboard(ThreadingHTTPServer):
    """Serves the runs below a folder to browsers of this machine."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        if not folder.is_dir():
            raise ConfigError(
                f"The folder {folder} does not exist: give the folder that has your runs, such as "
                "runs."
            )
        self.runs = RunsBelow(folder)
        self.lock = threading.Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"Port {port} of {HOST} can't be used ({error.strerror}): choose another --port, "
                "or none for a free one."
            ) from error

    @property
    def url(self) -> str:
        """Where a browser finds it."""
        return f"http://{HOST}:{self.server_port}/"

    @property
    def hosts(self) -> set[str]:
        """The names under which it answers."""
        return {f"{name}:{self.server_port}" for name in (HOST, "localhost")}


def shell() -> str:
    """Return the page, which asks for everything else."""
    styles = "".join(f'<link rel="stylesheet" href="/{name}">\n' for name in STYLES)
    scripts = "".join(f'<script src="/{name}" defer></script>\n' for name in SCRIPTS)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>trustbatch dashboard</title>\n{styles}{scripts}</head>\n<body>\n"
        '<header><h1>Runs</h1><p id="where">trustbatch dashboard</p></header>\n'
        '<main><section id="runs"></section><section id="charts"></section>'
        '<section id="completions"></section></main>\n</body>\n</html>\n'
    )


class _Handler(BaseHTTPRequestHandler):
    """Answers GET, and nothing else."""

    server_version = "trustbatch"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = SECONDS_TO_ASK

    def do_GET(self) -> None:
        """Answer with the page, a part of it, or data as JSON."""
        if not self._is_from_here():
            self._send(HTTPStatus.FORBIDDEN, b"This page is for browsers of this machine.\n")
            return
        address = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(address.query).items()}
        name = address.path.removeprefix("/")
        if name == "":
            self._send(HTTPStatus.OK, shell().encode(), "text/html")
        elif name in SCRIPTS:
            self._send(HTTPStatus.OK, asset(name).encode(), "text/javascript")
        elif name in STYLES:
            self._send(HTTPStatus.OK, asset(name).encode(), "text/css")
        elif name == "page":
            self._send_written_page(query.get("name", ""))
        elif name.startswith("api/"):
            self._send_data(name.removeprefix("api/"), query)
        else:
            self._send(HTTPStatus.NOT_FOUND, b"There is nothing here.\n")

    @property
    def _dashboard(self) -> Dashboard:
        assert isinstance(self.server, Dashboard)
        return self.server

    def _is_from_here(self) -> bool:
        is_ours = self.headers.get("Host") in self._dashboard.hosts
        # browsers say who asks: another site has no business here
        return is_ours and self.headers.get("Sec-Fetch-Site", "none") in ("same-origin", "none")

    def _send_data(self, what: str, query: dict[str, str]) -> None:
        runs = self._dashboard.runs
        name = query.get("name", "")
        answers: dict[str, Callable[[], Any]] = {
            "runs": lambda: runs.page(_count(query, "page"), query.get("query", "")),
            "series": lambda: runs.series(
                name, generation=_count(query, "generation"), after=_count(query, "after")
            ),
            "completions": lambda: runs.completions(name),
        }
        if what not in answers:
            self._send(HTTPStatus.NOT_FOUND, b"There is nothing here.\n")
            return
        try:
            with self._dashboard.lock:
                found = answers[what]()
        except ConfigError as error:
            self._send(HTTPStatus.NOT_FOUND, as_bytes(f"{error}\n"))
            return
        written = json.dumps(found, allow_nan=False, separators=(",", ":"))
        self._send(HTTPStatus.OK, written.encode(), "application/json")

    def _send_written_page(self, name: str) -> None:
        with self._dashboard.lock:
            file = self._dashboard.runs.page_file(name)
        try:
            page = None if file is None else file.read_bytes()
        except OSError:  # deleted meanwhile, or another user's
            page = None
        if page is None:
            self._send(HTTPStatus.NOT_FOUND, b"There is no page of this run.\n")
        else:
            self._send(HTTPStatus.OK, page, "text/html", WRITTEN_PAGE_POLICY)

    def _send(
        self, status: HTTPStatus, body: bytes, kind: str = "text/plain", policy: str = POLICY
    ) -> None:
        self.send_response(status)
        for key, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy,
            "Cross-Origin-Resource-Policy": "same-origin",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def handle(self) -> None:
        """Answer until the browser hangs up, which is no error."""
        try:
            super().handle()
        except ConnectionError:
            self.close_connection = True

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing: the terminal shows the address and stays quiet."""


def _count(query: dict[str, str], key: str) -> int:
    text = query.get(key, "0")
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def serve(folder: Path, port: int, say: Callable[[str], None]) -> None:
    """Serve until the user interrupts."""
    with Dashboard(folder, port) as dashboard:
        try:
            if not dashboard.runs.all():
                say(f"There is no run below {folder} yet: the page shows runs as they start.")
            say(f"Dashboard  {dashboard.url}  (Ctrl-C ends it)")
            dashboard.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("\nThe dashboard has ended; runs go on.")
