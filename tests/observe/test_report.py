"""The run report: what it shows, what it leaves out, and that run text stays text."""

import json
import math
import re
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from trustbatch.errors import ConfigError
from trustbatch.observe import charts
from trustbatch.observe.report import final_mean, write_report
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

    def lines(self, metric: str, kind: str = "line") -> list[str]:
        return [
            str(values["d"])
            for tag, values, place in self.elements
            if tag == "path" and place == metric and values.get("class") == kind
        ]

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
    assert len(page.lines("reward/mean", "ghost")) == 3
    assert len(page.lines("entropy")) == 2
    assert len(page.lines("weight/cap")) == 1
    assert "kl/behavior" not in {metric for _, _, metric in page.elements}
    assert "Not recorded by any of these runs: Ratio quantiles, KL to the behavior" in (
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
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    )
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
    assert tags.count("script") == 2  # the data of the completions, and the page's own
    assert "img" not in tags
    attributes = {key for _, values, _ in page.elements for key in values}
    assert not {key for key in attributes if key.startswith("on") or key == "src"}
    assert page.all_text().count(evil) >= 4
    (data,) = [data for tag, data in page.text if tag == "script" and data.startswith("{")]
    assert json.loads(data)["columns"]["completion"] == [evil, evil]
    assert name in page.all_text()
    assert f"Ratio quantiles of {name}" in [v.get("aria-label") for _, v, _ in page.elements]


def test_log_axis_has_powers_of_ten_and_a_floor_below_the_data() -> None:
    axis = charts.log_axis([0.003, 0.5, 0.0, -1e-9, math.nan])
    assert axis.clamped
    assert [tick.label for tick in axis.ticks] == ["≤10⁻⁴", "10⁻³", "10⁻²", "10⁻¹", "10⁰"]
    assert [tick.value for tick in axis.ticks] == pytest.approx([1e-4, 1e-3, 1e-2, 0.1, 1.0])
    assert axis.fraction(0.0) == axis.fraction(-5.0) == 0.0
    assert axis.fraction(0.01) == pytest.approx(0.5)


def test_log_axis_of_few_or_many_decades_keeps_a_handful_of_ticks() -> None:
    assert [tick.label for tick in charts.log_axis([0.9, 1.1]).ticks] == ["0.5", "1", "2"]
    assert [tick.label for tick in charts.log_axis([1.0]).ticks] == ["0.5", "1", "2"]
    wide = charts.log_axis([1e-30, 1.0])
    assert wide.low == pytest.approx(1e-16)
    assert 4 <= len(wide.ticks) <= 8
    assert charts.log_axis([0.0]).ticks[0].label == "≤10⁻¹⁶"


def test_one_minus_ess_is_drawn_on_a_log_axis_with_zeros_on_its_floor(tmp_path: Path) -> None:
    data = rows()
    data[5]["one_minus_ess"] = 0.0
    page = page_of(tmp_path, make_run(tmp_path / "a", data))
    chart = next(v for tag, v, m in page.elements if v.get("class") == "chart" and "ess" in m)
    bottom = str(chart["data-y"]).split()[0]
    assert chart["data-log"] == chart["data-clamped"] == "1"
    heights = re.findall(r",([\d.]+)", page.lines("one_minus_ess", "ghost")[0])
    assert [place for place, height in enumerate(heights) if height == bottom] == [5]


def test_one_minus_ess_falls_back_to_ess(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", [{"step": 1, "ess": 0.75}])
    assert read_runs([run])[0].series("one_minus_ess") == ([1.0], [0.25])


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.13, 0.87], ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([-3, 12], ["-5", "0", "5", "10", "15"]),
        ([0.0, 0.0], ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([100, 2400], ["0", "500", "1,000", "1,500", "2,000", "2,500"]),
    ],
)
def test_linear_axis_has_nice_numbers(values: list[float], labels: list[str]) -> None:
    axis = charts.linear_axis(values)
    assert [tick.label for tick in axis.ticks] == labels
    assert axis.low <= min(values) <= max(values) <= axis.high


@pytest.mark.parametrize("value", [1e16, 1e299, 5e-324, -7.0, 1e-12])
def test_constant_curves_of_any_size_get_an_axis_around_them(value: float) -> None:
    axis = charts.linear_axis([value, value])
    assert axis.low < value < axis.high
    assert len({tick.label for tick in axis.ticks}) == len(axis.ticks) >= 2


def test_gaps_split_the_path_and_lone_points_stay_visible() -> None:
    values = [1.0, 2.0, math.nan, 3.0, math.inf, 4.0, 5.0]
    curve = charts.Curve(0, "a", list(range(7)), values)
    x, y = charts.step_axis(curve.steps), charts.linear_axis(values)
    drawn = charts.line_chart([curve], x, y, charts.Frame(400, 200), "t")
    (path,) = re.findall(r'<path class="line" d="([^"]*)"', drawn)
    assert path.count("M") == 3
    assert path.count("h.1") == 1
    assert len(re.findall(r"[\d.]+,[\d.]+", path)) == 5


def test_missing_steps_are_bridged_but_recorded_nothing_is_a_gap(tmp_path: Path) -> None:
    data = [{"step": 1, "entropy": 1.0}, {"step": 2}, {"step": 3, "entropy": float("nan")}]
    run = read_runs([make_run(tmp_path / "a", [*data, {"step": 4, "entropy": "high"}])])[0]
    steps, values = run.series("entropy")
    assert steps == [1.0, 3.0, 4.0]
    assert values[0] == 1.0
    assert math.isnan(values[1])
    assert math.isnan(values[2])


def test_thinning_keeps_ends_and_spikes() -> None:
    steps = [float(step) for step in range(10_000)]
    values = [math.sin(step / 500) for step in steps]
    values[4321], values[777] = 99.0, -99.0
    kept_steps, kept = charts.thin(steps, values)
    assert len(kept) <= 400
    assert kept_steps == sorted(kept_steps)
    assert (kept_steps[0], kept_steps[-1]) == (0.0, 9999.0)
    assert {99.0, -99.0} <= set(kept)


def test_long_runs_are_thinned_in_the_page(tmp_path: Path) -> None:
    page = page_of(tmp_path, make_run(tmp_path / "a", rows(3000, entropy=1.0, **QUANTILES)))
    paths = [str(values["d"]) for tag, values, _ in page.elements if tag == "path"]
    assert len(paths) >= 9
    assert max(len(re.findall(r"[\d.]+,[\d.]+", path)) for path in paths) <= 400


def test_smoothing_averages_neighbors_and_keeps_gaps() -> None:
    assert charts.smooth([1.0, 5.0]) == [1.0, 5.0]
    smoothed = charts.smooth([0.0, 3.0, 0.0, math.nan, 0.0, 4.0, 0.0, 0.0])
    assert math.isnan(smoothed[3])
    assert smoothed[1] == pytest.approx(1.0)
    assert smoothed[4] == pytest.approx(2.0)


def test_ratio_quantiles_have_one_panel_per_run_that_recorded_them(tmp_path: Path) -> None:
    page = page_of(
        tmp_path,
        make_run(tmp_path / "a", rows(**QUANTILES)),
        make_run(tmp_path / "b", rows(**{"ratio/p50": 1.0})),
        make_run(tmp_path / "c", rows(**QUANTILES)),
    )
    panels = [
        values["data-run"] for _, values, _ in page.elements if values.get("class") == "panel"
    ]
    assert panels == ["0", "2"]
    assert [len(page.lines("ratio", kind)) for kind in ("outer", "inner", "line")] == [2, 2, 2]
    labels = [data for tag, data in page.text if tag == "text" and data.startswith("10")]
    assert {"10⁻²", "10⁰", "10²"} <= set(labels)


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
    for metric in ("rollout/completions/lag_", "one_minus_ess/lag_"):
        (chart,) = [v for tag, v, m in page.elements if v.get("class") == "chart" and m == metric]
        assert chart["data-x-name"] == "lag"
        assert str(chart["data-x"]).split()[2:] == ["0.0", "3.0"]
        assert len(page.lines(metric)) == 1
    # a dot for each of four lags
    (dots,) = page.lines("rollout/completions/lag_", "dots")
    assert (dots.count("M"), dots.count("h.1")) == (4, 4)
    for metric in ("rollout/lag_mean", "time/trainer_busy_share", "cluster/buffered_batches"):
        assert len(page.lines(metric)) == 1
    assert "lag" in [data for tag, data in page.text if tag == "text"]


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
    assert [tag for tag, _, _ in page.elements].count("script") == 1
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
    assert not [tag for tag, _, _ in page.elements if tag == "path"]


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


def test_more_runs_than_colors_get_dashes_and_folded_legends(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"run{index}", rows(entropy=1.0)) for index in range(24)]
    page = page_of(tmp_path, *folders)
    styles = [
        values["class"]
        for tag, values, metric in page.elements
        if tag == "g" and metric == "entropy"
    ]
    assert len(set(styles)) == 24
    folds = [m for _, values, m in page.elements if values.get("class") == "fold"]
    assert folds == ["entropy"]
    listed = [v for tag, v, m in page.elements if tag == "li" and m == "reward/mean"]
    assert [item["title"] for item in listed] == [f"run{index}" for index in range(24)]


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
