"""The dashboard: what it finds and serves, to whom, and what a browser shows of it."""

import gzip
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from tests.support.chromium import PROGRAM, chromium

from trustbatch.cli import main
from trustbatch.errors import ConfigError
from trustbatch.observe import dashboard_data
from trustbatch.observe.dashboard import Dashboard
from trustbatch.observe.dashboard_data import MetricsReader, RunsBelow

EVIL = "</script><img src=x onerror=alert(1)>"


def make_run(folder: Path, steps: int = 3, *, changed: float | None = None, **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    add_steps(folder, range(1, steps + 1), **more)
    if changed is not None:
        os.utime(folder / "metrics.jsonl", (changed, changed))
    return folder


def add_steps(folder: Path, steps: range, **more: Any) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        for step in steps:
            row = {"step": step, "reward/mean": step / 8, "one_minus_ess": 0.5, "tokens/count": 10}
            file.write(json.dumps(row | more) + "\n")


def write_status(folder: Path, **more: Any) -> None:
    record = {"step": 3, "steps": 9, "version": 3, "state": "finished", "pid": 1, "host": "here"}
    record |= {"time": time.time(), "started": 0.0, "stepped": 0.0, "seconds_left": 0.0}
    (folder / "status.json").write_text(json.dumps(record | more))


def series_of(answer: dict[str, Any], key: str) -> dict[str, Any]:
    (found,) = [chart["series"][0] for chart in answer["charts"] if chart["key"] == key]
    return found


# what it finds


def test_runs_and_studies_are_found_newest_first(tmp_path: Path) -> None:
    make_run(tmp_path / "old", changed=100)
    make_run(tmp_path / "deep" / "er" / "new", changed=300)
    make_run(tmp_path / "study" / "runs" / "arm--seed-0", changed=200)
    (tmp_path / "study" / "study.json").write_text("{}")
    os.utime(tmp_path / "study" / "study.json", (50, 50))
    make_run(tmp_path / ".hidden")
    make_run(tmp_path / "old" / "checkpoints" / "inner")
    outside = make_run(tmp_path.parent / f"{tmp_path.name}-outside")
    (tmp_path / "link").symlink_to(outside)
    runs = RunsBelow(tmp_path)
    assert list(runs.all()) == ["deep/er/new", "study/runs/arm--seed-0", "old", "study"]
    page = runs.page(0, "")
    assert [row["kind"] for row in page["rows"]] == ["run", "run", "run", "study"]
    assert page["rows"][3]["runs"] == 1
    assert [row["name"] for row in runs.page(0, "RUNS arm")["rows"]] == ["study/runs/arm--seed-0"]


def test_only_the_runs_of_a_page_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(120):
        make_run(tmp_path / f"run-{number:03d}", 1, changed=1000 - number)
    opened: list[str] = []
    last_row = dashboard_data._last_row

    def counted(file: Path) -> dict[str, Any]:
        opened.append(file.parent.name)
        return last_row(file)

    monkeypatch.setattr(dashboard_data, "_last_row", counted)
    page = RunsBelow(tmp_path).page(1, "")
    assert page["total"] == 120
    assert [row["name"] for row in page["rows"]] == [f"run-{n:03d}" for n in range(50, 100)]
    assert opened == [row["name"] for row in page["rows"]]


def test_a_row_has_the_state_and_the_last_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", 3, entropy=1.5, **{"rollout/lag_mean": 2.0})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/mean": 99')  # not complete yet
    write_status(run)
    make_run(tmp_path / "b", 1, **{"reward/mean": float("nan")})
    rows = {row["name"]: row for row in RunsBelow(tmp_path).page(0, "")["rows"]}
    a, b = rows["a"], rows["b"]
    assert (a["state"], a["step"], a["steps"]) == ("finished", 3, 9)
    assert (a["reward"], a["one_minus_ess"], a["entropy"], a["lag"]) == (0.375, 0.5, 1.5, 2.0)
    assert (b["state"], b["step"], b["reward"], b["entropy"]) == ("unknown", 1, None, None)
    write_status(run, state="running", time=0.0, host="elsewhere")
    (again,) = RunsBelow(tmp_path).page(0, "a")["rows"]
    assert again["state"] == "dead"
    (run / "status.json").write_text("{")
    assert RunsBelow(tmp_path).page(0, "a")["rows"][0]["state"] == "unknown"


def test_metrics_are_read_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", 3)
    reader = MetricsReader(run / "metrics.jsonl")
    reader.update()
    first = reader.rows[0]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('broken\n{"step": 4}\n{"st')
    reader.update()
    assert [row["step"] for row in reader.rows] == [1, 2, 3, 4]
    assert reader.rows[0] is first
    with (run / "metrics.jsonl").open("a") as file:
        file.write('ep": 5}\n')
    reader.update()
    assert reader.rows[-1] == {"step": 5}
    assert reader.generation == 1
    # a resumed run writes another file
    shorter = run / "other"
    shorter.write_text('{"step": 1}\n' * 50)
    shorter.replace(run / "metrics.jsonl")
    reader.update()
    assert (len(reader.rows), reader.generation) == (50, 2)


def test_only_new_steps_are_sent(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", 3)
    runs = RunsBelow(tmp_path)
    whole = runs.series("a", generation=0, after=0)
    assert (whole["first"], whole["rows"], whole["generation"]) == (0, 3, 1)
    assert series_of(whole, "reward/mean")["y"] == [0.125, 0.25, 0.375]
    assert whole["clock"] == {"step": [1, 2, 3], "tokens": [10, 20, 30]}
    same = runs.series("a", generation=1, after=3)
    assert (same["charts"], same["clock"]) == ([], None)
    add_steps(run, range(4, 6))
    new = runs.series("a", generation=1, after=3)
    assert series_of(new, "reward/mean")["x"] == [4, 5]
    assert new["clock"]["tokens"] == [10, 20, 30, 40, 50]
    assert runs.series("a", generation=7, after=3)["first"] == 0
    assert runs.series("a", generation=1, after=99)["first"] == 0


def test_old_readers_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_data, "READERS_KEPT", 2)
    for name in "abc":
        make_run(tmp_path / name, 1)
    runs = RunsBelow(tmp_path)
    for name in "abac":
        runs.series(name, generation=0, after=0)
    assert list(runs._readers) == ["a", "c"]


def test_the_newest_completions(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    runs = RunsBelow(tmp_path)
    assert runs.completions("a") == []
    folder = run / "rollouts"
    folder.mkdir()
    rows = [
        {"step": 9, "prompt": "p", "completion": f"text {n}", "reward": n, "token": ["x"] * 5}
        for n in range(12)
    ]
    rows[0]["turns"] = [{"role": "policy", "text": "go"}, {"role": "environment", "text": "left"}]
    written = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "step-000009.jsonl").write_text(written.replace("text", "old"))
    (folder / "step-000010.jsonl.gz").write_bytes(gzip.compress(written.encode()))
    shown = runs.completions("a")
    assert [row["completion"] for row in shown] == [
        "[policy] go\n[environment] left",
        *(f"text {number}" for number in (2, 4, 6, 8, 10)),
    ]
    assert "token" not in shown[0]
    # one that is still being written
    (folder / "step-000011.jsonl.gz").write_bytes(gzip.compress(written.encode())[:40])
    assert runs.completions("a") == []
    damaged = bytearray(gzip.compress(written.encode()))
    damaged[20:30] = b"\xff" * 10
    (folder / "step-000012.jsonl.gz").write_bytes(damaged)
    assert runs.completions("a") == []


def test_a_run_that_can_not_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    make_run(tmp_path / "a", 3)
    make_run(tmp_path / "b", 3)
    (tmp_path / "b" / "metrics.jsonl").unlink()
    (tmp_path / "b" / "metrics.jsonl").mkdir()
    runs = RunsBelow(tmp_path)
    steps = {row["name"]: row["step"] for row in runs.page(0, "")["rows"]}
    assert steps["a"] == 3
    reader = MetricsReader(tmp_path / "b" / "metrics.jsonl")
    reader.update()
    assert reader.rows == []


def test_links_out_of_the_folder_are_not_served(tmp_path: Path) -> None:
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"step": 1, "completion": "secret", "reward/mean": 0.5}\n')
    root = tmp_path / "runs"
    run = make_run(root / "a")
    (run / "rollouts").mkdir()
    (run / "rollouts" / "step-000001.jsonl").symlink_to(secret)
    (run / "report.html").symlink_to(secret)
    linked = root / "b"
    linked.mkdir()
    (linked / "metrics.jsonl").symlink_to(secret)
    write_status(tmp_path)
    (linked / "status.json").symlink_to(tmp_path / "status.json")
    runs = RunsBelow(root)
    assert runs.completions("a") == []
    assert runs.page_file("a") is None
    with pytest.raises(ConfigError, match="no run 'b'"):
        runs.series("b", generation=0, after=0)
    rows = {row["name"]: row for row in runs.page(0, "")["rows"]}
    assert (rows["b"]["reward"], rows["b"]["state"]) == (None, "unknown")


# what it serves, and to whom


@contextmanager
def served(folder: Path) -> Iterator[Dashboard]:
    with Dashboard(folder) as dashboard:
        thread = threading.Thread(target=dashboard.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield dashboard
        finally:
            dashboard.shutdown()
            thread.join()


def get(
    dashboard: Dashboard, path: str, method: str = "GET", **headers: str
) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection("127.0.0.1", dashboard.server_port, timeout=10)
    connection.request(
        method, path, headers={key.replace("_", "-"): v for key, v in headers.items()}
    )
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def test_only_browsers_of_this_machine_are_answered(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    with served(tmp_path) as dashboard:
        assert dashboard.server_address[0] == "127.0.0.1"
        port = dashboard.server_port
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}"):
            assert get(dashboard, "/api/runs", Host=host)[0].status == 403
        for site in ("cross-site", "same-site"):
            assert get(dashboard, "/api/runs", Sec_Fetch_Site=site)[0].status == 403
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
            assert get(dashboard, "/api/runs", method)[0].status == 501
        answer, body = get(dashboard, "/api/runs", Host=f"localhost:{port}")
        assert (answer.status, json.loads(body)["total"]) == (200, 1)
        assert answer.headers["Content-Security-Policy"].startswith(
            "default-src 'none'; script-src"
        )
        assert "'unsafe-inline'" not in answer.headers["Content-Security-Policy"]
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_nothing_but_runs_is_served(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "report.html").write_text("secret")
    make_run(tmp_path / "outside")
    run = make_run(tmp_path / "runs" / "a")
    (run / "report.html").write_text("<p>written</p>")
    with served(tmp_path / "runs") as dashboard:
        for path in (
            "/../secret.txt",
            "/%2e%2e/secret.txt",
            "/a/metrics.jsonl",
            "/dashboard.py",
            "/api/nothing",
            "/api/",
        ):
            assert get(dashboard, path)[0].status == 404, path
        for name in ("..", "../outside", "a/../../outside", str(tmp_path / "outside"), "", "."):
            for what in ("api/series", "api/completions", "page"):
                answer, body = get(dashboard, f"/{what}?{urlencode({'name': name})}")
                assert answer.status == 404, (what, name)
                assert b"secret" not in body
        answer, body = get(dashboard, "/page?name=a")
        assert (answer.status, body) == (200, b"<p>written</p>")
        # a page of a run may not ask the dashboard for others
        assert answer.headers["Content-Security-Policy"].startswith("sandbox allow-scripts")
        assert get(dashboard, "/api/series?name=a&after=x&generation=-1")[0].status == 200


def test_what_can_not_be_served_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboard", str(tmp_path / "nowhere")]) == 2
    assert "nowhere does not exist: give the folder" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["dashboard", str(tmp_path), "--port", str(port)]) == 2
    assert f"Port {port} of 127.0.0.1 can't be used" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["dashboard", "--port", "70000"])


def test_the_command_prints_its_address_and_ends_on_an_interrupt(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trustbatch", "dashboard", str(tmp_path)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # tests that a shell runs in the background inherit that interrupts are ignored
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    try:
        assert "There is no run below" in process.stdout.readline()
        assert "Dashboard  http://127.0.0.1:" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, "")
    assert "The dashboard has ended; runs go on." in out


# in a browser


def texts(name: str) -> str:
    return f"[...document.querySelectorAll({json.dumps(name)})].map(each => each.textContent)"


@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
def test_a_live_page_in_a_browser(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    evil = "'\"><img src=x onerror=alert(2)><script>alert(3)<"
    run = make_run(root / evil, 3, entropy=0.5)
    write_status(run, last_error=EVIL, state="failed")
    (run / "rollouts").mkdir()
    sample = {"step": 3, "prompt": EVIL, "completion": EVIL, "answer": EVIL, "reward": 0.5}
    (run / "rollouts" / "step-000003.jsonl").write_text(json.dumps(sample) + "\n")
    make_run(root / "folder" / "other", 5, changed=10)
    with served(root) as dashboard, chromium(tmp_path / "profile") as page:
        page.load(dashboard.url)
        # the newest is chosen
        page.wait_for("document.querySelectorAll('svg.chart path.line').length === 3")
        assert page.evaluate(texts(".runs th[scope=row] span")) == [evil, "folder/other"]
        assert page.evaluate(texts(".runs .chip")) == ["failed", "unknown"]
        # another beside it, over tokens too
        page.evaluate("document.querySelectorAll('.runs tbody tr')[1].click()")
        page.wait_for("document.querySelectorAll('svg.chart path.line').length === 5")
        assert page.evaluate("document.querySelector('.axis-choice').innerText").split() == [
            "over",
            "steps",
            "tokens",
        ]
        assert page.evaluate(texts(".lead .card:first-child .legend span")) == [evil, "other"]
        # new steps come by themselves, and nothing else
        add_steps(run, range(4, 11))
        points = "document.querySelector('path.line').getAttribute('d').split(',').length"
        page.wait_for(f"{points} === 11")
        asked = [address for address in page.requests if "/api/series" in address]
        assert asked[-1].endswith("generation=1&after=5")
        assert any(address.endswith("generation=1&after=3") for address in asked)
        # completions, once they are asked for
        page.evaluate("document.querySelector('#completions details').open = true")
        page.wait_for("document.querySelectorAll('#completions pre').length === 2")
        assert page.evaluate(texts("#completions pre")) == [EVIL, EVIL]
        # pictures may be saved under this policy too
        saved = tmp_path / "saved"
        saved.mkdir()
        page.save_downloads(saved)
        page.evaluate("document.querySelector('.tools button:nth-child(4)').click()")
        deadline = time.monotonic() + 20
        while not (saved / "Reward.png").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (saved / "Reward.png").read_bytes()[:4] == b"\x89PNG"
        # a reload keeps the choice; a phone is wide enough
        address = page.evaluate("location.href")
        page.load("about:blank")
        page.load(address, width=420, dark=True)
        page.wait_for("document.querySelectorAll('svg.chart path.line').length === 5")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        # a chosen run that is gone is dropped, and the page goes on with the others
        shutil.rmtree(root / "folder")
        page.wait_for("document.querySelectorAll('svg.chart path.line').length === 3")
        add_steps(run, range(11, 13))
        page.wait_for(f"{points} === 13")
        assert page.evaluate("document.querySelector('.gone').hidden")
        page.complaints = [each for each in page.complaints if "404" not in each]
        assert page.evaluate("document.images.length") == 0
        assert (page.complaints, page.dialogs) == ([], [])
        allowed = ("about:blank", dashboard.url, "data:image/svg", f"blob:{dashboard.url}")
        assert all(address.startswith(allowed) for address in page.requests)
