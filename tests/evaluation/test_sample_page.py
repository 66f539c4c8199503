"""Samples on the page of an evaluation: which are shown, and that they stay text."""

import json
from pathlib import Path
from typing import Any

from trustbatch.evaluation.sample_page import LONGEST_SAMPLE, samples_section, spread_samples

EVIL = "</pre><script>alert(1)</script>"


def record(task: str, number: int, *samples: dict[str, Any]) -> dict[str, Any]:
    return {"task": task, "id": f"{task}-{number}", "prompt": "1+1=", "answer": "2"} | {
        "samples": list(samples)
    }


def sample(text: str, reward: float | None = 1.0, **more: Any) -> dict[str, Any]:
    made = {"text": text, "tokens": 3, "finish_reason": "stop", "status": "graded"}
    return made | {"reward": reward} | more


def test_problems_are_spread_over_each_task(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    records = [record("a", number) for number in range(100)]
    records[50:50] = [record("b", number) for number in range(3)]
    file.write_text("".join(json.dumps(each) + "\n" for each in records))
    chosen = spread_samples(file, num_shown=4)
    assert [each["id"] for each in chosen if each["task"] == "a"] == ["a-0", "a-25", "a-50", "a-75"]
    assert [each["id"] for each in chosen if each["task"] == "b"] == ["b-0", "b-1", "b-2"]
    section = samples_section(chosen)
    assert "a <small>4 of 100 problems</small>" in section
    assert "b <small>all problems</small>" in section


def test_samples_stay_text_and_say_how_they_ended() -> None:
    section = samples_section(
        [
            record(
                EVIL,
                0,
                sample(EVIL),
                sample("x" * (LONGEST_SAMPLE + 7), 0.0, finish_reason="length"),
                sample("y", None, status="timed_out", reason=EVIL),
                sample(
                    "", 1.0, turns=[{"role": "policy", "text": "go"}, {"role": EVIL, "text": EVIL}]
                ),
                *[sample("z", 0.0)] * 5,
            )
        ]
    )
    assert "<script" not in section
    assert "2 of 9 correct" in section
    assert section.count('class="sample right"') == 2
    assert "reward 0, 3 tokens, length" in section
    assert "… 7 more characters" in section
    assert "timed_out, &lt;/pre&gt;" in section
    assert "<small>policy</small><pre>go</pre>" in section
    assert "1 more not shown" in section
