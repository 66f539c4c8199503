"""Rows from CSV, folders, conversations and the hub, with one mapping of columns for all."""

import gzip
import json
import time
from pathlib import Path
from typing import Any

import datasets
import pytest

import trustbatch
from trustbatch.errors import ConfigError
from trustbatch.models.tiny import build_tokenizer
from trustbatch.models.tokenization import encode_prompt
from trustbatch.rollout.records import group_from_record, group_to_record
from trustbatch.tasks import build_task
from trustbatch.tasks.benchmarks import FileTask
from trustbatch.tasks.config import SuiteTaskConfig
from trustbatch.types import Prompt, RolloutGroup
from trustbatch.utils import hub

ROWS = [
    {"question": "6 * 12?", "solution": "6 * 12 = <<6*12=72>>72\n#### 72", "unit": "eggs"},
    {"question": "A, B or C?", "solution": "C", "unit": ""},
]
COLUMNS = {"problem": "question", "answer": "solution"}


def file_task(path: Path | str, **options: Any) -> FileTask:
    task = build_task("file", seed=0, path=str(path), **options)
    assert isinstance(task, FileTask)
    return task


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    """Write rows in the format of the ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(path))
        return path
    if ".jsonl" in path.suffixes:
        text = "".join(json.dumps(row) + "\n" for row in rows)
    else:
        sign = "\t" if ".tsv" in path.suffixes else ","
        quoted = [
            [f'"{value}"' for value in line] for line in [rows[0], *(r.values() for r in rows)]
        ]
        text = "".join(sign.join(line) + "\n" for line in quoted)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def answers(task: FileTask) -> list[tuple[str, str]]:
    return [(problem.text, problem.answer) for problem in task.problems]


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.csv.gz", "a.tsv", "a.tsv.gz", "a.parquet"]
)
def test_every_format_gives_the_same_problems(tmp_path: Path, name: str) -> None:
    task = file_task(write(tmp_path / name), columns=COLUMNS, extra_columns=["unit"])
    assert answers(task) == [("6 * 12?", "72"), ("A, B or C?", "C")]
    assert task.problems[0].details == {"unit": "eggs"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("problem,answer\n1,2,3\n", "Line 2 of .* has 3 values for 2 columns"),
        ("problem,answer\n1\n", "Line 2 of .* has 1 values for 2 columns"),
        ('problem,answer\n"1,2\n', "Line 2 of .* can't be read .*: fix its quotes"),
        ("problem,problem\n1,2\n", "has the column 'problem' twice"),
        ("problem,answer\n", "has no rows"),
        ("", "has no rows"),
        ("a,b\n1,2\n", "has no field 'problem', but a, b: set task.columns.problem"),
    ],
)
def test_a_broken_table_is_refused(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(ValueError, match=words):
        file_task(tmp_path / "a.csv")


def test_a_bad_line_of_csv_can_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('problem,answer\n1,2\n3\n"4\n5",6\n')
    task = file_task(tmp_path / "a.csv", bad_rows="leave_out")
    assert answers(task) == [("1", "2"), ("4\n5", "6")]


def test_difficulty_of_csv_is_a_number(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("problem,answer,level\na,1,1\nb,1,2.5\nc,1,hard\nd,1,4\n")
    task = file_task(tmp_path / "a.csv", difficulty=[1, 4], columns={"difficulty": "level"})
    assert [problem.text for problem in task.problems] == ["b"]
    assert task.left_out == {"not of level between 1 and 4": 2, "without level": 1}


def test_a_folder_is_read_in_the_order_of_its_files(tmp_path: Path) -> None:
    write(tmp_path / "d" / "b.jsonl", ROWS[1:])
    write(tmp_path / "d" / "a.parquet", ROWS[:1])
    write(tmp_path / "d" / ".hidden.jsonl")
    (tmp_path / "d" / "README.md").write_text("# Data\n")
    task = file_task(tmp_path / "d", columns=COLUMNS)
    assert answers(task) == [("6 * 12?", "72"), ("A, B or C?", "C")]
    assert [Path(file).name for file in task.files.values()] == ["a.parquet", "b.jsonl"]


@pytest.mark.parametrize("layout", ["{}-00000-of-00001.parquet", "{}/0.jsonl", "data/{}.csv"])
def test_a_folder_has_splits(tmp_path: Path, layout: str) -> None:
    write(tmp_path / "d" / layout.format("train"), ROWS[:1])
    write(tmp_path / "d" / layout.format("test"), ROWS[1:])
    assert answers(file_task(tmp_path / "d", columns=COLUMNS)) == [("6 * 12?", "72")]
    assert answers(file_task(tmp_path / "d", columns=COLUMNS, split="test")) == [
        ("A, B or C?", "C")
    ]
    with pytest.raises(ValueError, match=r"has files of test and train: set task.split"):
        file_task(tmp_path / "d", columns=COLUMNS, split="dev")


def test_an_unclear_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder without data files"):
        file_task(tmp_path)
    write(tmp_path / "more.jsonl")
    write(tmp_path / "test.jsonl")
    with pytest.raises(ValueError, match=r"has files of others and test: set task.split"):
        file_task(tmp_path, columns=COLUMNS)


def hub_folder(tmp_path: Path) -> Path:
    """A folder in a layout of the hub, which `load_dataset` reads as it reads the hub's."""
    write(tmp_path / "hub" / "train.jsonl", ROWS)
    write(tmp_path / "hub" / "test.jsonl", ROWS[1:])
    return tmp_path / "hub"


def test_a_data_set_by_its_name(tmp_path: Path) -> None:
    path = f"hf:{hub_folder(tmp_path)}"
    task = file_task(path, columns=COLUMNS)
    assert answers(task) == [("6 * 12?", "72"), ("A, B or C?", "C")]
    row = task.row_of(task.problems[1])
    assert row is not None
    assert row.where == f"row 2 of {path!r}"
    assert answers(file_task(path, columns=COLUMNS, split="test")) == [("A, B or C?", "C")]
    with pytest.raises(ValueError, match=r"Unknown split .*: check task.subset and task.split"):
        file_task(path, columns=COLUMNS, split="dev")


def test_rows_of_the_hub_have_a_fingerprint(tmp_path: Path) -> None:
    folder = hub_folder(tmp_path)
    before = file_task(f"hf:{folder}", columns=COLUMNS).digests
    assert list(before) == [f"hf:{folder}"]
    time.sleep(0.01)
    write(folder / "train.jsonl", ROWS)  # written again, not edited
    assert file_task(f"hf:{folder}", columns=COLUMNS).digests == before
    write(folder / "train.jsonl", [*ROWS[:1], {**ROWS[1], "unit": "cm"}])
    assert file_task(f"hf:{folder}", columns=COLUMNS).digests != before


def test_the_fingerprint_reaches_mixtures_and_curricula(tmp_path: Path) -> None:
    part = {"name": "file", "path": f"hf:{hub_folder(tmp_path)}", "columns": COLUMNS}
    curriculum = {"low": 0.1, "high": 0.9}
    task: Any = build_task("mixture", seed=0, parts=[{**part, "curriculum": curriculum}])
    assert list(task.digests) == [part["path"]]


def test_a_data_set_of_the_hub_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails at once: the client of the hub would wait and try again for half a minute."""
    from huggingface_hub import constants

    def waits(seconds: float) -> None:
        raise AssertionError(f"the client waits {seconds} s to try again")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("trustbatch.tasks.hub_data.hub_is_reachable", lambda: False)
    monkeypatch.setattr(time, "sleep", waits)
    with pytest.raises(ValueError, match=r"no-such/data could not be fetched .* or go online"):
        file_task("hf:no-such/data")
    assert constants.HF_HUB_OFFLINE is False


def test_a_proxy_resolves_the_name_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    hub.hub_is_reachable.cache_clear()
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    assert hub.hub_is_reachable()
    hub.hub_is_reachable.cache_clear()


def test_folders_of_save_to_disk(tmp_path: Path) -> None:
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(str(tmp_path / "one"))
    task = file_task(tmp_path / "one", columns=COLUMNS)
    assert answers(task) == [("6 * 12?", "72"), ("A, B or C?", "C")]
    assert [Path(file).suffix for file in task.files.values()] == [".arrow"]
    with pytest.raises(ValueError, match=r"has no splits: remove task.split"):
        file_task(tmp_path / "one", columns=COLUMNS, split="test")
    several = datasets.DatasetDict({"a": one, "b": one.select([1])})
    several.save_to_disk(str(tmp_path / "several"))
    with pytest.raises(ValueError, match=r"has several splits: set task.split to a or b"):
        file_task(tmp_path / "several", columns=COLUMNS)
    assert len(file_task(tmp_path / "several", columns=COLUMNS, split="b").problems) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"columns": {"problems": "q"}}, r"has 'problems' .did you mean 'problem'"),
        ({"columns": {"problem": 1}}, r"columns.problem = 1 must be the name of a column"),
        ({"columns": {"problem": ""}}, r"columns.problem = '' must be the name of a column"),
        ({"columns": "question"}, "task.columns is a table"),
        (
            {"columns": COLUMNS, "extra_columns": ["size"]},
            "no field 'size'.*set task.extra_columns",
        ),
        ({"columns": COLUMNS, "subset": "main"}, "task.subset is of a data set on the hub"),
        ({"columns": COLUMNS, "split": "test"}, "task.split selects a split of a folder or"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        file_task(write(tmp_path / "a.jsonl"), **options)


def test_data_without_answers(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"problem": "Say something kind."}])
    with pytest.raises(ValueError, match="has no field 'answer', but problem"):
        file_task(tmp_path / "a.jsonl")
    task = file_task(tmp_path / "a.jsonl", columns={"answer": ""})
    assert answers(task) == [("Say something kind.", "")]


def test_a_suite_takes_data_sets_by_name() -> None:
    entry = SuiteTaskConfig.model_validate({"name": "hf:a/b", "split": "test", "columns": COLUMNS})
    assert entry.is_file
    with pytest.raises(ValueError, match="no option 'colums'"):
        SuiteTaskConfig.model_validate({"name": "hf:a/b", "colums": COLUMNS})


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


CHAT = [
    message("system", "Be brief."),
    message("user", "1+1=?"),
    message("assistant", "2"),
    message("user", [{"type": "text", "text": "And "}, {"type": "text", "text": "2+2=?"}]),
    message("assistant", r"It is \boxed{4}."),
]


def test_a_conversation_keeps_its_turns(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"messages": CHAT}, {"messages": [message("user", "3+3=?")]}])
    with pytest.raises(ValueError, match=r"Line 2 .* no field 'answer', but messages"):
        file_task(tmp_path / "a.jsonl")
    write(tmp_path / "a.jsonl", [{"messages": CHAT}, {"messages": CHAT[3:4], "answer": "5"}])
    task = file_task(tmp_path / "a.jsonl", system="Think.", template="{problem} Answer:")
    first, second = task.problems
    assert (first.system, first.text, first.answer) == ("Be brief.", "And 2+2=? Answer:", "4")
    assert first.history == tuple(CHAT[1:3])
    assert (second.system, second.answer, second.history) == ("Think.", "5", ())
    assert list(task.statements()) == ["1+1=?\n2\nAnd 2+2=?", "And 2+2=?"]


def test_a_named_answer_column_comes_before_the_last_message(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"chat": CHAT, "truth": "four"}])
    task = file_task(tmp_path / "a.jsonl", columns={"problem": "chat", "answer": "truth"})
    assert answers(task) == [("And 2+2=?", "four")]


def test_a_system_message_from_a_column(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"problem": "1", "answer": "2", "role": "You are a duck."}])
    task = file_task(tmp_path / "a.jsonl", columns={"system": "role"})
    assert task.problems[0].system == "You are a duck."


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([message("tool", "x")], r"message 1 of 'messages' with the role 'tool': use system, user"),
        ([{"role": "user"}], "message 1 of 'messages' without a role and content"),
        ([message("user", None)], "message 1 of 'messages' whose content is no text"),
        ([message("user", [{"type": "image"}])], "with a part that is no text"),
        ([message("assistant", "x")], "no message of the user in 'messages' to answer to"),
        ([message("user", "x"), message("system", "y")], "system message .* that is not the first"),
        ([message("user", " ")], "has an empty problem"),
        ([], "has 'messages' = a list of 0 entries"),
    ],
)
def test_broken_conversations_are_refused(
    tmp_path: Path, messages: list[dict[str, Any]], words: str
) -> None:
    write(tmp_path / "a.jsonl", [{"messages": messages, "answer": "1"}])
    with pytest.raises(ValueError, match=words):
        file_task(tmp_path / "a.jsonl")


SUMS = (message("user", "1+1="), message("assistant", "2"))
HISTORY: Any = Prompt(id="0", text="3+4=", answer="", system="5", history=SUMS)  # type: ignore[arg-type]


def test_a_chat_template_renders_all_messages() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ {'system': '7', 'user': '8', 'assistant': '9'}[m.role] }}"
        "-{{ m.content }}{% endfor %}"
    )
    decoded = tokenizer.decode(encode_prompt(tokenizer, HISTORY)).replace(" ", "")
    assert decoded == "7-58-1+1=9-28-3+4="


def test_a_model_without_a_template_reads_messages_as_paragraphs() -> None:
    class Characters:
        chat_template = None

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return list(text.encode())

    tokenizer: Any = Characters()
    assert bytes(encode_prompt(tokenizer, HISTORY)) == b"5\n\n1+1=\n\n2\n\n3+4="


def test_a_history_survives_a_checkpoint() -> None:
    group = RolloutGroup(prompt=HISTORY, prompt_token_ids=(1,), completions=())
    record = json.loads(json.dumps(group_to_record(group)))
    assert group_from_record(record) == group
    del record["prompt"]["history"]  # of a version without the field
    assert group_from_record(record).prompt.history == ()


def test_a_data_set_that_was_edited_is_noticed_when_its_run_is_resumed(
    tiny_folder: Path, tmp_path: Path
) -> None:
    sums = [{"problem": f"{n}+{n}=", "answer": str(2 * n), "note": "a"} for n in range(4)]
    write(tmp_path / "hub" / "train.jsonl", sums)
    tables: dict[str, Any] = {
        "model": str(tiny_folder),
        "data": f"hf:{tmp_path / 'hub'}",
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_tokens": 4},
        "run": {"name": "hub", "folder": str(tmp_path), "checkpoint_every": 1},
    }
    trustbatch.train(**tables, training={"steps": 1})
    write(tmp_path / "hub" / "train.jsonl", [{**row, "note": "b"} for row in sums])
    with pytest.raises(ConfigError, match=r"hf:.*hub was edited after step-1 of .*hub was written"):
        trustbatch.train(**tables, training={"steps": 2})
    write(tmp_path / "hub" / "train.jsonl", sums)
    assert trustbatch.train(**tables, training={"steps": 2}).steps == 2
