"""trustbatch from Python: rewards, data, objectives and models as objects; names; results."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pytest
from tests.support.pool_graders import brevity
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import trustbatch
from trustbatch.build.arguments import read_arguments
from trustbatch.config import load_config
from trustbatch.errors import ConfigError
from trustbatch.objectives import Objective, Totals, build_objective
from trustbatch.objectives.metrics import Metrics
from trustbatch.objectives.token_batch import TokenBatch
from trustbatch.rewards.base import Sample
from trustbatch.rewards.functions import BatchFunctionTerm, FunctionTerm
from trustbatch.types import Prompt

ROOT = Path(__file__).parents[1]
ROWS = [
    {"problem": "1+1=", "answer": "2", "level": 1},
    {"problem": "2+2=", "answer": "4", "level": 2},
    {"problem": "3+3=", "answer": "6", "level": 3},
]
SMALL: dict[str, Any] = {
    "rollout": {"prompts_per_step": 2, "samples_per_prompt": 4, "max_tokens": 4},
    "training": {"steps": 1},
}


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def by_level(completion: str, answer: str, level: int) -> float:
    return float(level)


def sample(details: dict[str, Any] | None = None) -> Sample:
    prompt = Prompt(id="0", text="P", answer="A", details=details or {})
    return Sample(prompt=prompt, completion="C", num_tokens=1)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda completion: [completion], ["C"]),
        (lambda answer, completion: [answer, completion], ["A", "C"]),
        (lambda a, b, c: [a, b, c], ["P", "C", "A"]),
        (lambda a, b, c, details: [a, b, c, details], ["P", "C", "A", {"unit": "cm"}]),
        (lambda completion, unit: [completion, unit], ["C", "cm"]),
        (lambda completion, size=7: [completion, size], ["C", 7]),
        (lambda completion, *, unit: [completion, unit], ["C", "cm"]),
        (lambda completion, **row: [completion, row["unit"], row["answer"]], ["C", "cm", "A"]),
    ],
)
def test_a_function_takes_what_it_names(function: Any, expected: Any) -> None:
    assert FunctionTerm(path=function).grade(sample({"unit": "cm"})) == expected


def test_a_function_of_a_batch_takes_what_it_names() -> None:
    def in_trl(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        assert columns["unit"] == ["cm", None]
        return [float(a + c == "AC") for a, c in zip(answer, completions, strict=True)]

    samples = [sample({"unit": "cm"}), sample()]
    assert BatchFunctionTerm(path=in_trl)(samples) == [1.0, 1.0]


def test_a_missing_column_is_named() -> None:
    with pytest.raises(TypeError, match=r"it takes 'unit', .* add the column to task.extra_col"):
        FunctionTerm(path=lambda completion, unit: 1.0).grade(sample())


def test_rewards_and_data_from_python(tiny_folder: Path, in_folder: Path) -> None:
    """A closure over a local can't be imported; it is graded in a process with limits anyway."""
    weight = 3.0

    def local(completion: str, level: int) -> float:
        return weight * level + os.getpid() * 1e-9

    result = trustbatch.train(
        model=str(tiny_folder), data=ROWS, reward=[brevity, local, "task"], **SMALL
    )
    assert result.folder == Path("runs/p3o-data")
    (line,) = result.metrics
    assert line["reward/failed"] == 0
    assert 0 < line["reward/brevity/mean"] <= 1
    assert line["reward/local/mean"] == pytest.approx(3 * 2, abs=3.1)
    process = (line["reward/local/mean"] % 0.5) * 1e9
    assert process > 0
    assert abs(process - os.getpid()) > 0.5
    assert set(line) >= {"reward/task/mean"}
    config = load_config(result.folder / "config.toml")
    assert config.reward.terms[0].options == {"path": "tests.support.pool_graders:brevity"}
    assert config.task.options["extra_columns"] == ["level"]
    rows = Path(config.task.options["path"]).read_text().splitlines()
    assert [json.loads(row) for row in rows] == ROWS
    assert repr(result) == f"RunResult('runs/p3o-data', 1 steps, reward {result.reward:.3f})"


def test_a_function_that_hangs_is_killed(tiny_folder: Path) -> None:
    def hangs(completion: str, level: int) -> float:
        while level == 1:
            pass
        return 1.0

    reward = {"terms": [hangs], "time_limit": 1.0, "workers": 2}
    task = {"shuffle": False}
    result = trustbatch.train(model=str(tiny_folder), data=ROWS, task=task, reward=reward, **SMALL)
    assert result.metrics[0]["reward/timed_out"] == 4


SCRIPT = """
import sys, trustbatch
from trustbatch.objectives import Objective

class Plain(Objective):
    def policy_loss(self, tokens, totals):
        return -totals.per_token(tokens.advantage * tokens.logp), {{}}

def reward(completion):
    return {value}

for run, steps in {runs}:
    result = trustbatch.train(
        model=sys.argv[1], task="arithmetic", reward=reward, objective=Plain,
        rollout={{"prompts_per_step": 2, "samples_per_prompt": 2, "max_tokens": 4}},
        training={{"steps": steps}}, run={{"checkpoint_every": 1, **run}},
    )
    print(result, [line["reward/failed"] for line in result.metrics])
"""


def run_script(folder: Path, model: Path, **values: Any) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT.format(**values))
    return subprocess.run(
        [sys.executable, "script.py", str(model)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_functions_and_classes_of_a_script(tiny_folder: Path, in_folder: Path) -> None:
    """They resume, and an edit is noticed by their source; other lines may change."""
    runs: list[Any] = [({"name": "mine"}, 1), ({}, 1), ({}, 1)]
    first = run_script(in_folder, tiny_folder, value="len(completion)", runs=runs)
    assert first.stdout.count("[0.0]") == 3, first.stderr
    assert first.stdout.count("RunResult('runs/Plain-arithmetic', 1 steps") == 2
    assert "can't be sent to another process" not in first.stderr
    # another process resumes it, although the class and the function can't be imported
    again = run_script(
        in_folder, tiny_folder, value="len(completion)", runs=[({"name": "mine"}, 2)]
    )
    assert "mine continues after step 1" in again.stderr, again.stderr
    assert "[0.0, 0.0]" in again.stdout
    # an edited function gets a run of its own, and is refused where the run is named
    edited = run_script(
        in_folder, tiny_folder, value="-len(completion)", runs=[({}, 1), ({"name": "mine"}, 3)]
    )
    assert "RunResult('runs/Plain-arithmetic-2', 1 steps" in edited.stdout, edited.stderr
    assert "the function reward was edited after step-2 of runs/mine was written" in edited.stderr


def test_what_is_no_reward_is_refused(tiny_folder: Path) -> None:
    async def later(completion: str) -> float:
        return 1.0

    for reward, words in (
        (7, "reward has 7: give functions"),
        (later, "later is asynchronous: give a plain function"),
        ("mth", r"no reward term 'mth' .did you mean 'math'"),
        (by_level, r"takes 'level', which is no column of the data: rename the parameter"),
        (lambda text: 1.0, r"must take .prompt, completion, answer., but it takes .text."),
        ([lambda completion: 1.0, lambda completion: 2.0], ""),
    ):
        if not words:
            arguments = read(task="arithmetic", reward=reward)
            assert [term.part for term in arguments.config().reward.terms] == ["reward1", "reward2"]
            continue
        with pytest.raises(ConfigError, match=words):
            trustbatch.train(model=str(tiny_folder), task="arithmetic", reward=reward, **SMALL)


def read(**given: Any) -> Any:
    empty = dict.fromkeys(("tokenizer", "task", "data", "reward"))
    return read_arguments(**{**empty, "model": "m", "objective": "p3o", "tables": {}, **given})


def test_columns_that_functions_take_are_kept() -> None:
    def everything(completion: str, **row: Any) -> float:
        return 1.0

    table = read(data=ROWS, reward=by_level).config().task.options
    assert table["extra_columns"] == ["level"]
    assert read(data=ROWS, reward=everything).config().task.options == table
    with pytest.raises(ConfigError, match=r"'size', which is no column of the data .*\"level\""):
        read(data=ROWS, reward=lambda completion, size: 1.0)
    assert read(data="a.jsonl", reward=by_level).config().task.options == {
        "path": "a.jsonl",
        "extra_columns": ["level"],
    }


def test_data_without_answers_needs_a_reward_of_its_own() -> None:
    rows = [{"problem": "Say something."}]
    assert read(data=rows, reward=brevity).config().task.options["columns"] == {"answer": ""}
    assert "columns" not in read(data=rows).config().task.options


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "data has no rows"),
        (7, "data is of type int: give a list"),
        ([7], r"data\[0\] is 7: give a dictionary"),
        ([{"problem": object()}], r"data\[0\] has a value that is no text"),
        (iter([{}]), "data is of type list_iterator"),
        ({"train": []}, "several splits or columns"),
    ],
)
def test_what_is_no_data_is_refused(data: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(data=data)


def test_arguments_that_contradict_each_other_are_refused(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to train on: give a task, or data"):
        read()
    with pytest.raises(ConfigError, match=r"task.path and data are both given"):
        read(task={"name": "file", "path": "a.jsonl"}, data=ROWS)
    with pytest.raises(ConfigError, match="tokenizer is for a model that is an object"):
        read(task="arithmetic", tokenizer=object())
    with pytest.raises(ConfigError, match="model is of type int"):
        read(task="arithmetic", model=7)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    with pytest.raises(ConfigError, match="needs its tokenizer"):
        read(task="arithmetic", model=model)


def test_a_data_set_and_a_model_as_objects(tiny_folder: Path, in_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    before = [parameter.clone() for parameter in model.parameters()]
    arguments: dict[str, Any] = {
        "model": model,
        "tokenizer": AutoTokenizer.from_pretrained(tiny_folder),
        "data": datasets.Dataset.from_list(ROWS),
        "rollout": SMALL["rollout"],
        "run": {"name": "objects", "checkpoint_every": 1},
    }
    first = trustbatch.train(**arguments, training={"steps": 1})
    again = trustbatch.train(**arguments, training={"steps": 2})
    assert again.folder == first.folder
    assert again.metrics[0] == first.metrics[0]  # it was continued
    for parameter, kept in zip(model.parameters(), before, strict=True):
        assert parameter.equal(kept)  # a copy is trained
    (saved,) = again.folder.glob("model-*")
    assert load_config(again.folder / "config.toml").model.name == str(saved)
    with pytest.raises(ConfigError, match=r"holds a run with another configuration .task.path was"):
        trustbatch.train(**{**arguments, "data": ROWS[:2]}, training={"steps": 2})
    assert len(list(again.folder.glob("data-*.jsonl"))) == 1


@dataclass(frozen=True, kw_only=True)
class Mine(Objective):
    strength: float = 1.0

    def policy_loss(self, tokens: TokenBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        return -self.strength * totals.per_token(tokens.advantage * tokens.logp), {}


def test_objectives_as_objects() -> None:
    def table(objective: Any) -> dict[str, Any]:
        return read(task="arithmetic", objective=objective).config().to_dict()["objective"]

    assert table("p3o") == table(build_objective("p3o"))
    assert table(build_objective("grpo", clip_high=0.4))["clip_high"] == 0.4
    assert table(type(build_objective("grpo")))["name"] == "grpo"
    assert table(Mine(strength=2.0)) == {"name": f"{__name__}:Mine", "strength": 2.0}
    with pytest.raises(ConfigError, match="objective = 7 is none: give a name"):
        table(7)


def test_an_objective_defined_inside_a_function_trains(tiny_folder: Path) -> None:
    class Local(Mine):
        pass

    result = trustbatch.train(
        model=str(tiny_folder), task="arithmetic", objective=Local(strength=0.5), **SMALL
    )
    assert result.folder == Path("runs/Local-arithmetic")
    assert load_config(result.folder / "config.toml").objective.build() == Local(strength=0.5)


def test_runs_without_a_name_never_clash(tiny_folder: Path) -> None:
    def train(**changed: Any) -> trustbatch.RunResult:
        return trustbatch.train(model=str(tiny_folder), task="arithmetic", **{**SMALL, **changed})

    first = train()
    assert first.folder == Path("runs/p3o-arithmetic")
    assert train(seed=1).folder == Path("runs/p3o-arithmetic-2")
    assert train().folder == first.folder
    assert train(seed=1).folder == Path("runs/p3o-arithmetic-2")
    assert train(objective="grpo").folder == Path("runs/grpo-arithmetic")
    with pytest.raises(ConfigError, match="holds a run with another configuration"):
        train(run={"name": "p3o-arithmetic"}, seed=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> trustbatch.RunResult:
    folder = tmp_path_factory.mktemp("api")
    return trustbatch.train(
        model=str(tiny_folder), task="arithmetic", **SMALL, run={"folder": str(folder)}
    )


def test_a_report(run: trustbatch.RunResult, in_folder: Path) -> None:
    page = trustbatch.report(run)
    assert page.path == run.folder / "report.html"
    assert page.path.is_file()
    assert f'href="{page.path}"' in page._repr_html_()
    assert trustbatch.report(run.folder, output="a.html").path == Path("a.html")
    with pytest.raises(ConfigError, match="no run to report on"):
        trustbatch.report()


def test_an_inspection(run: trustbatch.RunResult) -> None:
    found = trustbatch.inspect(run, objectives=["p3o", "grpo"], fresh_samples=0)
    assert [row.label for row in found.rows][:2] == ["p3o", "grpo"]
    assert "p3o-arithmetic, step 2" in repr(found)
    assert len(repr(found)) < 2000
    assert "<pre" in found._repr_html_()


def test_a_diagnosis(tiny_folder: Path) -> None:
    config = {"model": str(tiny_folder), "task": "arithmetic", "rollout": {"max_tokens": 4}}
    found = trustbatch.doctor(config, tokens=64)
    assert found.is_on_policy
    assert repr(found).startswith("On-policy up to the rounding of float32")
    assert "<pre" in found._repr_html_()
    assert found.to_record()["on_policy"] is True
    assert trustbatch.doctor.__name__ == "trustbatch.doctor"  # the package is the function


def test_an_evaluation(run: trustbatch.RunResult, tiny_folder: Path) -> None:
    found = trustbatch.evaluate(run, str(tiny_folder), samples=2, max_tokens=4, limit=8)
    assert len(found.models) == 2
    (scores,) = found.scores["p3o-arithmetic-step-1"]
    assert scores.num_problems == 8
    assert "| arithmetic |" in repr(found)
    assert "<pre>" in found._repr_html_()
    assert len(found.comparisons) == 1
    with pytest.raises(ConfigError, match=r"is no run that has one: name it .* tasks="):
        trustbatch.evaluate(str(tiny_folder))
    other = trustbatch.evaluate(
        run,
        tasks=[{"name": "arithmetic", "level": 1}],
        samples=1,
        max_tokens=4,
        limit=4,
        output="others",
    )
    assert next(iter(other.scores.values()))[0].num_problems == 4


def test_importing_the_package_does_not_import_torch() -> None:
    code = (
        "import sys, trustbatch; assert dir(trustbatch); assert 'torch' not in sys.modules; "
        "import trustbatch.doctor; assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)


def test_the_package_says_that_it_has_types() -> None:
    assert (ROOT / "src" / "trustbatch" / "py.typed").is_file()
