"""The completion viewer in a browser: table, tokens, groups, hostile text and thousands of rows."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.chromium import PROGRAM, OpenPage, chromium

from trustbatch.observe.page_parts import DASH
from trustbatch.observe.report import write_report

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")

TIMES = "\N{MULTIPLICATION SIGN}"
EVIL = '</script><img src=x onerror=alert(1)><b>"&amp;'
ODD = "a\u2028b\u202ec\x00d\ud800e\u200bf\x7fg"
SHOWN = "a⟨U+2028⟩b⟨U+202E⟩c␀d⟨U+D800⟩e⟨U+200B⟩f␡g"


def record(step: int, prompt: str, sample: int, **more: Any) -> dict[str, Any]:
    found = {"step": step, "prompt_id": prompt, "sample": sample, "prompt": f"What is {prompt}?"}
    found |= {"completion": f"It is {sample}.", "answer": "1", "reward": float(sample % 2)}
    found |= {"advantage": sample % 2 - 0.5, "finish_reason": "stop", "tokens": 10 + sample}
    found |= {"one_minus_ess": 0.01 * sample, "mean_behavior_logp": -0.5, "policy": "models/tiny"}
    found |= {"version": step, "engine": "native", "precision": "float32", "temperature": 1.0}
    return found | {"top_p": 1.0, "top_k": 0, "logprob_mode": "processed"} | more


def with_tokens(row: dict[str, Any], tokens: list[str], ratios: list[float]) -> dict[str, Any]:
    lists: dict[str, Any] = {"token": tokens, "token_id": list(range(len(tokens)))}
    lists |= {"behavior_logp": [-0.5] * len(tokens), "policy_logp": [-0.25] * len(tokens)}
    lists |= {"anchor_logp": [-0.75] * len(tokens), "ratio": [*ratios], "kl": [0.125] * len(tokens)}
    lists |= {"weight": [0.9, *[0.0] * (len(tokens) - 1)], "entropy": [1.5] * len(tokens)}
    seen = f"<|user|>{row['prompt']}<|assistant|>"
    return row | lists | {"model_prompt": seen, "completion": "".join(tokens)}


def make_run(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "rollouts").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    for step in {row["step"] for row in rows}:
        lines = [json.dumps(row) + "\n" for row in rows if row["step"] == step]
        (folder / "rollouts" / f"step-{step:06d}.jsonl").write_text("".join(lines))
    return folder


def example(folder: Path) -> Path:
    """A run with token lists, in part of an environment, and one from before there were any."""
    tokens = ["It", " is", "\n", "  ", "<|end|>"]
    ratios = [2.0, 0.5, 1.0, 1.0, 1.0]
    first = [with_tokens(record(1, "one", sample), tokens, ratios) for sample in range(3)]
    for key in ("behavior_logp", "policy_logp", "ratio", "weight", "kl", "entropy"):
        first[1][key][1] = None
    first[2] |= {"token_version": [1, 1, 2, 2, 2], "finish_reason": "length"}
    plain = record(2, "two", 0, reward=None, ungraded="failed: no module")
    turns = [{"role": "policy", "text": "Ask"}, {"role": "environment", "text": "Warmer"}]
    episode = record(2, "two", 1, completion="AskWarmer", turns=turns, environment_tokens=1)
    report = folder / "report.html"
    runs = [make_run(folder / "new", [*first, plain]), make_run(folder / "old", [episode])]
    return write_report(runs, report)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenPage]:
    with chromium(tmp_path_factory.mktemp("browser") / "profile") as page:
        yield page


@pytest.fixture
def page(browser: OpenPage, tmp_path: Path) -> Iterator[OpenPage]:
    """The example; the page may not complain and asks for nothing but itself."""
    file = example(tmp_path)
    for log in (browser.complaints, browser.requests, browser.dialogs):
        log.clear()
    browser.load(file)
    yield browser
    browser.evaluate("0")  # what the page has said so far is read
    assert (browser.complaints, browser.dialogs) == ([], [])
    assert browser.requests == [file.as_uri()]


def completions(page: OpenPage) -> list[str]:
    """Prompt and sample of the rows of the table."""
    return page.evaluate(
        "[...document.querySelectorAll('.completions tbody tr')].map(row => "
        "[...row.querySelectorAll('.text')].map(cell => cell.innerText).join(' '))"
    )


def enter(page: OpenPage, name: str, value: str) -> None:
    page.evaluate(
        f"(() => {{ const field = document.querySelector('[name=\"{name}\"]');"
        f"field.value = {json.dumps(value)};"
        "field.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def text_of(page: OpenPage, selector: str) -> str:
    return page.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")


def open_row(page: OpenPage, place: int) -> None:
    page.evaluate(f"document.querySelectorAll('.completions tbody tr')[{place}].click()")
    settle(page)


def settle(page: OpenPage) -> None:
    """Token lists are unpacked in the background, and events of forms and dialogs come later."""
    page.evaluate(
        "new Promise(done => { const look = () => setTimeout("
        "document.querySelector('.panes[aria-busy=true]') ? look : done, 30); look(); })"
    )


def sides(page: OpenPage) -> list[list[str]]:
    """Of each token, which color it has and how much of it."""
    return page.evaluate(
        "[...document.querySelectorAll('.tokens .token')].map("
        "token => [token.dataset.side, token.style.getPropertyValue('--share')])"
    )


def choose(page: OpenPage, mode: str) -> None:
    page.evaluate(f"document.querySelector('.modes [value={mode}]').click()")


def test_filters_and_search(page: OpenPage) -> None:
    assert text_of(page, ".count") == "5 of 5 completions"
    assert len(completions(page)) == 5
    enter(page, "text", "AskW")
    assert completions(page) == ["What is two? AskWarmer"]
    assert text_of(page, "td mark") == "AskW"
    enter(page, "text", "WHAT IS TWO")
    assert len(completions(page)) == 2
    enter(page, "text", "nowhere")
    assert "No completion passes" in text_of(page, ".completions tbody")
    enter(page, "text", "")
    enter(page, "prompt", "one")
    assert text_of(page, ".count") == "3 of 5 completions"
    enter(page, "tokens.low", "11")
    enter(page, "tokens.high", "11")
    assert text_of(page, ".count") == "1 of 5 completions"
    page.evaluate("document.querySelector('.filters [type=reset]').click()")
    settle(page)
    assert text_of(page, ".count") == "5 of 5 completions"
    # of samples 0, 1 and 2 of a prompt, sample 1 alone has a reward; one is not graded
    for name, value, count in (
        ("reward.low", "1", 2),
        ("reward.high", "0.5", 2),
        ("one_minus_ess.low", "0.02", 1),
        ("step.high", "1", 3),
        ("runName", "1", 1),
        ("finish_reason", "0", 1),
        ("origin", "1", 2),
    ):
        enter(page, name, value)
        assert text_of(page, ".count") == f"{count} of 5 completions", name
        enter(page, name, "")


def test_columns_sort_up_down_and_as_recorded(page: OpenPage) -> None:
    rewards = (
        "[...document.querySelectorAll('.completions tbody tr')]"
        ".map(row => row.querySelectorAll('.number')[1].innerText)"
    )
    click = "document.querySelector('[data-key=reward] button').click()"
    sort = "document.querySelector('[data-key=reward]').getAttribute('aria-sort')"
    recorded = ["0", "1", "0", DASH, "1"]
    orders = [("ascending", ["0", "0", "1", "1", DASH]), ("descending", ["1", "1", "0", "0", DASH])]
    assert page.evaluate(rewards) == recorded
    for direction, expected in (*orders, ("none", recorded)):
        page.evaluate(click)
        assert page.evaluate(sort) == direction
        assert page.evaluate(rewards) == expected


def test_a_completion_opens_as_colored_tokens(page: OpenPage) -> None:
    open_row(page, 0)
    assert text_of(page, ".dialog-bar h3") == "Step 1 · one · sample 0"
    assert text_of(page, ".prompt pre") == "<|user|>What is one?<|assistant|>"
    assert text_of(page, ".facts").endswith("Run\nnew")
    assert text_of(page, ".tokens") == "It is⏎\n··<|end|>"
    # the largest log-ratios are log 2 and -log 2: full color on both sides
    full = [["above", "1.000"], ["below", "1.000"], *[["above", "0.000"]] * 3]
    assert sides(page) == full
    assert text_of(page, ".scale-ends").split("\n") == ["≤ 0.5", "1", "≥ 2"]
    choose(page, "weight")
    assert sides(page)[:2] == [["amount", "0.900"], ["amount", "0.000"]]
    # 0.9 times an advantage of -0.5 is -0.45, on a scale to the next round number, 0.5
    choose(page, "push")
    assert sides(page)[:2] == [["below", "0.900"], ["above", "0.000"]]
    assert text_of(page, ".scale-ends").split("\n") == ["≤ -0.5", "0", "≥ 0.5"]
    choose(page, "entropy")
    assert sides(page) == [["amount", "1.000"]] * 5
    assert text_of(page, ".scale-ends").split("\n") == ["0", "≥ 1.5"]
    choose(page, "plain")
    assert {side for side, _ in sides(page)} == {""}
    # the color stays for the next completion, whose tokens an environment has said in part
    choose(page, "kl")
    page.press("j")
    settle(page)
    assert text_of(page, ".dialog-bar h3") == "Step 1 · one · sample 1"
    assert [side for side, _ in sides(page)] == ["amount", "none", "amount", "amount", "amount"]
    assert page.evaluate("document.querySelectorAll('.tokens .environment').length") == 1
    assert "said by the environment" in text_of(page, ".color-scale")
    page.press("j")
    settle(page)
    place = "document.querySelector('.tokens .new-version').dataset.place"
    assert page.evaluate(place) == "2"


COLOR = """(() => {
  const painted = document.createElement('canvas').getContext('2d');
  const style = getComputedStyle(document.querySelector('.tokens .token'));
  return [style.backgroundColor, style.color,
    getComputedStyle(document.querySelector('.pane')).backgroundColor].map(color => {
      painted.clearRect(0, 0, 1, 1); painted.fillStyle = color; painted.fillRect(0, 0, 1, 1);
      return [...painted.getImageData(0, 0, 1, 1).data];
    });
})()"""


def luminance(color: list[float]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("mode", "sample"), [("ratio", 0), ("push", 0), ("entropy", 0)])
def test_tokens_are_readable_on_the_fullest_color(
    browser: OpenPage, tmp_path: Path, dark: bool, mode: str, sample: int
) -> None:
    """WCAG asks for a contrast of 4.5 between a text and what is behind it."""
    browser.load(example(tmp_path), dark=dark)
    open_row(browser, sample)
    choose(browser, mode)
    back, ink, pane = ([c / 255 for c in color] for color in browser.evaluate(COLOR))
    behind = [c * back[3] + p * (1 - back[3]) for c, p in zip(back[:3], pane[:3], strict=True)]
    assert max(abs(c - p) for c, p in zip(behind, pane, strict=False)) > 0.2  # it is seen
    light, deep = sorted((luminance(behind), luminance(ink[:3])), reverse=True)
    assert (light + 0.05) / (deep + 0.05) >= 4.5


NUMBERS = {
    "behavior log-prob": "-0.5",
    "policy log-prob": "-0.25",
    "anchor log-prob": "-0.75",
    "ratio": "2",
    "weight": "0.9",
    "KL": "0.125",
    "entropy": "1.5",
    "advantage": "-0.5",
    f"advantage {TIMES} weight": "-0.45",
    "version": "1",
    "sampled by": "tiny (native)",
}


def test_numbers_of_a_token_under_the_pointer_and_the_focus(page: OpenPage) -> None:
    numbers = (
        "Object.fromEntries([...document.querySelectorAll('.token-tip div:not(.head)')]"
        ".map(line => [...line.children].map(cell => cell.innerText)))"
    )
    hidden = "document.querySelector('.token-tip').hidden"
    open_row(page, 0)
    assert page.evaluate(hidden)
    box = page.evaluate(
        "(() => { const box = document.querySelector('.tokens .token').getBoundingClientRect();"
        "return [box.left + 3, box.top + 3]; })()"
    )
    page.point_at(*box)
    assert page.evaluate(numbers) == NUMBERS
    assert "token 1 of 5, id 0" in text_of(page, ".token-tip .head")
    page.point_at(2, 2)
    assert page.evaluate(hidden)
    # the same with the keyboard
    page.evaluate("document.querySelector('.tokens .token').focus()")
    assert page.evaluate(numbers) == NUMBERS
    page.press("ArrowRight")
    assert page.evaluate(numbers) == NUMBERS | {
        "ratio": "0.5",
        "weight": "0",
        f"advantage {TIMES} weight": "0",
    }
    page.press("ArrowDown")
    assert "token 5 of 5" in text_of(page, ".token-tip .head")
    described = "document.activeElement.getAttribute('aria-describedby')"
    assert page.evaluate(described) == "token-tip"
    # the second sample's second token is of the environment: it has no numbers
    page.press("j")
    settle(page)
    page.evaluate("document.querySelectorAll('.tokens .token')[1].focus()")
    assert page.evaluate(numbers) == {"said by": "the environment"}


def test_the_keyboard_is_enough(page: OpenPage) -> None:
    page.evaluate("document.querySelector('.completions tbody tr').focus()")
    page.press("ArrowDown")
    page.press("Enter")
    settle(page)
    assert text_of(page, ".dialog-bar h3") == "Step 1 · one · sample 1"
    page.press("j")
    page.press("k")
    page.press("k")
    settle(page)
    assert text_of(page, ".dialog-bar h3") == "Step 1 · one · sample 0"
    page.evaluate("document.querySelector('.completion-dialog').close()")
    settle(page)
    # back to the row of what was read last
    assert page.evaluate("document.activeElement.dataset.place") == "0"


def test_samples_of_a_prompt_side_by_side(page: OpenPage) -> None:
    open_row(page, 1)
    page.press("g")
    settle(page)
    heads = "[...document.querySelectorAll('.pane header')].map(head => head.innerText)"
    assert [head.split()[1] for head in page.evaluate(heads)] == ["0", "1", "2"]
    lefts = "[...document.querySelectorAll('.pane')].map(p => p.getBoundingClientRect().left)"
    assert len(set(page.evaluate(lefts))) == 3
    assert len(sides(page)) == 15
    assert "0.3333" in text_of(page, ".facts")
    # the next one is another prompt, which has one sample in this run
    page.press("j")
    settle(page)
    assert text_of(page, ".dialog-bar h3").startswith("Step 2 · two")
    page.press("k")
    settle(page)
    page.evaluate("document.querySelector('.pane .open-sample').click()")
    settle(page)
    assert text_of(page, ".dialog-bar h3") == "Step 1 · one · sample 0"
    assert page.evaluate("document.querySelectorAll('.pane').length") == 1


def test_completions_without_token_lists_show_their_text(page: OpenPage) -> None:
    open_row(page, 3)
    assert text_of(page, ".pane pre") == "It is 0."
    assert "failed: no module" in text_of(page, ".facts")
    assert "no token lists" in text_of(page, ".pane .hint")
    assert page.evaluate("document.querySelector('.colors').hidden")
    page.press("j")
    settle(page)
    said = "[...document.querySelectorAll('.turn')].map(turn => turn.innerText.split('\\n'))"
    assert page.evaluate(said) == [["policy", "Ask"], ["environment", "Warmer"]]
    assert "11 tokens, and 1 of the environment" in text_of(page, ".facts")


def test_hostile_text_is_shown_and_never_runs(browser: OpenPage, tmp_path: Path) -> None:
    words = dict.fromkeys(("answer", "finish_reason", "policy", "engine"), EVIL)
    row = record(1, EVIL, 0, **words, parts={EVIL: 1.0}, ungraded=EVIL) | {"prompt": EVIL}
    rows = [
        with_tokens(row, [EVIL, ODD, ""], [1.0, 1.0, 1.0]),
        row | {"sample": 1, "completion": EVIL, "turns": [{"role": EVIL, "text": EVIL}]},
        row | {"sample": 2, "completion": ODD, "prompt_id": ODD, "prompt": ODD},
    ]
    browser.complaints.clear()
    browser.requests.clear()
    file = write_report([make_run(tmp_path / "a", rows)], tmp_path / "report.html")
    browser.load(file)
    assert completions(browser)[1].count(EVIL) == 2
    assert completions(browser)[2] == f"{SHOWN} {SHOWN}"
    open_row(browser, 0)
    assert text_of(browser, ".tokens") == f"{EVIL}{SHOWN}∅"
    assert text_of(browser, ".facts").count(EVIL) >= 4
    browser.evaluate("document.querySelector('.tokens .token').focus()")
    assert text_of(browser, ".token-tip").count(EVIL) == 2  # the token and the engine
    browser.press("g")
    settle(browser)
    assert text_of(browser, ".panes").count(EVIL) >= 4
    enter(browser, "text", EVIL)
    assert len(completions(browser)) == 2
    assert (
        browser.evaluate(
            "document.querySelectorAll('.viewer img, .viewer b b, .viewer script').length"
        )
        == 0
    )
    assert (browser.complaints, browser.dialogs) == ([], [])
    assert browser.requests == [file.as_uri()]


def test_thousands_of_completions_stay_quick(browser: OpenPage, tmp_path: Path) -> None:
    words = ["so", "we", "multiply", "seventeen", "by", "four", "and", "add", "nine", ""]
    tokens = [f" {word}" for word in words * 4]
    rows = [
        with_tokens(record(1 + place // 300, f"p{place // 4}", place % 4), tokens, [1.0] * 40)
        for place in range(3000)
    ]
    rows[2987]["completion"] += " needle"
    start = time.monotonic()
    browser.load(write_report([make_run(tmp_path / "a", rows)], tmp_path / "report.html"))
    assert text_of(browser, ".count") == "3,000 of 3,000 completions"
    assert len(completions(browser)) == 50
    assert text_of(browser, ".pager span") == f"1{DASH}50 of 3,000"
    enter(browser, "text", "needle")
    assert len(completions(browser)) == 1
    open_row(browser, 0)
    assert len(sides(browser)) == 40
    assert time.monotonic() - start < 20
    spent = browser.evaluate(
        "(() => { const start = performance.now();"
        "const field = document.querySelector('[name=text]');"
        "for (const value of ['s', 'se', 'seventeen', '']) { field.value = value;"
        "field.dispatchEvent(new Event('input', {bubbles: true})); }"
        "document.querySelector('[data-key=completion] button').click();"
        "return performance.now() - start; })()"
    )
    assert spent < 2000
    browser.evaluate("document.querySelector('.completion-dialog').close()")
    browser.evaluate("document.querySelector('[aria-label=\"Last page\"]').click()")
    assert text_of(browser, ".pager span") == f"2,951{DASH}3,000 of 3,000"


def test_the_rest_of_a_long_completion_is_shown_on_demand(
    browser: OpenPage, tmp_path: Path
) -> None:
    tokens = ["a"] * 8010
    rows = [with_tokens(record(1, "one", sample), tokens, [2.0] * 8010) for sample in range(2)]
    browser.load(write_report([make_run(tmp_path / "a", rows)], tmp_path / "report.html"))
    open_row(browser, 0)
    assert len(sides(browser)) == 8000
    assert text_of(browser, ".rest") == "Show the other 10 tokens"
    browser.evaluate("document.querySelector('.rest').click()")
    assert len(sides(browser)) == 8010
    assert sides(browser)[-1] == ["above", "1.000"]
    # two samples share the room
    browser.press("g")
    settle(browser)
    assert len(sides(browser)) == 8000
    assert text_of(browser, ".rest") == "Show the other 4,010 tokens"


def test_the_page_fits_a_phone(browser: OpenPage, tmp_path: Path) -> None:
    browser.load(example(tmp_path), width=390)
    fits = "document.documentElement.scrollWidth <= innerWidth"
    assert browser.evaluate(fits)
    open_row(browser, 0)
    inside = (
        "[...document.querySelectorAll('.dialog-bar button:not([hidden]), .modes span, .pane')]"
        ".every(each => { const box = each.getBoundingClientRect();"
        "return box.width > 0 && box.left >= 0 && box.right <= innerWidth; })"
    )
    assert browser.evaluate(inside)
    browser.press("g")
    settle(browser)
    assert browser.evaluate(inside)
    assert browser.evaluate(fits)
