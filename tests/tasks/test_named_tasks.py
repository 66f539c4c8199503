"""The tasks that have a name: their data, and what is left out of it."""

import copy
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from huggingface_hub import constants
from tests.support.shared_data import shared_data
from tests.tasks.test_tasks import write_rows

from trustbatch.cli import main
from trustbatch.errors import ConfigError
from trustbatch.models.tiny import build_tokenizer
from trustbatch.models.tokenization import count_prompt_tokens, encode_prompt
from trustbatch.tasks import TASKS, ProblemSet, build_task, fit_task, without_overlap
from trustbatch.tasks.filters import excluded, normalized_words
from trustbatch.tasks.problems import ProblemTask
from trustbatch.tasks.rows import PromptChecks

FILES = {
    "gsm8k": ("gsm8k_train", 7473),
    "deepscaler": ("deepscaler_preview_31k", 30869),
    "math500": ("math500", 500),
    "countdown": ("countdown_train", 16384),
    "aime24": ("aime24", 30),
    "aime25": ("aime25", 30),
    "aime26": ("aime26", 30),
    "amc23": ("amc23", 40),
    "amo_bench": ("amo_bench_p", 39),
}


def named(name: str, **options: Any) -> ProblemTask:
    task = build_task(name, seed=0, **options)
    assert isinstance(task, ProblemTask)
    return task


def local(name: str, **options: Any) -> ProblemTask:
    return named(name, path=str(shared_data(f"{FILES[name][0]}.jsonl.gz")), **options)


@pytest.mark.parametrize("name", FILES)
def test_the_local_files_work_as_they_are(name: str) -> None:
    task = local(name)
    assert len(task.problems) == FILES[name][1]
    assert isinstance(task, ProblemSet)
    prompt = task.prompt(0)
    assert prompt.task == task.name == name
    assert prompt.text.endswith("put your final answer within \\boxed{}.")
    assert prompt.answer
    assert len({task.prompt(index).id for index in range(2 * len(task.problems))}) == 2 * len(
        task.problems
    )


@pytest.mark.parametrize("name", FILES)
def test_answers_are_graded(name: str) -> None:
    task = local(name)
    for problem in task.problems[:20]:
        assert task.grade(problem, f"It is \\boxed{{{problem.answer}}}.") == 1.0
        assert task.grade(problem, "It is \\boxed{123456789}.") == 0.0


def test_graders_get_the_details_of_a_row() -> None:
    countdown = local("countdown").problems[0]
    assert countdown.details == {"numbers": [5, 20, 7, 5], "target": 140}
    kinds = [problem.details["answer_type"] for problem in local("amo_bench").problems]
    assert {kind: kinds.count(kind) for kind in kinds} == {"number": 34, "set": 3, "variable": 2}


HUB_ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gsm8k": (
        "main/train-00000-of-00001.parquet",
        {"question": "How many?", "answer": "2 * 36 = <<2*36=72>>72\n#### 72"},
        {"answer": "72"},
    ),
    "deepscaler": (
        "deepscaler.json",
        {"problem": "How many?", "answer": "7", "solution": ""},
        {"answer": "7"},
    ),
    "math500": (
        "test.jsonl",
        {"problem": "How many?", "answer": "7", "unique_id": "test/a/1.json", "level": 2},
        {"answer": "7", "id": "test/a/1.json"},
    ),
    "countdown": (
        "data/train-00000-of-00001.parquet",
        {"target": 98, "nums": [44, 19, 35]},
        {"answer": "98", "details": {"numbers": [44, 19, 35], "target": 98}},
    ),
    "aime24": ("data/train-00000-of-00001.parquet", {"problem": "?", "answer": "204"}, {}),
    "aime25": ("test.jsonl", {"problem": "?", "answer": "70", "id": "0"}, {"id": "0"}),
    "aime26": (
        "data/train-00000-of-00001.parquet",
        {"problem_idx": 1, "problem": "?", "answer": 277},
        {"id": "1", "answer": "277"},
    ),
    "amc23": (
        "test-00000-of-00001.parquet",
        {"id": 0, "question": "?", "answer": 27.0},
        {"id": "0", "answer": "27.0"},
    ),
    "amo_bench": (
        "data/test-00000-of-00001.parquet",
        {"question_id": 3, "prompt": "?", "answer": "6", "answer_type": "number"},
        {"id": "3", "details": {"answer_type": "number"}},
    ),
}


@pytest.mark.parametrize("name", HUB_ROWS)
def test_the_hubs_files_are_read_from_its_cache(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder as the hub's client leaves it; rows as the data sets have them."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    file, row, expected = HUB_ROWS[name]
    repository = TASKS[name].hub.repository
    folder = tmp_path / f"datasets--{repository.replace('/', '--')}"
    commit = "0123456789012345678901234567890123456789"
    path = folder / "snapshots" / commit / file
    path.parent.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    # the first of countdown's rows are for evaluation
    rows = [row] if name != "countdown" else [{"target": 1, "nums": [1]}] * 1024 + [row]
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        write_rows(path, rows)
    task = named(name)
    assert len(task.problems) == 1
    for field, value in expected.items():
        assert getattr(task.problems[0], field) == value
    if name == "countdown":
        assert task.problems[0].text.startswith(
            "Using the numbers [44, 19, 35], create an equation that equals 98. You can"
        )
        assert named(name, split="test").problems[0].details["target"] == 1
    with pytest.raises(ValueError, match=r"has no split 'dev': set task.split to "):
        named(name, split="dev")
    with pytest.raises(ValueError, match=r"remove it, or remove task\.path"):
        named(name, path=str(path), split="test")


def test_descriptions_need_a_judge_and_are_left_out(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"question_id": n, "prompt": f"p{n}", "answer": "6", "answer_type": kind}
        for n, kind in enumerate(["number", "description"])
    ]
    task = named("amo_bench", path=str(write_rows(tmp_path / "a.jsonl", rows)))
    assert [problem.id for problem in task.problems] == ["0"]


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as its client asks for: what there is, and one file."""

    content = b'{"question": "How many?", "answer": "#### 7"}\n'
    commit = "0123456789012345678901234567890123456789"
    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        body = self.content
        if "/api/datasets/openai/gsm8k" in self.path:
            names = ["README.md", "main/test-0.jsonl", "socratic/test-0.jsonl"]
            siblings = [{"rfilename": name} for name in names]
            body = json.dumps(
                {"id": "openai/gsm8k", "sha": self.commit, "siblings": siblings}
            ).encode()
        self.send_response(200)
        self.send_header("X-Repo-Commit", self.commit)
        self.send_header("ETag", f'"{hash(self.path)}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_data_is_fetched_once(tmp_path: Path) -> None:
    """With the hub's own client, from a server on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = (
        "from trustbatch.tasks.benchmarks import Gsm8k, HubDataset\n"
        "Gsm8k.hub = HubDataset('openai/gsm8k', {'test': 'main/test-*'})\n"
        "for _ in range(2): print(Gsm8k().problems[0].answer)\n"
    )
    address = f"http://127.0.0.1:{server.server_address[1]}"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    server.shutdown()
    assert result.stdout.split() == ["7", "7"], result.stderr
    fetched = [request for request in Hub.asked if request.startswith("GET /datasets")]
    assert fetched == ["GET /datasets/openai/gsm8k/resolve/main/main/test-0.jsonl"]


def test_an_unreachable_hub_fails_at_once(tmp_path: Path) -> None:
    code = "from trustbatch.tasks import build_task; build_task('gsm8k', seed=0)"
    start = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "HF_HOME": str(tmp_path),
            "HF_ENDPOINT": "http://127.0.0.1:9",
            "HF_HUB_OFFLINE": "0",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert time.monotonic() - start < 20
    last = result.stderr.strip().splitlines()[-1]
    assert "The data set openai/gsm8k could not be fetched from the hub" in last
    assert last.endswith("give a file with task.path, or go online.")


def test_problems_are_compared_by_words_and_numbers() -> None:
    assert normalized_words("What is $2 + 3$?") == normalized_words("what is 2+3")
    assert normalized_words("[14, 11, 22]") != normalized_words("[14, 11, 2, 2]")
    assert normalized_words("\\frac{1}{2}") == normalized_words("\\frac 1 2")
    assert normalized_words("¿Qué es \uff12?") == "qué es 2"
    assert normalized_words(r"\left\{2 x^{3}\right\}") == normalized_words(r"\{2x^3\}")
    assert (
        normalized_words(r"\dfrac{1}{2} \text{ cm}")
        == normalized_words(r"\frac{1}{2} cm")
        == "frac 1 2 cm"
    )
    assert normalized_words(r"\alpha_{1}") == normalized_words(r"\alpha_1")
    assert normalized_words(r"\leftarrow") == "leftarrow"


def rows_file(tmp_path: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    return str(write_rows(tmp_path / name, rows))


def test_duplicates_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [
        {"problem": "What is $2+3$?", "answer": "5"},
        {"problem": "what is 2 + 3", "answer": "5."},
        {"problem": "What is 2-3?", "answer": "-1"},
    ]
    path = rows_file(tmp_path, rows)
    task = named("gsm8k", path=path)
    assert task.describe() == "gsm8k: 2 problems; left out: 1 duplicates"
    assert [problem.id for problem in task.problems] == ["0", "2"]
    assert len(named("gsm8k", path=path, deduplicate=False).problems) == 3
    assert len(named("file", path=path).problems) == 3
    assert len(named("file", path=path, deduplicate=True).problems) == 2


def test_difficulty_is_between_two_numbers(tmp_path: Path) -> None:
    rows = [
        {"problem": f"p{d}", "answer": "1", "difficulty": d} for d in (0, 0.1, 50, 99.9, 100, None)
    ] + [{"problem": "p", "answer": "1"}]
    task = named("deepscaler", path=rows_file(tmp_path, rows), difficulty=[0, 100])
    assert [problem.id for problem in task.problems] == ["1", "2", "3"]
    assert task.left_out == {
        "not of difficulty between 0 and 100": 2,
        "without difficulty": 2,
    }
    with pytest.raises(ValueError, match=r"The filters .* widen them"):
        named("deepscaler", path=rows_file(tmp_path, rows), difficulty=[200, 300])
    with pytest.raises(ValueError, match="must be two numbers"):
        named("deepscaler", path=rows_file(tmp_path, rows), difficulty=3)
    with pytest.raises(ValueError, match="give the lower one first"):
        named("deepscaler", path=rows_file(tmp_path, rows), difficulty=[3, 2])


def test_the_real_difficulties() -> None:
    task = local("deepscaler", difficulty=[0, 100], deduplicate=False)
    assert len(task.problems) == 22_174
    assert len(local("math500", difficulty=[2, 5], columns={"difficulty": "level"}).problems) == 233


def test_training_never_sees_problems_of_the_evaluation(tmp_path: Path) -> None:
    rows = [{"problem": f"Problem number {n}.", "answer": n} for n in range(5)]
    train = rows_file(tmp_path, rows)
    held_out = rows_file(tmp_path, [{"question": "problem NUMBER  3?"}], "held_out.jsonl")
    task = named("gsm8k", path=train, exclude=[held_out])
    assert [problem.answer for problem in task.problems] == ["0", "1", "2", "4"]
    assert task.describe() == "gsm8k: 4 problems; left out: 1 also in held_out.jsonl"

    other = named("file", path=rows_file(tmp_path, rows[:2], "two.jsonl"))
    rest = without_overlap(task, [other, build_task("arithmetic", seed=0)])
    assert isinstance(rest, ProblemTask)
    assert [problem.answer for problem in rest.problems] == ["2", "4"]
    assert rest.describe().endswith("1 also in held_out.jsonl, 2 also in the evaluation file")
    with pytest.raises(ConfigError, match="leave nothing"):
        without_overlap(other, [other])
    with pytest.raises(ValueError, match="which is an endless task"):
        named("gsm8k", path=train, exclude=["arithmetic"])
    with pytest.raises(ValueError, match="must be a list"):
        named("gsm8k", path=train, exclude=held_out)
    with pytest.raises(ValueError, match="has no field problem, question, prompt"):
        named("gsm8k", path=train, exclude=[rows_file(tmp_path, [{"a": 1}], "b.jsonl")])


def test_what_the_real_training_and_evaluation_files_share() -> None:
    evaluations = [str(shared_data(f"{FILES[n][0]}.jsonl.gz")) for n in FILES if FILES[n][1] < 600]
    task = local("gsm8k", exclude=evaluations)
    assert len(task.problems) == 7473
    assert list(task.left_out.values()) == [0] * len(evaluations)
    texts = [text for file in evaluations for text in excluded(file, seed=0)[0]]
    held_out = {normalized_words(text): text for text in texts}
    shared = [normalized_words(text) for text in local("deepscaler").statements()]
    (only,) = [held_out[words] for words in shared if words in held_out]
    assert only.startswith(
        r"The complex numbers $\alpha_1, \alpha_2, \alpha_3$, and $\alpha_4$ are"
    )


def test_long_prompts_are_left_out_by_the_models_tokens(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"problem": "1+" * n + "1=", "answer": "1"} for n in range(10)]
    path = rows_file(tmp_path, rows)
    tokenizer = build_tokenizer()
    task = build_task("file", seed=0, path=path, max_prompt_tokens=6)
    checks = PromptChecks(
        count_tokens=lambda prompts: count_prompt_tokens(tokenizer, prompts), context_length=1000
    )
    fitted = fit_task(task, checks)
    assert isinstance(fitted, ProblemTask)
    assert [len(problem.text) for problem in fitted.problems] == [2, 4, 6]
    assert fitted.describe() == "file: 3 problems; left out: 7 longer than 6 tokens"
    with pytest.raises(ConfigError, match="leave nothing"):
        fit_task(build_task("file", seed=0, path=path, max_prompt_tokens=1), checks)

    config = tmp_path / "config.toml"
    config.write_text(
        f"[model]\nname = '{tiny_folder}'\n[task]\nname = 'file'\npath = '{path}'\n"
        f"max_prompt_tokens = 6\n[rollout]\nprompts_per_step = 2\nmax_tokens = 3\n"
        f"[training]\nsteps = 1\n[run]\nfolder = '{tmp_path}'\n"
    )
    assert main(["train", str(config), "--dry-run"]) == 0
    line = "file: 3 problems; left out: 7 longer than 6 tokens"
    assert f"task        {line}" in capsys.readouterr().out
    assert main(["train", str(config)]) == 0
    assert capsys.readouterr().err.count(line) == 1


CHAT = (
    "{% for m in messages %}{{ {'system': '0', 'user': '1'}[m.role] }}={{ m.content }}"
    "{% endfor %}{% if enable_thinking is defined %}{{ '+' if enable_thinking else '-' }}"
    "{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "options", "expected"),
    [
        (CHAT, {}, "1=7*"),
        (CHAT, {"thinking": True}, "1=7*+"),
        (CHAT, {"thinking": False, "system": "99"}, "0=991=7*-"),
        ("{{ messages[0].content }}", {"thinking": False}, "7*"),
    ],
)
def test_thinking_is_passed_to_the_chat_template(
    tmp_path: Path, template: str, options: dict[str, Any], expected: str
) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    path = rows_file(tmp_path, [{"problem": "7", "answer": "1"}])
    task = build_task("file", seed=0, path=path, template="{problem}*", **options)
    tokens = encode_prompt(tokenizer, task.prompt(0))
    assert tokenizer.decode(tokens) == expected


def test_what_is_sent_to_a_grading_process_is_small(tmp_path: Path) -> None:
    rows = [{"problem": f"{n} and a long text" * 10, "answer": n} for n in range(1000)]
    task = named("file", path=rows_file(tmp_path, rows))
    sent = pickle.dumps(task)
    assert len(sent) < 1000
    assert pickle.loads(sent).grade(task.problems[3], "it is 3") == 1.0
    for twin in (copy.copy(task), copy.deepcopy(task)):
        assert twin.problems == task.problems
        assert twin.without(task.statements()[:1], "there").problems == task.problems[1:]


def test_templates_have_names(tmp_path: Path) -> None:
    path = rows_file(tmp_path, [{"problem": "7", "answer": "1"}])
    assert build_task("gsm8k", seed=0, path=path, template="plain").prompt(0).text == "7"
    boxed = build_task("file", seed=0, path=path, template="boxed").prompt(0).text
    assert boxed == "7\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    with pytest.raises(ValueError, match="did you mean 'boxed'"):
        build_task("gsm8k", seed=0, path=path, template="boxd")


OWN = Path(__file__).parents[1] / "support" / "own_task.py"


def test_a_task_can_be_named_by_its_path() -> None:
    assert build_task(f"{OWN}:Plain", seed=0, first=3).prompt(1).text == "3+1="
    assert build_task(f"{OWN}:MADE", seed=0).prompt(1).text == "7+1="
    assert build_task("tests.support.own_task:Short", seed=5, highest=0).prompt(0).task == "short"
    for name, options, words in [
        (f"{OWN}:Plane", {}, r"has no Plane \(did you mean 'Plain'\?\)"),
        (
            f"{OWN}:Plain",
            {"frist": 1},
            r"'frist' \(did you mean 'first'\?\); its options are first",
        ),
        (f"{OWN}:MADE", {"first": 1}, "it has no options"),
        ("no_such_module:Task", {}, "No module named 'no_such_module'.*: fix it"),
        ("no_such_file.py:Task", {}, "no_such_file.py does not exist"),
    ]:
        with pytest.raises(ValueError, match=words):
            build_task(name, seed=0, **options)


def test_a_file_with_the_name_of_another_module_is_refused(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("Task = 1\n")
    with pytest.raises(ValueError, match="there is another module 'json': rename"):
        build_task(f"{tmp_path / 'json.py'}:Task", seed=0)
