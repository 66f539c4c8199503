"""The few completions of an arm: whose words they are, and that any text can be shown."""

import re

from trustbatch.studies.samples import LONGEST_TEXT, sample_table


def test_turns_stand_under_the_name_of_who_spoke() -> None:
    turns = [("policy", "first guess"), ("environment", "higher"), ("policy", "second guess")]
    said = [{"role": role, "text": words} for role, words in turns]
    rows = [
        {"step": 7, "completion": "second guess", "turns": said},
        {"step": 7, "completion": "broken", "turns": "x"},
        {"step": 7, "completion": "broken too", "turns": [1]},
    ]
    table = sample_table("step-000007.jsonl", rows)
    assert "Step 7 <small>step-000007.jsonl</small>" in table
    kinds = re.findall(r'<div class="(turn \w+)">', table)
    assert kinds == ["turn policy", "turn reply", "turn policy"]
    assert table.index("first guess") < table.index("higher") < table.index("second guess")
    assert "<pre>broken</pre>" in table
    assert "<pre>broken too</pre>" in table


def test_odd_completions_can_be_shown() -> None:
    odd = "half \ud800 pair, \x00 null, <b>"
    table = sample_table("a", [{"completion": odd}, {"completion": "x" * (LONGEST_TEXT + 5)}])
    assert "half \ud800 pair, ␀ null, &lt;b&gt;" in table
    assert "x" * LONGEST_TEXT + '<span class="more"> … 5 more characters</span>' in table
