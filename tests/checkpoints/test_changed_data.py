"""The data of a run does not change unnoticed: edited files, lost metrics, rows left out."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support import forked
from tests.support.rollout_files import rollout_file, rollout_text

from trustbatch.cli import main
from trustbatch.observe.run_folder import read_metrics
from trustbatch.utils.sources import source_files

CONFIG = """
[model]
name = "{model}"
device = "cpu"
[task]
{task}
[rollout]
prompts_per_step = 4
samples_per_prompt = 2
max_tokens = 3
[training]
steps = 2
learning_rate = 1e-3
[run]
folder = "{folder}"
checkpoint_every = 2
{more}
"""
CODE = """
import beside
from trustbatch.tasks.arithmetic import Arithmetic


class Mine(Arithmetic):
    pass


def long(prompt, completion, answer):
    return beside.measure(completion)
"""


def write_rows(file: Path, first: int = 0) -> None:
    rows = [{"id": f"r{n}", "problem": f"{n}+1=", "answer": n + 1} for n in range(first, first + 9)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_config(tmp_path: Path, model: Path, task: str, more: str = "") -> Path:
    file = tmp_path / "config.toml"
    text = CONFIG.format(model=model, task=task, folder=tmp_path, more=more)
    file.write_text(text.replace("HERE", str(tmp_path)))
    return file


MORE_STEPS = "--training.steps=4"
FILES: dict[str, tuple[str, str, str]] = {
    "data": ('name = "file"\npath = "HERE/a.jsonl"', "", "a.jsonl"),
    "a part of a mixture": (
        'name = "mixture"\n[[task.parts]]\nname = "arithmetic"\n'
        '[[task.parts]]\nname = "file"\npath = "HERE/a.jsonl"',
        "",
        "a.jsonl",
    ),
    "a curriculum": ('name = "file"\npath = "HERE/a.jsonl"\ncurriculum = {}', "", "a.jsonl"),
    "what is excluded": (
        'name = "file"\npath = "HERE/a.jsonl"\nexclude = ["HERE/b.jsonl"]',
        "",
        "b.jsonl",
    ),
    "an evaluation": (
        'name = "arithmetic"',
        '[evaluation]\nevery = 2\nsamples = 1\nsuite = ["HERE/a.jsonl"]',
        "a.jsonl",
    ),
    "a reward": (
        'name = "arithmetic"',
        '[[reward.terms]]\nname = "function"\npath = "HERE/own_rewards.py:long"',
        "own_rewards.py",
    ),
    "what a reward imports": (
        'name = "arithmetic"',
        '[[reward.terms]]\nname = "function"\npath = "HERE/own_rewards.py:long"',
        "beside.py",
    ),
    "a task": ('name = "HERE/own_rewards.py:Mine"', "", "own_rewards.py"),
}


@pytest.mark.parametrize("name", FILES)
def test_an_edited_file_is_noticed(
    tmp_path: Path,
    tiny_folder: Path,
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, more, edited = FILES[name]
    monkeypatch.syspath_prepend(str(tmp_path))  # and forgets the modules of other cases
    for module in ("own_rewards", "beside"):
        monkeypatch.delitem(__import__("sys").modules, module, raising=False)
    write_rows(tmp_path / "a.jsonl")
    write_rows(tmp_path / "b.jsonl", first=100)
    (tmp_path / "own_rewards.py").write_text(CODE)
    (tmp_path / "beside.py").write_text("def measure(text):\n    return float(len(text))\n")
    config = str(write_config(tmp_path, tiny_folder, task, more))
    assert main(["train", config]) == 0
    before = (tmp_path / edited).read_bytes()
    (tmp_path / edited).write_bytes(before + b"\n")
    capsys.readouterr()

    for arguments in ([MORE_STEPS], [MORE_STEPS, "--dry-run"]):
        assert main(["train", config, *arguments]) == 2
        sentence = capsys.readouterr().err
        assert f"{tmp_path / edited} was edited after step-2 of {tmp_path / 'run'}" in sentence
        assert "restore the file, choose another run.name, or accept the edit with" in sentence
    accepted = "--run." + sentence.partition("run.accept_changes = ")[2].strip().rstrip(".")
    accept = accepted.replace("--run.", "--run.accept_changes=")
    if name == "data":
        assert main(["train", config, MORE_STEPS, accept]) == 0
        assert "was edited after step-2, as run.accept_changes allows" in capsys.readouterr().err
        (tmp_path / edited).write_bytes(before + b"\n\n")
        assert main(["train", config, "--training.steps=6", accept]) == 2  # of one content only
        assert "was edited after step-4" in capsys.readouterr().err
        (tmp_path / edited).write_bytes(before + b"\n")
        assert main(["train", config, "--training.steps=6"]) == 0
    else:
        (tmp_path / edited).write_bytes(before)
        assert main(["train", config, MORE_STEPS]) == 0


def test_other_prompts_from_the_same_files_are_noticed(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An evaluation that is added leaves out problems, and so moves all others."""
    write_rows(tmp_path / "a.jsonl")
    write_rows(tmp_path / "b.jsonl", first=7)
    task = 'name = "file"\npath = "HERE/a.jsonl"'
    config = str(write_config(tmp_path, tiny_folder, task))
    assert main(["train", config]) == 0
    suite = ["--evaluation.every=2", f"--evaluation.suite=['{tmp_path}/b.jsonl']"]
    for arguments in ([], ["--dry-run"]):
        capsys.readouterr()
        assert main(["train", config, MORE_STEPS, *suite, *arguments]) == 2
        sentence = capsys.readouterr().err
        assert "other prompts than when step-2 of" in sentence
        assert "was written (7, and 9 then)" in sentence
    accept = "--run.accept_changes=" + sentence.partition("run.accept_changes = ")[2].strip(" .\n")
    assert main(["train", config, MORE_STEPS, *suite, accept]) == 0


@pytest.mark.long
def test_ranks_notice_an_edit_and_a_file_that_is_not_the_same_for_all(
    tmp_path: Path, tiny_folder: Path
) -> None:
    write_rows(tmp_path / "a.jsonl")
    config = str(write_config(tmp_path, tiny_folder, 'name = "file"\npath = "HERE/a.jsonl"'))
    forked.in_ranks(2, main, ["train", config])
    write_rows(tmp_path / "a.jsonl", first=1)
    output = forked.in_ranks(2, main, ["train", config, MORE_STEPS], status=2)
    assert output.count("a.jsonl was edited after step-2") == 1

    (tmp_path / "mine.py").write_text(
        "import os\nfrom trustbatch.tasks.arithmetic import Arithmetic\n\n\n"
        "class Mine(Arithmetic):\n"
        "    files = {'the table': f'HERE/b-{os.environ.get(\"RANK\", 0)}'}\n".replace(
            "HERE", str(tmp_path)
        )
    )
    for rank in range(2):
        (tmp_path / f"b-{rank}").write_text(str(rank))
    config = str(write_config(tmp_path, tiny_folder, 'name = "HERE/mine.py:Mine"'))
    output = forked.in_ranks(2, main, ["train", config, "--run.name=other"], status=2)
    assert "has another the table than" in output


def test_imports_are_followed_beside_the_named_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {
        "first.py": "import json, torch\nimport second\nfrom third import x\nimport first\n",
        "second.py": "from package.inner import y\n",
        "third.py": "syntax error(",
        "package/__init__.py": "",
        "package/inner.py": "from . import sibling\nfrom .. import nothing\n",
        "package/sibling.py": "",
        "package/unused.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    expected = {"first.py", "second.py", "third.py", "package/inner.py"}
    expected |= {"package/__init__.py", "package/sibling.py"}
    found = source_files(f"{tmp_path}/first.py:thing")
    assert {str(Path(name).relative_to(tmp_path)) for name in found} == expected
    monkeypatch.syspath_prepend(str(tmp_path))
    assert set(source_files("first:thing")) == expected
    assert set(source_files("package.inner:y")) == {
        "package/inner.py",
        "package/__init__.py",
        "package/sibling.py",
    }
    assert source_files("no_such_module:y") == {}
    assert source_files("trustbatch.tasks.arithmetic:Arithmetic") == {}


def drop(*numbers: int) -> Callable[[list[str]], list[str]]:
    return lambda lines: [line for n, line in enumerate(lines, start=1) if n not in numbers]


def replace_line(number: int, text: str) -> Callable[[list[str]], list[str]]:
    return lambda lines: [*lines[: number - 1], text, *lines[number:]]


METRICS: dict[str, tuple[Callable[[list[str]], list[str]], str, list[int], bool]] = {
    "a gap": (drop(1, 2, 4), "has nothing of steps 1 to 2, 4: the run goes on", [3, 5, 6], False),
    "no first step": (drop(1), "has nothing of step 1: the run", [2, 3, 4, 5, 6], False),
    "a broken line": (
        replace_line(2, '{"step": 2, "rew'),
        "can't be read in line 2 and has nothing of step 2, so it is written anew and kept as "
        "metrics-damaged.jsonl: the run goes on without these numbers.",
        [1, 3, 4, 5, 6],
        True,
    ),
    "binary": (replace_line(3, "\0\0\0"), "can't be read in line 3", [1, 2, 4, 5, 6], True),
    "no object": (replace_line(3, "[3]"), "can't be read in line 3", [1, 2, 4, 5, 6], True),
    "no step": (replace_line(3, '{"a": 3}'), "can't be read in line 3", [1, 2, 4, 5, 6], True),
    "a step twice": (lambda lines: [*lines[:2], *lines[1:]], "has 1 lines of steps that", [], True),
    "beyond the checkpoint": (
        lambda lines: [*lines, "{broken", "x"],
        "can't be read in lines 5 to 6, so",
        [],
        True,
    ),
    "nothing": (lambda lines: [], "has nothing of steps 1 to 4: the run goes on", [5, 6], False),
}


@pytest.fixture(scope="module")
def finished(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps."""
    folder = tmp_path_factory.mktemp("finished")
    config = write_config(folder, tiny_folder, 'name = "arithmetic"')
    assert main(["train", str(config), MORE_STEPS]) == 0
    return folder


@pytest.mark.parametrize("name", METRICS)
def test_lost_metrics_are_named_when_a_run_goes_on(
    finished: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, words, steps, has_copy = METRICS[name]
    shutil.copytree(finished / "run", tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    damaged = "".join(f"{line}\n" for line in change(file.read_text().splitlines()))
    file.write_text(damaged)
    arguments = ["train", str(finished / "config.toml"), f"--run.folder={tmp_path}"]
    assert main([*arguments, "--training.steps=6"]) == 0
    assert f"{file} {words}" in capsys.readouterr().err
    assert [line["step"] for line in read_metrics(file.parent)] == (steps or list(range(1, 7)))
    copy = file.with_name("metrics-damaged.jsonl")
    assert copy.is_file() == has_copy
    assert not has_copy or copy.read_text() == damaged
    assert main([*arguments, "--training.steps=6"]) == 0
    again = capsys.readouterr().err
    assert ("the run goes on without" in again) == (
        name not in ("a step twice", "beyond the checkpoint")
    )


ENVIRONMENT = """
from dataclasses import dataclass
from trustbatch.tasks.benchmarks import FileTask


@dataclass(frozen=True, kw_only=True)
class Touchy(FileTask):
    name: str = "touchy"

    def reply(self, prompt, turns):
        if prompt.answer == "8":
            raise KeyError("board")
        return None

    def grade(self, prompt, completion):
        return float(len(completion) % 2)
"""


def test_a_row_that_fails_is_named_and_the_run_goes_on_without_it(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "a.jsonl")  # r7 is the eighth row, whose answer is 8
    (tmp_path / "touchy_task.py").write_text(ENVIRONMENT)
    task = 'name = "HERE/touchy_task.py:Touchy"\npath = "HERE/a.jsonl"\nshuffle = false'
    config = str(write_config(tmp_path, tiny_folder, task))
    arguments = ["train", config, MORE_STEPS, "--run.checkpoint_every=1", "--run.rollouts_every=1"]
    arguments += ["--rollout.max_tokens=40", "--rollout.samples_per_prompt=4"]
    assert main(arguments) == 2
    sentence = " ".join(capsys.readouterr().err.split())
    assert (
        "failed to reply on prompt 'r7#0' with KeyError: 'board'; fix it, or leave out" in sentence
    )
    setting = f"line 8 of '{tmp_path}/a.jsonl' with task.leave_out = [\"r7\"]"
    assert f"{setting}, and the same command continues the run." in sentence
    assert len(read_metrics(tmp_path / "run")) == 1

    assert main([*arguments, '--task.leave_out=["r7"]']) == 0
    assert "8 problems; left out: 1 named in task.leave_out" in capsys.readouterr().err
    prompts = []
    for step in range(1, 5):
        lines = rollout_text(rollout_file(tmp_path / "run", step)).splitlines()
        prompts += [json.loads(line)["prompt_id"] for line in lines[::4]]
    # four a step, nine seats an epoch: another row has the seat of r7, all others their own
    assert prompts[7].endswith("#0.7")
    assert prompts[7] != "r7#0.7"
    expected = [f"r{n % 9}#{n // 9}" for n in range(16)]
    assert prompts[:7] + prompts[8:] == expected[:7] + expected[8:]
