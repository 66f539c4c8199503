"""Charts: the data that a page holds for them, and what a browser draws and does with it."""

import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.chromium import PROGRAM, OpenPage, chromium

from trustbatch.observe.charts import (
    ChartSpec,
    Curve,
    Look,
    chart_data,
    chart_figure,
    clock_data,
    embedded_json,
    series_data,
)
from trustbatch.observe.page_parts import html_page
from trustbatch.observe.report import write_report

SPEC = ChartSpec("reward/mean", "Reward", "How to read it.")
EVIL = "</script><img src=x onerror=alert(1)>\u2028<script>alert(2)</script>"


# data


def test_short_lines_are_kept_as_they_are() -> None:
    data = series_data(Curve(2, "a", [1.0, 2.0, 3.0], [0.5, math.nan, 0.25]))
    assert data == {"line": 2, "run": 2, "name": "a", "x": [1, 2, 3], "y": [0.5, None, 0.25]}


def test_long_lines_keep_ends_means_and_spikes() -> None:
    steps = [float(step) for step in range(10_000)]
    values = [1.0] * 10_000
    values[4321], values[777], values[9990] = 99.0, -99.0, math.nan
    data = series_data(Curve(0, "a", steps, values), limit=500)
    assert len(data["x"]) == len(data["y"]) == 500
    assert (data["x"][0], data["x"][-1]) == (0, 9999)
    low, high = data["spread"]
    # 20 steps for each point: 4321 is in the one of 4320 to 4339, with a mean of 118 / 20
    place = 4321 // 20
    assert (low[place], data["y"][place], high[place]) == (1, 5.9, 99)
    assert min(low) == -99.0
    assert data["y"][-1] == 1.0


def test_bands_of_long_lines_are_widened_and_gaps_are_of_both_ends() -> None:
    low, high = [0.0] * 1000, [1.0] * 1000
    low[500], high[501], low[0] = -5.0, 7.0, math.nan
    curve = Curve(0, "a", list(range(1000)), [0.5] * 1000, bands=[(low, high)])
    ((below, above),) = series_data(curve, limit=100)["bands"]
    assert (below[50], above[50]) == (-5, 7)
    ((below, above),) = series_data(curve, limit=1000)["bands"]
    assert (below[0], above[0], below[1], above[1]) == (None, None, 0, 1)


def test_a_faint_line_keeps_its_peaks() -> None:
    ghost = [1.0] * 1000
    ghost[321] = 9.0
    data = series_data(Curve(0, "a", list(range(1000)), [0.5] * 1000, ghost), limit=100)
    assert data["faint"][32] == 9


def test_points_are_shared_by_the_lines_of_a_chart() -> None:
    steps = list(range(10_000))
    curves = [Curve(line, f"run {line}", steps, steps) for line in range(20)]
    data = chart_data(SPEC, curves)
    assert {len(series["x"]) for series in data["series"]} == {250}
    assert len(json.dumps(data)) < 300_000


def test_clocks_add_up_tokens_and_hours() -> None:
    assert clock_data([1, 2, 3], [100, math.nan, 300], [1800, 1800, 3600]) == {
        "step": [1, 2, 3],
        "tokens": [100, 100, 400],
        "hours": [0.5, 1, 2],
    }
    assert clock_data([1, 2], [0, 0], [36, 36]) == {"step": [1, 2], "hours": [0.01, 0.02]}
    assert clock_data([], [], []) == {}
    long = clock_data(list(range(5000)), [1.0] * 5000, [0.0] * 5000)
    assert len(long["step"]) == len(long["tokens"]) == 200
    assert (long["step"][0], long["step"][-1], long["tokens"][-1]) == (0, 4999, 5000)


def test_no_text_ends_the_element_of_its_data() -> None:
    written = embedded_json({"name": EVIL, "half": "\ud800"}, "chart-data")
    inner = written.removeprefix('<script type="application/json" class="chart-data">')
    inner = inner.removesuffix("</script>")
    assert not set("<>&\u2028\u2029\ud800") & set(inner)
    assert json.loads(inner) == {"name": EVIL, "half": "\ud800"}
    with pytest.raises(ValueError, match="not JSON compliant"):
        embedded_json(math.nan, "chart-data")


# in a browser

NEEDS_BROWSER = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenPage]:
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        yield page


def show(page: OpenPage, folder: Path, *figures: str, **how: Any) -> None:
    page.complaints.clear(), page.requests.clear(), page.dialogs.clear()
    file = folder / "page.html"
    body = f'<div class="charts">{"".join(figures)}</div>'
    file.write_text(html_page(title="t", header="", sections=[body]), encoding="utf-8")
    page.load(file, **how)
    page.wait_for("!Charts.isBusy()")


def figure_of(*lines: list[float], **look: Any) -> str:
    curves = [
        Curve(place, f"run-{place}", list(range(1, len(values) + 1)), values)
        for place, values in enumerate(lines)
    ]
    return chart_figure(SPEC, curves, Look(**look))


def ticks(page: OpenPage, axis: str) -> list[str]:
    return page.evaluate(
        f"[...document.querySelectorAll('.tick.{axis}')].map(each => each.textContent)"
    )


def paths(page: OpenPage, kind: str = "line") -> list[str]:
    return page.evaluate(
        f"[...document.querySelectorAll('path.{kind}')].map(each => each.getAttribute('d'))"
    )


def inside(page: OpenPage, across: float, up: float) -> tuple[float, float]:
    """A place in the first chart, as parts of its frame."""
    x, y = page.evaluate(
        """(() => {
          const chart = document.querySelector('svg.chart'), box = chart.getBoundingClientRect();
          const lines = [...chart.querySelectorAll('.grid')];
          const at = (name, line) => Number(line.getAttribute(name));
          const [bottom, top] = [at('y1', lines[0]), at('y1', lines.at(-1))];
          const [left, right] = [at('x1', lines[0]), at('x2', lines[0])];
          return [[box.left + left, box.left + right], [box.top + bottom, box.top + top]];
        })()"""
    )
    return x[0] + across * (x[1] - x[0]), y[0] + up * (y[1] - y[0])


def press(page: OpenPage, selector: str) -> None:
    page.evaluate(f"document.querySelector({json.dumps(selector)}).click()")
    page.wait_for("!Charts.isBusy()")


def assert_quiet(page: OpenPage) -> None:
    assert (page.complaints, page.dialogs) == ([], [])
    assert all(
        address.startswith(("file:", "data:image/svg", "blob:")) for address in page.requests
    )


@NEEDS_BROWSER
def test_axes_have_nice_numbers(browser: OpenPage, tmp_path: Path) -> None:
    show(browser, tmp_path)
    cases: dict[str, list[str]] = {
        "Axes.linear([0.13, 0.87])": ["0", "0.2", "0.4", "0.6", "0.8", "1.0"],
        "Axes.linear([-3, 12])": ["-5", "0", "5", "10", "15"],
        "Axes.linear([0, 0])": ["0", "0.2", "0.4", "0.6", "0.8", "1.0"],
        "Axes.linear([100, 2400])": ["0", "500", "1,000", "1,500", "2,000", "2,500"],
        "Axes.linear([3, 5], {zero: true})": ["0", "1", "2", "3", "4", "5"],
        "Axes.log([0.003, 0.5, 0, -1e-9])": ["≤10⁻⁴", "10⁻³", "10⁻²", "10⁻¹", "10⁰"],
        "Axes.log([0.9, 1.1])": ["0.5", "1", "2"],
        "Axes.log([1])": ["0.5", "1", "2"],
        "Axes.doubling(6)": ["1", "2", "4", "6"],
        "Axes.exact([1, 20])": ["5", "10", "15", "20"],
        "Axes.exact([7, 7])": ["7.00"],
        "Axes.exact([0, 3e6])": ["0", "500,000", "1M", "1.5M", "2M", "2.5M", "3M"],
    }
    for expression, labels in cases.items():
        found = browser.evaluate(f"{expression}.ticks.map(tick => tick.label)")
        assert found == labels, expression
    assert browser.evaluate("Axes.log([0]).ticks[0].label") == "≤10⁻¹⁶"
    assert browser.evaluate("Axes.log([1e-4, 1, 0]).fraction(-5)") == 0
    # a constant of any size has an axis around it, whose ticks differ
    for value in ("1e16", "1e299", "5e-324", "-7", "1e-12"):
        low, high, labels = browser.evaluate(
            f"(a => [a.low, a.high, a.ticks.map(t => t.label)])(Axes.linear([{value}, {value}]))"
        )
        assert low < float(value) < high
        assert len(set(labels)) == len(labels) >= 2, labels


@NEEDS_BROWSER
def test_lines_have_gaps_dots_and_faint_values(browser: OpenPage, tmp_path: Path) -> None:
    show(browser, tmp_path, figure_of([1.0, 2.0, math.nan, 3.0, math.nan, 4.0, 5.0, 6.0]))
    (line,) = paths(browser)
    # three parts, of which the one in the middle is a lone point
    assert (line.count("M"), line.count("h.1")) == (3, 1)
    assert len(re.findall(r"[\d.]+,[\d.]+", line)) == 6
    assert len(paths(browser, "faint")) == 1
    show(browser, tmp_path, figure_of([0.5, 0.25, 0.125], x="lag", marked=True))
    (dots,) = paths(browser, "dots")
    assert dots.count("h.1") == 3
    assert_quiet(browser)


@NEEDS_BROWSER
def test_smoothing_is_a_centered_mean_that_keeps_gaps(browser: OpenPage, tmp_path: Path) -> None:
    show(browser, tmp_path)
    smoothed = browser.evaluate("Lines.smooth([0, 3, 0, null, 0, 4, 0, 0], 0.05)")
    assert smoothed == pytest.approx([1.5, 1, 1.5, None, 2, 4 / 3, 4 / 3, 0])
    assert browser.evaluate("Lines.smooth([1, 5], 0.05)") == [1, 5]
    # a tenth of 40 points: two neighbors on either side
    (middle,) = browser.evaluate(
        "Lines.smooth(Array.from({length: 40}, (_, i) => i === 20 ? 10 : 0), 0.1).slice(22, 23)"
    )
    assert middle == 2.0
    show(browser, tmp_path, figure_of([0.0, 1.0] * 20))
    before = paths(browser)
    browser.evaluate(
        "(slider => { slider.value = 0; slider.dispatchEvent(new Event('input')); })"
        "(document.querySelector('.smoothing input'))"
    )
    browser.wait_for("!Charts.isBusy()")
    assert paths(browser) != before
    assert paths(browser, "faint") == []
    assert browser.evaluate("document.querySelector('.smoothing output').textContent") == "off"


@NEEDS_BROWSER
def test_a_drag_zooms_and_a_double_click_resets(browser: OpenPage, tmp_path: Path) -> None:
    show(browser, tmp_path, figure_of([step / 100 for step in range(1, 101)]))
    whole_x, whole_y = ticks(browser, "x"), ticks(browser, "y")
    assert (whole_x[-1], whole_y[-1]) == ("100", "1.0")
    browser.drag(inside(browser, 0.2, 0.5), inside(browser, 0.4, 0.52))
    # from step 20.8 to 40.6, and the values fit
    assert ticks(browser, "x")[0] == "25"
    assert ticks(browser, "x")[-1] == "40"
    assert float(ticks(browser, "y")[0]) >= 0.2
    assert float(ticks(browser, "y")[-1]) <= 0.45
    assert browser.evaluate(
        "getComputedStyle(document.querySelector('.tools button')).display"
    ) != ("none")
    browser.click(*inside(browser, 0.5, 0.5), times=2)
    assert (ticks(browser, "x"), ticks(browser, "y")) == (whole_x, whole_y)
    # a box selects both axes
    browser.drag(inside(browser, 0.1, 0.9), inside(browser, 0.9, 0.5))
    assert 0.5 <= float(ticks(browser, "y")[0]) < float(ticks(browser, "y")[-1]) <= 0.91
    assert_quiet(browser)


@NEEDS_BROWSER
def test_values_under_the_pointer(browser: OpenPage, tmp_path: Path) -> None:
    show(browser, tmp_path, figure_of([0.25] * 11, [0.75] * 11))
    browser.point_at(*inside(browser, 0.5, 0.5))
    tip = browser.evaluate("document.querySelector('.tip').innerText")
    assert tip.split("\n")[0].startswith("step 6")
    assert re.sub(r"\s+", " ", tip).endswith("run-1 0.75 run-0 0.25")


@NEEDS_BROWSER
def test_log_axes_can_be_chosen(browser: OpenPage, tmp_path: Path) -> None:
    show(browser, tmp_path, figure_of([0.001, 0.01, 0.1, 1.0]))
    assert ticks(browser, "y")[0] == "0"
    press(browser, ".tools button:nth-child(2)")
    assert ticks(browser, "y") == ["10⁻³", "10⁻²", "10⁻¹", "10⁰"]
    assert browser.evaluate("document.querySelector('.tools').innerText").startswith("linear")
    press(browser, ".tools button:nth-child(2)")
    assert ticks(browser, "y")[0] == "0"


@NEEDS_BROWSER
def test_equal_lines_are_said_and_seen(browser: OpenPage, tmp_path: Path) -> None:
    show(browser, tmp_path, figure_of([1.0, 2.0], [1.0, 2.0], [1.0, 2.5]))
    names = browser.evaluate("document.querySelector('.legend').innerText")
    assert re.sub(r"\s+", " ", names) == "run-0 run-1 same as run-0 run-2"
    dashes = browser.evaluate(
        "[...document.querySelectorAll('path.line')].map(l => getComputedStyle(l))"
        ".map(s => [s.strokeDasharray, s.strokeDashoffset])"
    )
    assert dashes == [["7px, 7px", "0px"], ["7px, 7px", "-7px"], ["none", "0px"]]


@NEEDS_BROWSER
def test_legends_switch_isolate_and_search(browser: OpenPage, tmp_path: Path) -> None:
    figures = [figure_of(*[[float(place), place + 1.0] for place in range(12)], lead=True)] * 2
    show(browser, tmp_path, *figures)
    assert len(paths(browser)) == 24
    press(browser, ".legend li")
    assert len(paths(browser)) == 22
    assert (
        browser.evaluate("document.querySelectorAll('.legend li[aria-pressed=\"false\"]').length")
        == 2
    )
    press(browser, ".toolbar button")
    assert len(paths(browser)) == 24
    place = browser.evaluate(
        "(b => [b.left + 30, b.top + 8])"
        "(document.querySelectorAll('.legend li')[3].getBoundingClientRect())"
    )
    browser.click(*place, times=2)
    browser.wait_for("!Charts.isBusy()")
    assert len(paths(browser)) == 2
    assert [*browser.evaluate("[...Charts.view.hidden]")] == [*range(3), *range(4, 12)]
    press(browser, ".toolbar button")
    browser.evaluate(
        "(box => { box.value = 'RUN-1'; box.dispatchEvent(new Event('input')); })"
        "(document.querySelector('.search input'))"
    )
    browser.wait_for("!Charts.isBusy()")
    assert len(paths(browser)) == 2 * 3  # run-1, run-10 and run-11
    assert_quiet(browser)


@NEEDS_BROWSER
def test_other_horizontal_axes(browser: OpenPage, tmp_path: Path) -> None:
    clocks = [
        {"step": [1, 10], "tokens": [100, 1000], "hours": [0.5, 5]},
        {"step": [1, 10], "tokens": [200, 2000]},
    ]
    show(
        browser,
        tmp_path,
        embedded_json(clocks, "clocks", "chart-clocks"),
        figure_of([1.0] * 10, [2.0] * 10),
    )
    assert ticks(browser, "x")[-1] == "10"
    choose = (
        "(s => {{ s.value = '{}'; s.dispatchEvent(new Event('change')); }})"
        "(document.querySelector('.toolbar select'))"
    )
    browser.evaluate(choose.format("tokens"))
    browser.wait_for("!Charts.isBusy()")
    assert ticks(browser, "x")[-1] == "2,000"
    assert browser.evaluate("document.querySelector('text.axis').textContent") == "tokens"
    browser.evaluate(choose.format("hours"))
    browser.wait_for("!Charts.isBusy()")
    assert ticks(browser, "x") == ["2", "4"]
    assert len(paths(browser)) == 1
    names = browser.evaluate("document.querySelector('.legend').innerText")
    assert re.sub(r"\s+", " ", names) == "run-0 run-1 no hours"
    halfway = browser.evaluate("Lines.onClock([1, 5.5, 10, 20], Charts.clocks.get(0), 'tokens')")
    assert halfway == [100, 550, 1000, 1000]


@NEEDS_BROWSER
def test_numbers_and_pictures_can_be_saved(browser: OpenPage, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    browser.save_downloads(saved)
    evil = Curve(1, '=cmd|"x",1', [1, 2], [0.25, math.nan], bands=[([0.125, 0.5], [0.5, 1.0])])
    plain = Curve(0, "a", [1, 2], [0.5, 0.75])
    clocks = [{"step": [1, 2], "tokens": [100, 200]}]
    figure = chart_figure(ChartSpec("key", "A/../title: <b>", ""), [plain, evil])
    show(browser, tmp_path, embedded_json(clocks, "clocks", "chart-clocks"), figure)
    press(browser, ".tools button:nth-child(3)")
    press(browser, ".tools button:nth-child(4)")
    csv, png = saved / "A-..-title-b.csv", saved / "A-..-title-b.png"
    deadline = time.monotonic() + 30
    while not (csv.exists() and png.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert csv.read_text() == (
        "run,step,tokens,key,low,high\n"
        "a,1,100,0.5,,\n"
        "a,2,200,0.75,,\n"
        '"\'=cmd|""x"",1",1,,0.25,0.125,0.5\n'
        '"\'=cmd|""x"",1",2,,,0.5,1\n'
    )
    picture = png.read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width = int.from_bytes(picture[16:20])
    assert width > 2 * 300
    assert len(picture) > 5000
    assert_quiet(browser)


@NEEDS_BROWSER
def test_hostile_runs_in_a_browser(browser: OpenPage, tmp_path: Path) -> None:
    name = "'\"><img src=x onerror=alert(3)><script>alert(4)<"
    run = tmp_path / name
    (run / "rollouts").mkdir(parents=True)
    rows = [
        {"step": step, "reward/mean": 0.5, f"eval/{EVIL}/pass@1": 0.5, "ledger/lag/share": 1.0}
        | {"ledger/lag/one_minus_ess": 0.25, f"ledger/position/{EVIL}/one_minus_ess": 0.5}
        for step in (1, 2)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "config.toml").write_text(f"[objective]\nname = '''{EVIL}'''\n")
    sample = json.dumps({"step": 1, "prompt": EVIL, "completion": EVIL, "answer": EVIL})
    (run / "rollouts" / "step-000001.jsonl").write_text(sample + "\n")
    browser.complaints.clear(), browser.requests.clear()
    for width, dark in ((1300, True), (420, False)):
        browser.load(write_report([run], tmp_path / "report.html"), width=width, dark=dark)
        browser.wait_for("!Charts.isBusy()")
        browser.point_at(*inside(browser, 0.0, 0.5))
        assert browser.evaluate("document.querySelector('.tip').innerText").count(name) == 1
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert browser.evaluate("document.images.length") == 0
    assert_quiet(browser)
    # a script that got into a page in spite of all may not run
    page = (tmp_path / "report.html").read_text()
    (tmp_path / "bad.html").write_text(page.replace("<main>", "<main><script>alert(5)</script>"))
    browser.load(tmp_path / "bad.html")
    assert browser.dialogs == []
    assert any("Content Security Policy" in each for each in browser.complaints)
