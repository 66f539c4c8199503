"""Files that are broken in many ways: each is refused, before anything runs, in one sentence."""

import gzip
import json
import re
from pathlib import Path

import pytest

from trustbatch.cli import main
from trustbatch.models.tiny import build_tokenizer
from trustbatch.models.tokenization import count_prompt_tokens
from trustbatch.tasks import build_task, fit_task
from trustbatch.tasks.benchmarks import FileTask
from trustbatch.tasks.rows import PromptChecks

GOOD = '{"problem": "1+1=", "answer": "2"}\n'
DEEP = "[" * 10_000 + "]" * 10_000


def row(problem: str = '"1+1="', answer: str = '"2"', more: str = "") -> str:
    return f'{{"problem": {problem}, "answer": {answer}{more}}}\n'


def checks() -> PromptChecks:
    tokenizer = build_tokenizer()
    return PromptChecks(
        count_tokens=lambda prompts: count_prompt_tokens(tokenizer, prompts),
        context_length=64,
        max_tokens=8,
    )


BAD_ROWS = {
    "a problem that is null": (row("null"), "has 'problem' = None: give text or a number"),
    "a problem that is a list": (row('["1+1="]'), "has 'problem' = a list of 1 entries: give text"),
    "a problem that is a table": (row('{"a": 1}'), "'problem' = a table of 1 entries: give text"),
    "a problem that is a truth value": (row("true"), "has 'problem' = True: give text or a number"),
    "a problem that is empty": (row('""'), "has an empty problem: fix it"),
    "a problem of spaces": (row(r'" \n\t"'), "has an empty problem: fix it"),
    "a problem that is NaN": (row("NaN"), "'problem' = nan, which is no finite number: fix it"),
    "an answer that is NaN": (row(answer="NaN"), "'answer' = nan, which is no finite number"),
    "an answer that is infinite": (row(answer="-Infinity"), "'answer' = -inf, which is no finite"),
    "an answer beyond a float": (row(answer="1e999"), "'answer' = inf, which is no finite number"),
    "an answer that is null": (row(answer="null"), "has 'answer' = None: give text or a number"),
    "an answer that is a list": (row(answer='["2"]'), "has 'answer' = a list of 1 entries: give"),
    "an answer that is empty": (row(answer='""'), "has an empty answer, which its grader compares"),
    "an answer of spaces": (row(answer='"  "'), "has an empty answer, which its grader compares"),
    "an answer of 5,000 digits": (row(answer="9" * 5000), r"can't be read \(Exceeds the limit"),
    "no answer": ('{"problem": "1="}\n', "no field 'answer', but problem: set task.columns.answer"),
    "no fields": ("{}\n", "has no field 'problem', but nothing: set task.columns.problem"),
    "fields of other names": ('{"q": "1", "a": "1"}\n', "has no field 'problem', but q, a: set"),
    "a field twice": (row(more=', "problem": "2+2="'), "has the field 'problem' twice: remove one"),
    "a field twice, inside": (row(more=', "x": {"y": 1, "y": 2}'), "has the field 'y' twice"),
    "no JSON": ("{broken\n", r"is not JSON \(Expecting property name"),
    "a row that was cut": ('{"problem": "1+1=", "ans\n', r"is not JSON \(Unterminated string"),
    "two rows in a line": (GOOD.strip() + GOOD, r"is not JSON \(Extra data at character 3\d\)"),
    "a line of CSV": ("1+1=,2\n", "is not JSON"),
    "a NUL byte": ('{"problem": "1\0", "answer": "2"}\n', r"is not JSON \(Invalid control char"),
    "a number": ("7\n", "is no JSON object with named fields: fix it"),
    "a list": ("[1]\n", "is no JSON object with named fields: fix it"),
    "a text": ('"1+1="\n', "is no JSON object with named fields: fix it"),
    "10,000 levels": (row(DEEP), "is nested too deeply: fix it"),
    "10,000 levels elsewhere": (row(more=f', "x": {DEEP}'), "is nested too deeply: fix it"),
    "half a pair in a problem": (
        row(r'"1+\ud800="'),
        r"has the character '\\ud800' in its problem",
    ),
    "half a pair in an answer": (row(answer=r'"\udfff"'), r"character '\\udfff' in its answer"),
    "half a pair in an id": (row(more=r', "id": "\ud83d"'), r"character '\\ud83d' in its id"),
    "a character without a token": (
        row('"é="'),
        "has a character for which the model has no token",
    ),
    "a prompt that is too long": (
        row(json.dumps("1+" * 40)),
        "has a prompt of 80 tokens, but the model's context has 64, and rollout.max_tokens = 8 "
        "leaves 56: set task.max_prompt_tokens = 56 to leave out longer ones",
    ),
    "eleven million characters": (
        row(json.dumps("1" * 11_000_000)),
        "has a problem of 11,000,000 characters: shorten it",
    ),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_refused_or_left_out(tmp_path: Path, name: str) -> None:
    text, words = BAD_ROWS[name]
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD + "\n" + text + GOOD)

    with pytest.raises(ValueError, match=words) as refused:
        fit_task(build_task("file", seed=0, path=str(path)), checks())
    sentence = str(refused.value).removeprefix("[task] can't be used: ")
    assert sentence.startswith(f"Line 3 of '{path}' ")
    assert sentence.endswith(', or set task.bad_rows = "leave_out".')
    assert len(sentence) < 300 + len(str(path))
    assert "\n" not in sentence

    task = build_task("file", seed=0, path=str(path), bad_rows="leave_out")
    task = fit_task(task, checks())
    assert isinstance(task, FileTask)
    assert [problem.text for problem in task.problems] == ["1+1=", "1+1="]
    assert task.describe().startswith("file: 2 problems; left out: 1 bad, such as line 3 of ")


WHOLE_FILES = {
    "nothing": (b"", "a.jsonl", "has no rows: give a file with problems"),
    "empty lines": (b"\n \n\n", "a.jsonl", "has no rows: give a file with problems"),
    "binary": (bytes(range(256)), "a.jsonl", r"is no text in UTF-8 \(invalid start byte at byte"),
    "Latin-1": (
        '{"problem": "é", "answer": "2"}\n'.encode("latin-1"),
        "a.jsonl",
        r"is no text in UTF-8 \(invalid continuation byte at byte 13\): save it in UTF-8",
    ),
    "UTF-16": (GOOD.encode("utf-16"), "a.jsonl", "is no text in UTF-8"),
    "text called gz": (GOOD.encode(), "a.jsonl.gz", r"can't be read \(Not a gzipped file"),
    "gz called text": (gzip.compress(GOOD.encode()), "a.jsonl", "is no text in UTF-8"),
    "a gz that was cut": (
        gzip.compress(GOOD.encode() * 999)[:-20],
        "a.jsonl.gz",
        r"can't be read \(Compressed file ended before the end-of-stream marker was reached\): "
        "copy or write it again",
    ),
    "a gz with a wrong byte": (
        gzip.compress(GOOD.encode() * 999)[:15] + b"\xff\xff" + gzip.compress(GOOD.encode())[17:],
        "a.jsonl.gz",
        r"can't be read \(.*\): copy or write it again",
    ),
    "a list called lines": (b'[{"problem": "1=",\n"answer": "1"}]', "a.jsonl", "is not JSON"),
    "lines called a list": (
        GOOD.encode() * 2,
        "a.json",
        r"is not JSON \(Extra data at character 36\): fix it, or give a file with one JSON object ",
    ),
    "a table": (b'{"rows": []}', "a.json", "must be a list of JSON objects"),
    "a deep list": (DEEP.encode(), "a.json", "is nested too deeply"),
    "a list of numbers": (
        b"[1, 2]",
        "a.json",
        "Row 1 .*is no JSON object with named fields, and 1",
    ),
    "no Parquet": (b"PAR1 and no more", "a.parquet", r"can't be read \(.*\): copy or write it"),
    "an empty Parquet": (b"", "a.parquet", r"can't be read \(.*\): copy or write it again"),
    "another ending": (b"a,b\n1,2\n", "a.txt", "must end in .jsonl"),
    "no good row": (
        b'{"q": 1}\n' * 3,
        "a.jsonl",
        "and 2 more rows can't be used: set task.columns.problem",
    ),
}


@pytest.mark.parametrize("name", WHOLE_FILES)
@pytest.mark.parametrize("bad_rows", ["stop", "leave_out"])
def test_a_file_without_a_good_row_is_refused(tmp_path: Path, name: str, bad_rows: str) -> None:
    content, ending, words = WHOLE_FILES[name]
    path = tmp_path / ending
    path.write_bytes(content)
    if bad_rows == "leave_out":
        words = f"{words}|leave nothing"
    with pytest.raises(ValueError, match=words) as refused:
        build_task("file", seed=0, path=str(path), bad_rows=bad_rows)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400 + len(str(path))


GOOD_FILES = {
    "a byte-order mark": (b"\xef\xbb\xbf" + GOOD.encode(), "a.jsonl"),
    "line ends of Windows": (GOOD.strip().encode() + b"\r\n", "a.jsonl"),
    "no last line end": (GOOD.strip().encode(), "a.jsonl"),
    "a number as problem and answer": (b'{"problem": 1, "answer": 2.5}\n', "a.jsonl"),
    "a pair of halves": (rb'{"problem": "\ud83d\ude00", "answer": "2"}', "a.jsonl"),
    "a list in one file": (f"[{GOOD}]".encode(), "a.json"),
    "NaN elsewhere": (b'{"problem": "1=", "answer": "1", "x": NaN}', "a.jsonl"),
    "500 levels elsewhere": (
        b'{"problem": "1=", "answer": "1", "x": ' + b"[" * 500 + b"]" * 500 + b"}",
        "a.jsonl",
    ),
}


@pytest.mark.parametrize("name", GOOD_FILES)
def test_a_file_that_only_looks_odd_is_read(tmp_path: Path, name: str) -> None:
    content, ending = GOOD_FILES[name]
    path = tmp_path / ending
    path.write_bytes(content)
    assert len(FileTask(path=str(path)).problems) == 1


def test_several_bad_rows_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD + "x\n" + row("null") + "[]\n")
    words = r"Line 2 of .* is not JSON \(.*\), and 2 more rows can't be used: fix them, or set task"
    with pytest.raises(ValueError, match=words):
        FileTask(path=str(path))
    task = FileTask(path=str(path), bad_rows="leave_out")
    assert re.search(
        r"1 problems; left out: 3 bad, such as line 2 of .*, which is not JSON", task.describe()
    )


def test_an_empty_answer_is_bad_only_for_a_grader_that_compares_with_it(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD + row(answer='""'))
    (tmp_path / "judge.py").write_text("def short(prompt, completion, answer): return 1.0\n")
    term = f"reward.terms=[{{name = 'function', path = '{tmp_path}/judge.py:short'}}]"
    config = tmp_path / "config.toml"
    config.write_text(
        f"model.name = '{tiny_folder}'\n[task]\nname = 'file'\npath = '{path}'\n"
        f"[rollout]\nprompts_per_step = 2\nmax_tokens = 3\n[run]\nfolder = '{tmp_path}'\n"
    )
    dry = ["train", str(config), "--dry-run"]
    assert main([*dry, f"--{term}"]) == 0
    capsys.readouterr()
    for terms in ("[]", "[{name = 'math'}]", "[{name = 'task'}]"):
        assert main([*dry, f"--reward.terms={terms}"]) == 2
        assert "Line 2 of" in capsys.readouterr().err


def test_all_rows_are_checked_by_a_dry_run_and_before_the_first_step(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD * 100 + row('"é="'))
    config = tmp_path / "config.toml"
    config.write_text(
        f"model.name = '{tiny_folder}'\n[task]\nname = 'file'\npath = '{path}'\n"
        f"[rollout]\nprompts_per_step = 2\nmax_tokens = 3\n"
        f"[training]\nsteps = 1\n[run]\nfolder = '{tmp_path}'\n"
    )
    for arguments in (["--dry-run"], []):
        assert main(["train", str(config), *arguments]) == 2
        assert f"Line 101 of '{path}' has a character for which" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    suite = f"--evaluation.suite=['{path}']"
    config.write_text(config.read_text().replace(f"path = '{path}'", "path = 'good.jsonl'"))
    (tmp_path / "good.jsonl").write_text(row('"2+2="', '"4"'))
    config.write_text(config.read_text().replace("'good.jsonl'", f"'{tmp_path}/good.jsonl'"))
    for arguments in (["--dry-run"], []):
        assert main(["train", str(config), "--evaluation.every=1", suite, *arguments]) == 2
        assert "'a' can't be evaluated on: Line 101 of" in capsys.readouterr().err
