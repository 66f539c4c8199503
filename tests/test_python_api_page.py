"""The blocks of docs/python-api.md run, in one session, as a reader would."""

import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.test_docs import DOCS, code_blocks, read, run_block

from trustbatch.rewards.functions import FunctionTerm

PAGE = DOCS / "python-api.md"


@pytest.mark.slow
def test_the_page_runs(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_folder, tmp_path / "runs" / "quickstart" / "tiny-model-0")
    # what a reader defines is in no module that could be imported
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    names: dict[str, Any] = vars(main)
    for code in code_blocks(PAGE, "python"):
        run_block(PAGE, code, names)
    assert names["result"].folder == Path("runs/p3o-data")
    assert names["sums"].folder == Path("runs/p3o-data-2")
    assert names["graded"].metrics[0]["reward/failed"] == 0
    assert names["scaled"].folder == Path("runs/Scaled-arithmetic")
    assert (tmp_path / "runs" / "report-sums-Scaled-arithmetic.html").is_file()
    out = capsys.readouterr().out
    assert "RunResult('runs/p3o-data', 2 steps, reward " in out
    assert "pass@1" in out


def test_the_page_names_every_function() -> None:
    import trustbatch

    for name in trustbatch.__all__:
        if name[0].islower():
            assert f"`trustbatch.{name}(" in read(PAGE), name


def test_a_function_without_cloudpickle_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import importlib.util
    import pickle

    def reward(completion: str) -> float:
        return 1.0

    reward.__module__ = "__main__"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(pickle.PicklingError, match=r"pip install 'trustbatch\[notebook\]'"):
        pickle.dumps(FunctionTerm(path=reward))
