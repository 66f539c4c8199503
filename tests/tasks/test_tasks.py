import gzip
import json
from pathlib import Path

import pytest

from trustbatch.rewards.terms import MathTerm, Sample
from trustbatch.tasks import build_task
from trustbatch.tasks.arithmetic import LEVELS, Arithmetic
from trustbatch.tasks.benchmarks import FileTask


@pytest.mark.parametrize("level", LEVELS)
def test_arithmetic_answers_are_right(level: int) -> None:
    task = Arithmetic(seed=0, level=level)
    for index in range(300):
        prompt = task.prompt(index)
        assert str(eval(prompt.text.rstrip("="))) == prompt.answer
        assert task.grade(prompt, f" {prompt.answer}\n") == 1.0
        assert task.grade(prompt, prompt.answer + "0") == 0.0
        assert task.grade(prompt, "0" + prompt.answer) == 0.0
        assert task.grade(prompt, "") == 0.0


def test_arithmetic_is_seeded_and_endless() -> None:
    task, same, other = (Arithmetic(seed=seed) for seed in (0, 0, 1))
    texts = [task.prompt(index).text for index in range(100)]
    assert texts == [same.prompt(index).text for index in range(100)]
    assert texts != [other.prompt(index).text for index in range(100)]
    assert len({task.prompt(index).id for index in range(100)}) == 100
    assert task.prompt(10**12).text


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        with gzip.open(path, "wt") as file:
            file.write(text)
    elif path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(text)
    return path


ROWS: list[dict[str, object]] = [
    {"id": f"r{number}", "problem": f"What is {number}?", "answer": number} for number in range(7)
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_files_are_read_and_every_epoch_is_a_new_order(tmp_path: Path, name: str) -> None:
    path = write_rows(tmp_path / name, ROWS)
    task = FileTask(path=str(path), seed=0, template="Q: {problem} {braces}")
    epochs = [[task.prompt(7 * epoch + i) for i in range(7)] for epoch in range(3)]
    for epoch, prompts in enumerate(epochs):
        assert {prompt.id for prompt in prompts} == {f"r{n}#{epoch}" for n in range(7)}
    assert epochs[0][0].text.startswith("Q: What is ")
    assert epochs[0][0].text.endswith("? {braces}")
    answers = [[prompt.answer for prompt in prompts] for prompts in epochs]
    assert answers[0] != answers[1] != answers[2]
    in_order = FileTask(path=str(path), shuffle=False)
    assert [in_order.prompt(i).answer for i in range(8)] == [*map(str, range(7)), "0"]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"so \boxed{42}", "42", 1.0),
        (r"\boxed{1} no, \boxed{2}", "2", 1.0),
        (r"\boxed{1} no, \boxed{2}", "1", 0.0),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        ("The answer is 1,234.", "1234", 1.0),
        ("0.50", "1/2", 1.0),
        ("-3", "3", 0.0),
        ("it is -3.", "-3", 1.0),
        ("1/0", "1/0", 1.0),
        ("no idea", "5", 0.0),
        (r"\boxed{7", "7", 0.0),
        ("x = y", "x=y", 1.0),
        (r"\boxed{35}", "3,5", 0.0),
        (r"\boxed{1 2}", "12", 0.0),
        (r"\boxed{12,345}", "12345", 1.0),
        (r"\boxed{\dfrac{1}{2}}", "0.5", 1.0),
        (r"\boxed{.5}", "1/2", 1.0),
        ("10-7", "7", 0.0),
        ("10-7", "3", 1.0),
        ("9" * 5000, "9" * 5000, 1.0),
        ("9" * 5000, "9" * 4999, 0.0),
    ],
)
def test_final_answers(completion: str, answer: str, reward: float, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"problem": "p", "answer": answer}])
    task = FileTask(path=str(path))
    assert task.grade(task.prompt(0), completion) == reward


def test_a_template_with_a_box_requires_one(tmp_path: Path) -> None:
    path = str(write_rows(tmp_path / "a.jsonl", [{"problem": "p", "answer": "5"}]))
    for template, reward in (("plain", 1.0), ("boxed", 0.0), (r"{problem} \boxed{}", 0.0)):
        task = FileTask(path=path, template=template)
        assert task.grade(task.prompt(0), "it is 5") == reward
        assert task.grade(task.prompt(0), r"it is \boxed{5}") == 1.0


def test_thinking_that_the_prompt_opens_must_end(tmp_path: Path) -> None:
    path = str(write_rows(tmp_path / "a.jsonl", [{"problem": "p", "answer": "5"}]))
    for thinking, reward in ((True, 0.0), (False, 1.0), (None, 1.0)):
        task = FileTask(path=path, thinking=thinking)
        prompt = task.prompt(0)
        assert task.grade(prompt, r"maybe \boxed{5}? Let me") == reward
        assert task.grade(prompt, r"maybe</think>\boxed{5}") == 1.0
        sample = Sample(prompt=prompt, completion=r"maybe \boxed{5}? Let me", num_tokens=1)
        assert MathTerm().grade(sample) == reward


def test_rows_without_a_unique_id_get_one(tmp_path: Path) -> None:
    row = {"problem": "p", "answer": "1"}
    rows: list[dict[str, object]] = [row | {"id": None}, row | {"id": "a"}, row | {"id": "a"}, row]
    task = FileTask(path=str(write_rows(tmp_path / "a.jsonl", rows)), shuffle=False)
    assert [task.prompt(i).id for i in range(4)] == ["0#0", "a#0", "a@2#0", "3#0"]


def test_bad_options_are_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ValueError, match="There is no task 'poetry'; choose one of arithmetic"):
        build_task("poetry", seed=0)
    with pytest.raises(ValueError, match=r"no task 'gsm8' \(did you mean 'gsm8k'\?\)"):
        build_task("gsm8", seed=0)
    with pytest.raises(ValueError, match="did you mean 'level'"):
        build_task("arithmetic", seed=0, levl=1)
    with pytest.raises(ValueError, match="one of 1, 2, 3"):
        build_task("arithmetic", seed=0, level=99)
    with pytest.raises(ValueError, match=r"needs task\.path"):
        build_task("file", seed=0)
    with pytest.raises(ValueError, match="is not a file"):
        build_task("file", seed=0, path=str(tmp_path / "missing.jsonl"))
    with pytest.raises(ValueError, match=r"must contain \{problem\}"):
        build_task("file", seed=0, path=str(path), template="no place")
