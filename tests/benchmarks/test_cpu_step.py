"""The benchmark of a step on the CPU runs, with its own task in the graders' processes."""

from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cpu_step  # pyright: ignore[reportMissingImports]

    return cpu_step


def test_a_step_is_timed(script: Any, tmp_path: Path) -> None:
    script.make_checkpoint("tiny", tmp_path / "model")
    work = script.Workload(
        size="tiny",
        model=str(tmp_path / "model"),
        folder="",
        steps=2,
        prompts=2,
        samples=2,
        max_tokens=4,
        threads=1,
    )
    found = script.measure("trustbatch", work)
    assert len(found["steps"]) == 2
    assert found["completion_tokens"] == [4]
    # no digit is graded alike, so that there is something to learn
    assert 0.0 < found["first_reward"] < 1.0
    assert all(step[name] >= 0.0 for step in found["steps"] for name in script.COLUMNS)
