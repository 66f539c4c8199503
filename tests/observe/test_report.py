"""The run report: what it shows, what it leaves out, and that run text stays text."""

import json
import math
import re
from base64 import b64encode
from collections.abc import Iterable
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from trustbatch.errors import ConfigError
from trustbatch.observe.report import default_output, final_mean, write_report
from trustbatch.observe.report_charts import _medians, _shares, lag_curves
from trustbatch.observe.report_data import read_runs

LEVELS = {"01": 0.02, "10": 0.5, "50": 1.0, "90": 2.0, "99": 30.0}
WITH_CAP: dict[str, Any] = {"weight/cap": 0.9}
QUANTILES: dict[str, Any] = {f"ratio/p{level}": value for level, value in LEVELS.items()}
VOID = {"meta", "br", "img", "link", "input", "line", "path"}


class Page(HTMLParser):
    """The elements of a page, each with the metric of the figure it lies in, and its text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], str]] = []
        self.open: list[tuple[str, str]] = []
        self.text: list[tuple[str, str]] = []
        self.data: list[tuple[str, str]] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        metric = values.get("data-metric") or (self.open[-1][1] if self.open else "")
        self.elements.append((tag, values, metric))
        if tag not in VOID:
            self.open.append((tag, metric))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), self.open[-1][1]))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.text.append((self.open[-1][0], data))
            if self.open[-1][0] == "script":
                self.data.append((str(self.elements[-1][1].get("class")), data))

    @property
    def charts(self) -> list[dict[str, Any]]:
        """What the page's script draws from."""
        found = [json.loads(data) for kind, data in self.data if kind == "chart-data"]
        return [chart for chart in found if chart["series"]]

    def lines(self, metric: str) -> list[dict[str, Any]]:
        return [line for chart in self.charts if chart["key"] == metric for line in chart["series"]]

    def all_text(self) -> str:
        return "".join(data for tag, data in self.text if tag not in ("script", "style"))


def make_run(
    folder: Path,
    rows: Iterable[dict[str, Any]],
    *,
    planned: int = 20,
    samples: dict[int, list[dict[str, Any]]] | None = None,
) -> Path:
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.toml").write_text(
        'seed = 3\n[objective]\nname = "p3o"\nstrength = 0.5\n'
        f"[rollout]\ntemperature = 0.7\nlag = 2\n[training]\nsteps = {planned}\n"
    )
    (folder / "environment.json").write_text('{"torch": "2.11.0", "gpu": {"name": "some device"}}')
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step, found in (samples or {}).items():
        path = folder / "rollouts" / f"step-{step:06d}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return folder


def rows(count: int = 20, /, **extra: Any) -> list[dict[str, Any]]:
    return [
        {"step": step, "reward/mean": step / 20, "one_minus_ess": 0.01 * step, **extra}
        for step in range(1, count + 1)
    ]


def page_of(tmp_path: Path, *folders: Path) -> Page:
    output = tmp_path / "new" / "folder" / "report.html"
    assert write_report(folders, output) == output
    return Page(output.read_text(encoding="utf-8"))


def test_every_run_with_the_metric_has_one_line_in_its_chart(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "a", rows(entropy=1.0, **WITH_CAP)),
        make_run(tmp_path / "b", rows(entropy=0.5)),
        make_run(tmp_path / "c", rows(entropy=None)),
    ]
    page = page_of(tmp_path, *folders)
    assert len(page.lines("reward/mean")) == 3
    assert len(page.lines("entropy")) == 2
    assert len(page.lines("weight/cap")) == 1
    assert "kl/behavior" not in {metric for _, _, metric in page.elements}
    assert "Not recorded by any of these runs: Ratio quantiles, Loss, KL to the" in (
        page.all_text()
    )


def test_page_is_self_contained_and_forbids_the_network(tmp_path: Path) -> None:
    page = page_of(tmp_path, make_run(tmp_path / "a", rows()))
    policies = [
        values["content"]
        for _, values, _ in page.elements
        if values.get("http-equiv") == "Content-Security-Policy"
    ]
    assert len(policies) == 1
    assert str(policies[0]).startswith(
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-"
    )
    (script,) = [data for kind, data in page.data if kind == "None"]
    digest = b64encode(sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'; img-src data:; base-uri" in str(policies[0])
    assert not {"link", "img", "iframe", "object"} & {tag for tag, _, _ in page.elements}
    for _, values, _ in page.elements:
        assert "src" not in values
        assert str(values.get("href", "#")).startswith("#")
    assert not page.open


def test_text_of_a_run_never_becomes_markup(tmp_path: Path) -> None:
    evil = '<script>alert(1)</script></pre><img src=x onerror=alert(2)>"\' onload="x'
    # A folder's name holds no slash, but one joins it to its parent: together they make a tag.
    name = "'\"><img src=x onerror=y><script>alert(1)</script>"
    sample = {"step": 1, "prompt_id": evil, "prompt": evil, "completion": evil, "answer": evil}
    sample |= {"finish_reason": evil, "policy": evil, "engine": evil, "reward": evil}
    episode = sample | {"turns": [{"role": evil, "text": evil}, {"role": "environment"}]}
    of_run = rows(**QUANTILES, **{evil: 1.0})
    run = make_run(tmp_path / name, of_run, samples={1: [sample, episode]})
    with (run / "config.toml").open("a") as config:
        config.write(
            f"[extra]\nevil = '''{evil}'''\n[objective.more]\n'<script>' = '{evil[:25]}'\n"
        )
    (run / "environment.json").write_text(json.dumps({evil: {evil: evil}}))
    page = page_of(tmp_path, run, make_run(tmp_path / "b" / "script>", rows()))
    tags = [tag for tag, _, _ in page.elements]
    assert [kind for kind, _ in page.data].count("None") == 2  # of the viewer, and the script
    assert "img" not in tags
    attributes = {key for _, values, _ in page.elements for key in values}
    assert not {key for key in attributes if key.startswith("on") or key == "src"}
    assert page.all_text().count(evil) >= 4
    (data,) = [data for kind, data in page.data if kind == "None" and data.startswith("{")]
    assert json.loads(data)["columns"]["completion"] == [evil, evil]
    assert name in page.all_text()
    assert f"Ratio quantiles of {name}" in [chart["title"] for chart in page.charts]
    source = (tmp_path / "new/folder/report.html").read_text()
    assert source.count("<script") == source.count("</script>") == len(page.data)


def test_one_minus_ess_falls_back_to_ess(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", [{"step": 1, "ess": 0.75}])
    assert read_runs([run])[0].series("one_minus_ess") == ([1.0], [0.25])


def test_missing_steps_are_bridged_but_recorded_nothing_is_a_gap(tmp_path: Path) -> None:
    data = [{"step": 1, "entropy": 1.0}, {"step": 2}, {"step": 3, "entropy": float("nan")}]
    run = read_runs([make_run(tmp_path / "a", [*data, {"step": 4, "entropy": "high"}])])[0]
    steps, values = run.series("entropy")
    assert steps == [1.0, 3.0, 4.0]
    assert values[0] == 1.0
    assert math.isnan(values[1])
    assert math.isnan(values[2])


def test_long_runs_are_thinned_in_the_page(tmp_path: Path) -> None:
    data = rows(3000, entropy=1.0, **QUANTILES)
    data[1234]["entropy"] = 50.0
    page = page_of(tmp_path, make_run(tmp_path / "a", data))
    (entropy,) = page.lines("entropy")
    assert len(entropy["x"]) == len(entropy["y"]) == 800
    assert (entropy["x"][0], entropy["x"][-1]) == (1, 3000)
    assert max(entropy["spread"][1]) == 50.0
    assert all(len(line["x"]) <= 800 for chart in page.charts for line in chart["series"])


def test_ratio_quantiles_have_one_panel_per_run_that_recorded_them(tmp_path: Path) -> None:
    page = page_of(
        tmp_path,
        make_run(tmp_path / "a", rows(**QUANTILES)),
        make_run(tmp_path / "b", rows(**{"ratio/p50": 1.0})),
        make_run(tmp_path / "c", rows(**QUANTILES)),
    )
    panels = [chart for chart in page.charts if chart["key"] == "ratio"]
    assert [chart["series"][0]["name"] for chart in panels] == ["a", "c"]
    (line,) = panels[0]["series"]
    p01, p10, p50, p90, p99 = ([value] * 20 for value in LEVELS.values())
    assert (line["y"], line["bands"]) == (p50, [[p01, p99], [p10, p90]])
    # all panels have the same axes, with the on-policy level
    for chart in panels:
        assert (chart["x_include"], chart["level"]) == ([1, 20], 1)
        assert chart["y_include"] == [1, 0.02, 30]


def test_loss_and_learning_rate_have_charts_over_a_clock(tmp_path: Path) -> None:
    more = {"policy/loss": -0.5, "learning_rate": 1e-4}
    timed = more | {"tokens/count": 50, "time/step_seconds": 1800}
    page = page_of(
        tmp_path, make_run(tmp_path / "a", rows(4, **timed)), make_run(tmp_path / "b", rows(4))
    )
    assert [line["y"] for key in more for line in page.lines(key)] == [[-0.5] * 4, [1e-4] * 4]
    (clocks,) = [json.loads(data) for kind, data in page.data if kind == "clocks"]
    steps = [1, 2, 3, 4]
    assert clocks[0] == {"step": steps, "tokens": [50, 100, 150, 200], "hours": [0.5, 1, 1.5, 2]}
    assert clocks[1] == {"step": steps}


def test_the_ledger_is_drawn_by_cause_and_its_newest_step_tabled(tmp_path: Path) -> None:
    data = rows(6)
    for place, share in ((1, 0.25), (3, 0.75)):
        data[place] |= {
            "ledger/lag/one_minus_ess": 0.1 * share,
            "ledger/lag/ratio_mean": 1.5,
            "ledger/lag/share": share,
            "ledger/updates/one_minus_ess": 0.025,
            "ledger/updates/ratio_mean": 1.0,
            "ledger/updates/share": 1 - share,
            "ledger/position/0-15/one_minus_ess": 0.25,
            "ledger/position/16-/one_minus_ess": 0.5,
            "ledger/position/16-/ratio_mean": 2.0,
        }
    page = page_of(tmp_path, make_run(tmp_path / "a", rows()), make_run(tmp_path / "b", data))
    lag, updates = page.lines("ledger")
    assert (lag["name"], lag["x"], lag["y"]) == ("lag", [2, 4], [0.025, 0.075])
    assert (updates["name"], updates["run"]) == ("updates", 1)
    source = (tmp_path / "new/folder/report.html").read_text()
    ledger = source[source.index('<section id="ledger">') :]
    ledger = ledger[: ledger.index("</section>")]
    assert "Step 4 <small>the newest ledger" in ledger
    cells = re.findall(r"<td[^>]*>(.*?)</td>", ledger)
    # a full bar is 55% wide: of shares at 1, of bins at the largest of them
    assert cells == [
        *("0.075", "1.5", '<i style="width: 41.2%"></i>75%'),
        *("0.025", "1", '<i style="width: 13.8%"></i>25%'),
        *("0.25", "\N{EN DASH}", '<i style="width: 27.5%"></i>'),
        *("0.5", "2", '<i style="width: 55.0%"></i>'),
    ]
    assert re.findall(r'row">(\d[^<]*)<', ledger) == ["0 to 15", "16 and more"]
    assert "#ledger" in [v.get("href") for _, v, _ in page.elements]
    assert "ledger" not in page_of(tmp_path, tmp_path / "a").all_text()


def lagging_rows(**engines: float) -> list[dict[str, Any]]:
    """Step 1 has lag 0, step 2 has lag 1, and the others have three of lag 2 and one of lag 3."""
    found = rows(**{"time/trainer_busy_share": 0.8, "cluster/buffered_batches": 1})
    for row in found:
        lags = {1: {0: 4}, 2: {1: 4}}.get(row["step"], {2: 3, 3: 1})
        row |= {f"rollout/completions/lag_{lag}": count for lag, count in lags.items()}
        row |= {f"one_minus_ess/lag_{lag}": 10.0**-lag * row["step"] for lag in lags if lag}
        row |= {"rollout/lag_mean": max(lags), "rollout/lag_max": max(lags)}
        row |= {f"cluster/engine/{name}/busy_share": share for name, share in engines.items()}
        row |= {f"cluster/engine/{name}/tokens_per_second": 10.0 for name in engines}
    return found


def test_charts_by_lag_have_lags_on_their_axis(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "a", lagging_rows()), make_run(tmp_path / "b", rows())]
    page = page_of(tmp_path, *folders)
    run = read_runs(folders)[0]
    assert run.by_lag("rollout/completions/lag_") == {
        0: [4.0],
        1: [4.0],
        2: [3.0] * 18,
        3: [1.0] * 18,
    }
    (shares,) = lag_curves([run], "rollout/completions/lag_", _shares)
    assert shares.values == pytest.approx([0.05, 0.05, 54 / 80, 18 / 80])
    (ess,) = lag_curves([run], "one_minus_ess/lag_", _medians)
    # steps 3 to 20 have lags 2 and 3: their median is 11.5
    assert list(zip(ess.steps, ess.values, strict=True)) == [
        (1.0, pytest.approx(0.2)),
        (2.0, pytest.approx(0.115)),
        (3.0, pytest.approx(0.0115)),
    ]
    for metric, steps in (
        ("rollout/completions/lag_", [0, 1, 2, 3]),
        ("one_minus_ess/lag_", [1, 2, 3]),
    ):
        (chart,) = [chart for chart in page.charts if chart["key"] == metric]
        assert (chart["x"], chart["x_include"], chart["marked"]) == ("lag", [0], True)
        (line,) = page.lines(metric)
        assert line["x"] == steps
    for metric in ("rollout/lag_mean", "time/trainer_busy_share", "cluster/buffered_batches"):
        assert len(page.lines(metric)) == 1


def test_runs_without_lag_or_workers_are_not_asked_for_them(tmp_path: Path) -> None:
    fresh = {"rollout/completions/lag_0": 4, "rollout/lag_mean": 0.0, "rollout/lag_max": 0.0}
    page = page_of(tmp_path, make_run(tmp_path / "a", rows(**fresh)))
    assert not [metric for _, _, metric in page.elements if "lag" in metric]
    assert "#engines" not in [v.get("href") for _, v, _ in page.elements]
    (absent,) = [data for _, data in page.text if data.startswith("Not recorded by any")]
    for title in ("Trainer busy", "Engines busy", "Batches waiting", "Lag"):
        assert title not in absent


def test_engines_and_their_restarts_are_listed(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    data = lagging_rows(**{"engine-0": 0.5, evil: 0.25})
    data[4]["cluster/engine_restarts"] = 2
    page = page_of(tmp_path, make_run(tmp_path / "a", data), make_run(tmp_path / "b", rows()))
    assert [kind for kind, _ in page.data].count("None") == 1
    heads = [data for tag, data in page.text if tag == "th"]
    assert heads[heads.index("Engine") :][:5] == [
        "Engine",
        "Tokens/s",
        "Busy share",
        "engine-0",
        evil,
    ]
    cells = [data for tag, data in page.text if tag == "td"]
    place = cells.index("10")
    assert cells[place : place + 4] == ["10", "0.5", "10", "0.25"]
    remarks = [data for tag, data in page.text if tag == "span"]
    assert "restarted engines: first at step 5, up to 2" in remarks
    assert "#engines" in [v.get("href") for _, v, _ in page.elements]


def test_truncated_last_line_is_ignored_and_other_damage_is_noted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", rows(5), planned=5)
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_bytes(whole.encode() + '{"step": 6, "note": "é'.encode()[:-1])
    (read,) = read_runs([run])
    assert (read.steps_done, read.problems) == (5, [])
    first, rest = whole.split("\n", 1)
    (run / "metrics.jsonl").write_text(f'{first}\n{{"step": 2, "rew\n{rest}')
    assert read_runs([run])[0].problems == ["1 unreadable line in metrics.jsonl"]


def test_resumed_run_replaces_repeated_steps(tmp_path: Path) -> None:
    again = [{"step": step, "reward/mean": 9.0} for step in (4, 5, 6)]
    run = read_runs([make_run(tmp_path / "a", [*rows(5), *again])])[0]
    assert run.series("reward/mean") == ([1, 2, 3, 4, 5, 6], [0.05, 0.1, 0.15, 9.0, 9.0, 9.0])


def test_summary_shows_settings_results_and_warnings(tmp_path: Path) -> None:
    data = rows(40, **{"time/tokens_per_second": 1234.0, "tokens/nonfinite": 0})
    data[6]["tokens/nonfinite"] = 3
    data[8]["steps/skipped"] = 1
    page = page_of(tmp_path, make_run(tmp_path / "a", data, planned=50))
    cells = [data for tag, data in page.text if tag == "td"]
    # Rewards are step/20; the last tenth of 40 steps is 37 to 40, whose mean is 38.5 / 20.
    expected = ["0.7", "2", "40 / 50", "0.05", "1.925", "0.385", "1,234"]
    assert [cell for cell in cells if cell.strip()][: len(expected)] == expected
    remarks = [data for tag, data in page.text if tag == "span"]
    assert "unfinished: 40 of 50 steps" in remarks
    assert "non-finite tokens: first at step 7, up to 3" in remarks
    assert "skipped steps: first at step 9, up to 1" in remarks
    assert ("code", "strength=0.5") in page.text


def test_parts_of_rewards_and_tasks_have_charts_and_missing_groups_a_note(tmp_path: Path) -> None:
    keys = ("reward/math/mean", "task/gsm8k/reward", "dynamic/groups_missing")
    data = rows(20, **dict.fromkeys(keys, 2.0))
    page = page_of(tmp_path, make_run(tmp_path / "a", data))
    for key in keys:
        assert f'data-metric="{key}"' in (tmp_path / "new/folder/report.html").read_text()
    remarks = [text for tag, text in page.text if tag == "span"]
    assert "batch slots filled with groups of equal rewards: first at step 1, up to 2" in remarks
    page_of(tmp_path, make_run(tmp_path / "b", rows(20)))
    plain = (tmp_path / "new/folder/report.html").read_text()
    assert not any(key in plain for key in keys)
    assert "Groups missing" not in plain


def test_finished_run_has_no_warning_and_steps_may_count_from_zero(tmp_path: Path) -> None:
    shifted = [row | {"step": row["step"] - 1} for row in rows(20)]
    for name, data in (("one", rows(20)), ("zero", shifted)):
        source = write_report([make_run(tmp_path / name, data)], tmp_path / "r.html").read_text()
        assert "20 / 20" in source
        assert 'class="note"' not in source


def test_final_mean_skips_what_is_not_finite() -> None:
    assert final_mean([1.0, 2.0, 3.0]) == 3.0
    assert final_mean([*[0.0] * 18, 4.0, math.nan]) == 4.0
    assert math.isnan(final_mean([]))


def test_run_without_a_step_is_reported_and_not_drawn(tmp_path: Path) -> None:
    page = page_of(tmp_path, make_run(tmp_path / "a", []))
    assert "no steps recorded" in page.all_text()
    assert page.charts == []


def test_only_episodes_have_a_chart_of_turns(tmp_path: Path) -> None:
    metrics = {"episode/turns_mean": 1.5, "episode/turns_max": 3.0}
    page = page_of(tmp_path, make_run(tmp_path / "a", rows(**metrics)))
    assert len(page.lines("episode/turns_mean")) == 1
    without = page_of(tmp_path, make_run(tmp_path / "b", rows()))
    assert "Turns" not in without.all_text()


def test_a_run_without_completions_says_so(tmp_path: Path) -> None:
    text = page_of(tmp_path, make_run(tmp_path / "a", rows())).all_text()
    assert "No completions were saved." in text


def test_configuration_and_environment_are_shown_or_their_absence_noted(tmp_path: Path) -> None:
    full, bare = make_run(tmp_path / "a", rows()), make_run(tmp_path / "b", rows())
    (bare / "config.toml").write_text("not = = toml")
    (bare / "environment.json").unlink()
    page = page_of(tmp_path, full, bare)
    assert ("th", "gpu.name") in page.text
    assert ("td", "some device") in page.text
    remarks = [data for tag, data in page.text if tag == "span"]
    assert "unreadable config.toml" in remarks
    assert "no environment.json" in remarks
    assert ("pre", "not = = toml") in page.text


def test_same_folder_names_are_told_apart_by_their_parents(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / part, rows()) for part in ("x/run", "y/run", "y/other")]
    runs = read_runs([*folders, tmp_path / "y" / ".." / "y" / "run"])
    assert [run.name for run in runs] == ["x/run", "y/run", "other"]


def test_a_report_of_several_runs_has_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folders, expected in (
        (["runs/a"], "runs/a/report.html"),
        (["runs/a", "runs/b"], "runs/report-a-b.html"),
        (["runs/a", "runs/a/"], "runs/a/report.html"),
        (["x/run", "y/run"], "x/report-x-run-y-run.html"),
        (["runs/" + letter * 60 for letter in "abc"], f"runs/report-{'a' * 60}-and-2-more.html"),
        ([".", "b"], f"{tmp_path.parent}/report-{tmp_path.name}-b.html"),
    ):
        assert default_output(list(map(Path, folders))) == Path(expected)


def test_unusable_input_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere does not exist: check the path"):
        write_report([tmp_path / "nowhere"], tmp_path / "r.html")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty has no metrics\.jsonl: give a folder"):
        write_report([tmp_path / "empty"], tmp_path / "r.html")
    with pytest.raises(ConfigError, match="at least one folder"):
        write_report([], tmp_path / "r.html")
    run = make_run(tmp_path / "a", rows())
    with pytest.raises(ConfigError, match="which is a folder"):
        write_report([run], tmp_path)
    assert not (tmp_path / "r.html").exists()
