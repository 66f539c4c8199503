"""The recipes of docs/extending.md work: applied to a copy of the package, they train together."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.rollout_files import read_rollouts, rollout_file
from tests.test_docs import DOCS, ROOT, code_blocks, read, run_block

from trustbatch.observe.run_folder import read_metrics

PAGE = DOCS / "extending.md"
NEW_FILE = re.compile(r"^`(src/[\w/]+\.py)`:\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def apply_diff(root: Path, diff: str) -> None:
    """Put each line with a plus below the line before it; "..." stands for lines in between."""
    header, *lines = diff.splitlines()
    file = root / header.removeprefix("# ")
    content, place = file.read_text(encoding="utf-8").splitlines(), 0
    for line in lines:
        if line.startswith("+"):
            content.insert(place, line[1:])
            place += 1
        elif line != "...":
            assert line[1:] in content[place:], f"{file} has no line {line[1:]!r}"
            place = content.index(line[1:], place) + 1
    file.write_text("\n".join(content) + "\n", encoding="utf-8")


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(root / "src"), str(root)])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A copy of the package with all recipes applied."""
    root = tmp_path_factory.mktemp("extended")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("src", "tests", "docs"):
        shutil.copytree(ROOT / name, root / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", root)
    shutil.copytree(tiny_folder, root / "tiny")
    for path, code in NEW_FILE.findall(read(PAGE)):
        assert not (root / path).exists(), f"{path} is there already"
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(code, encoding="utf-8")
    for diff in code_blocks(PAGE, "diff"):
        apply_diff(root, diff)
    (root / "recipes.toml").write_text(code_blocks(PAGE, "ini")[0], encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def trained(extended: Path) -> Path:
    """The run folder of a training with all of them."""
    done = run(extended, "-m", "trustbatch", "train", "recipes.toml")
    assert done.returncode == 0, done.stderr
    return extended / "runs" / "recipes"


def test_every_recipe_is_registered_by_its_own_lines() -> None:
    changed = [diff.splitlines()[0].removeprefix("# ") for diff in code_blocks(PAGE, "diff")]
    assert [path.removeprefix("src/trustbatch/") for path in changed] == [
        "objectives/__init__.py",
        "tests/objectives/objective_cases.py",
        "tests/objectives/oracle.py",
        "tests/objectives/test_metrics.py",
        "tasks/__init__.py",
        "rewards/terms.py",
        "rollout/registry.py",
        "observe/rollout_metrics.py",
        "observe/report_charts.py",
    ]


@pytest.mark.slow
class TestTrained:
    def test_the_objective_trains(self, trained: Path) -> None:
        steps = read_metrics(trained)
        assert len(steps) == 2
        for line in steps:
            assert line["weight/mean"] == pytest.approx(1.0, abs=1e-4)  # on-policy
            assert line["steps/skipped"] == 0

    def test_the_task_grades(self, trained: Path) -> None:
        for line in read_metrics(trained):
            assert 0 <= line["reward/task/mean"] <= 1
        for row in read_rollouts(rollout_file(trained, 1)):
            assert re.fullmatch(r"\d\d=", row["prompt"])

    def test_the_reward_is_the_weighted_sum(self, trained: Path) -> None:
        for line in read_metrics(trained):
            expected = line["reward/task/mean"] + 0.1 * line["reward/brief/mean"]
            assert line["reward/mean"] == pytest.approx(expected)

    def test_the_engine_samples_from_each_version(self, trained: Path) -> None:
        for step in (1, 2):
            for row in read_rollouts(rollout_file(trained, step)):
                assert row["engine"] == "plain"
                assert row["version"] == step - 1

    def test_the_metric_is_written_and_drawn(self, trained: Path) -> None:
        for line in read_metrics(trained):
            assert 1 / 4 <= line["response/distinct_fraction"] <= 1
        page = (trained / "report.html").read_text(encoding="utf-8")
        assert "Distinct completions" in page


@pytest.mark.slow
def test_the_objective_passes_the_tests_of_all_objectives(extended: Path) -> None:
    done = run(
        extended,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/objectives",
        "-k",
        "damped",
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 20


def test_an_objective_without_touching_the_package(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = read(PAGE).split("## Without touching the package")[1]
    (code,) = [each for each in code_blocks(PAGE, "python") if each in section]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_folder, tmp_path / "runs" / "quickstart" / "tiny-model-0")
    run_block(PAGE, code, {"__name__": "__main__"})
    steps = read_metrics(tmp_path / "runs" / "Half-arithmetic")
    assert [line["steps/skipped"] for line in steps] == [0, 0]


def test_a_diff_whose_line_is_gone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one\ntwo\n")
    apply_diff(tmp_path, "# a.py\n one\n+one and a half\n")
    assert (tmp_path / "a.py").read_text() == "one\none and a half\ntwo\n"
    with pytest.raises(AssertionError, match="no line 'three'"):
        apply_diff(tmp_path, "# a.py\n three\n+four\n")
