"""A model hub on the loopback interface: the routes that huggingface_hub's client uploads with."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_secret_of_the_test"
OWNER = "me"


@dataclass
class Hub:
    """What was uploaded."""

    address: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    """large files by their SHA-256"""
    broken: bool = False
    """answers commits with an error"""


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Serve an empty hub until the block ends."""
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        if self.path == "/api/whoami-v2" and self._is_known():
            self._answer({"name": OWNER, "type": "user"})
        else:
            self._answer({"error": "unknown"}, 401 if self.path == "/api/whoami-v2" else 404)

    def do_PUT(self) -> None:
        self.hub.blobs[self.path.rpartition("/")[2]] = self._body()
        self._answer({})

    def do_POST(self) -> None:
        body = self._body()
        if not self._is_known():
            return self._answer({"error": "Invalid credentials"}, 401)
        if self.path == "/api/repos/create":
            return self._create(json.loads(body))
        if self.path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if self.path.endswith("/preupload/main"):
            return self._choose_modes(json.loads(body))
        if self.path.endswith("/info/lfs/objects/batch"):
            return self._offer_places(json.loads(body))
        if self.path.endswith("/commit/main"):
            return self._commit(body.decode())
        return self._answer({"error": f"no route {self.path}"}, 404)

    def _create(self, tree: dict[str, Any]) -> None:
        owner = tree.get("organization") or OWNER
        name = f"{owner}/{tree['name']}"
        if owner != OWNER:
            return self._answer({"error": "You don't have the rights"}, 403)
        if name in self.hub.repos:
            url = f"{self.hub.address}/{name}"
            return self._answer({"error": "You already created this model repo", "url": url}, 409)
        self.hub.repos[name] = {}
        self.hub.private[name] = tree.get("private") or tree.get("visibility") == "private"
        return self._answer({"url": f"{self.hub.address}/{name}"})

    def _choose_modes(self, tree: dict[str, Any]) -> None:
        self._answer(
            {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                    }
                    for file in tree["files"]
                ]
            }
        )

    def _offer_places(self, tree: dict[str, Any]) -> None:
        place = f"{self.hub.address}/upload/"
        objects = [
            {**each, "actions": {"upload": {"href": place + each["oid"]}}}
            for each in tree["objects"]
        ]
        self._answer({"transfer": "basic", "objects": objects})

    def _commit(self, text: str) -> None:
        if self.hub.broken:
            return self._answer({"error": "out of disk"}, 400)
        _, _, _, owner, repo, *_ = self.path.split("/")
        files = self.hub.repos[f"{owner}/{repo}"]
        for line in text.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.hub.commits.append(value["summary"])
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
        oid = "0" * 40
        url = f"{self.hub.address}/{owner}/{repo}/commit/{oid}"
        return self._answer({"success": True, "commitOid": oid, "commitUrl": url})

    def _is_known(self) -> bool:
        return self.headers.get("authorization") == f"Bearer {TOKEN}"

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def _answer(self, tree: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(tree).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
