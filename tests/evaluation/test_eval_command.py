"""`trustbatch eval` and `trustbatch compare` on a real tiny model, killed and started again."""

import contextlib
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.support import forked
from tests.support.shared_data import shared_data

from trustbatch.cli import main
from trustbatch.evaluation import evaluate
from trustbatch.evaluation.models import short_names
from trustbatch.evaluation.sampling import sample_records
from trustbatch.evaluation.settings import SamplingSettings, recorded_settings
from trustbatch.evaluation.suite import TaskChoice, load_suite
from trustbatch.models.policy import Policy
from trustbatch.observe.run_folder import describe_environment
from trustbatch.rewards import Scorer
from trustbatch.rewards.config import RewardConfig
from trustbatch.rollout.config import RolloutConfig
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.tasks import build_task
from trustbatch.types import Completion, GenerationRequest

OWN_TASK = Path(__file__).parents[1] / "support" / "own_task.py"
SMALL = ["--task", "arithmetic", "--prompts", "12", "--samples", "4", "--max-tokens", "8"]
FILES = ("results.md", "pass_at_k.html", "samples.jsonl", "settings.json")


def run_eval(*words: object) -> int:
    return main(["eval", *map(str, words)])


def error_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main([*map(str, words)]) == 2
    return " ".join(capsys.readouterr().err.split())


def read_results(folder: Path) -> dict[str, Any]:
    """All but what names the machine and the moment."""
    results = json.loads((folder / "results.json").read_text())
    del results["environment"]
    return results


@pytest.fixture(scope="module")
def other_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with other weights."""
    folder = tmp_path_factory.mktemp("models") / "other"
    policy = Policy.load(str(tiny_folder), device="cpu", precision="float32")
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(0.8)
    policy.save(folder)
    return folder


def test_the_folder_has_table_plot_results_and_every_sample(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_eval(tiny_folder, *SMALL, "--output", tmp_path) == 0
    captured = capsys.readouterr()
    folder = tmp_path / "tiny-arithmetic"
    assert "12/12 problems" in captured.err
    table = (folder / "results.md").read_text()
    assert table in captured.out
    assert "| pass@1 (95% interval) | pass@2 | pass@4 | truncated | ungraded |" in table
    assert "| problems | mean reward (95% interval) | pass@1 " in table
    results = json.loads((folder / "results.json").read_text())
    assert results["settings"]["top_p"] == 0.95
    assert results["environment"]["packages"] == describe_environment()["packages"]
    records = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    outcomes = results["problems"]["arithmetic"]
    assert [record["id"] for record in records] == [outcome["id"] for outcome in outcomes]
    for record, outcome in zip(records, outcomes, strict=True):
        assert len(record["samples"]) == outcome["samples"] == outcome["graded"] == 4
        right = [s["text"].strip() == record["answer"] for s in record["samples"]]
        assert sum(right) == outcome["correct"]
        cut = [s["finish_reason"] == "length" for s in record["samples"]]
        assert sum(cut) == outcome["truncated"]
    (scores,) = results["scores"]
    assert [score["k"] for score in scores["pass_at_k"]] == [1, 2, 3, 4]
    assert scores["truncated_fraction"] > 0
    page = (folder / "pass_at_k.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert '"key":"pass@k"' in page
    first = table.splitlines()[4].strip("| ").split(" | ")
    for place, cell in enumerate(first):
        kind = ' class="number"' if place else ""
        assert f"<td{kind}>{cell}</td>" in page
    assert page.count("<h4>Samples</h4>") == 12
    assert page.count('<div class="sample ') == 12 * 4
    assert page.count('<div class="sample right"') == sum(o["correct"] for o in outcomes)


@pytest.mark.parametrize("num_kept", [0, 5, 12])
def test_an_evaluation_continues_where_it_was_stopped(
    tiny_folder: Path, tmp_path: Path, num_kept: int
) -> None:
    """Also between two problems that are sampled together, and within a line."""
    command = [tiny_folder, *SMALL, "--rollout.max_sequences=8"]
    for name in ("whole", "stopped"):
        assert run_eval(*command, "--output", tmp_path / name) == 0
    whole, stopped = (tmp_path / name / "tiny-arithmetic" for name in ("whole", "stopped"))
    samples = stopped / "samples.jsonl"
    lines = samples.read_bytes().splitlines(keepends=True)
    samples.write_bytes(b"".join(lines[:num_kept]) + lines[0][:57])
    (stopped / "results.json").unlink()
    assert run_eval(*command, "--output", tmp_path / "stopped") == 0
    assert read_results(stopped) == read_results(whole)
    for file in FILES:
        assert (stopped / file).read_text() == (whole / file).read_text(), file


def test_what_is_done_does_not_change_which_problems_are_sampled_together(policy: Policy) -> None:
    """Another batch could round differently and change a token."""

    class NotingEngine(NativeEngine):
        asked: ClassVar[list[list[str]]] = []

        def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
            self.asked.append([request.prompt_id for request in requests])
            return super().generate(requests)

    task = load_suite([TaskChoice("arithmetic")], num_endless=7)[0]
    ids = [problem.id for problem in task.problems]
    settings = SamplingSettings(samples=2, max_tokens=3)
    asked, sampled = {}, {}
    for num_done in (0, 3):
        engine = NotingEngine(policy, seed=0)
        engine.asked.clear()
        records = sample_records(
            engine,
            policy,
            Scorer(task.task),
            task,
            settings,
            max_sequences=4,
            max_turns=1,
            done=ids[:num_done],
        )
        sampled[num_done] = [record for part in records for record in part]
        asked[num_done] = list(engine.asked)
    assert [len(part) for part in asked[0]] == [2, 2, 2, 1]
    assert asked[3] == asked[0][1:]
    assert sampled[3] == sampled[0][3:]


def test_graders_load_while_the_engine_samples(policy: Policy) -> None:
    task = load_suite([TaskChoice(f"{OWN_TASK}:Short")])[0]
    problems = [problem.id for problem in task.problems]
    reward = RewardConfig(workers=5)
    alive: list[int] = []

    class NotingEngine(NativeEngine):
        def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
            alive.append(len(scorer._pools["terms"]._processes))
            return super().generate(requests)

    with contextlib.closing(Scorer(task.task, reward)) as scorer:
        parts = sample_records(
            NotingEngine(policy, seed=0),
            policy,
            scorer,
            task,
            SamplingSettings(samples=2, max_tokens=3),
            max_sequences=8,
            max_turns=1,
            done=problems[1:4],
        )
        assert len(next(iter(parts))) == 1
    assert alive == [2]


@pytest.mark.slow
def test_a_killed_evaluation_gives_the_same_table(tiny_folder: Path, tmp_path: Path) -> None:
    words = [str(tiny_folder), "--task", "arithmetic", "--prompts", "30", "--samples", "8"]
    words += ["--rollout.max_sequences=16"]
    command = ["eval", *words, "--output", "killed"]
    samples = tmp_path / "killed" / "tiny-arithmetic" / "samples.jsonl"
    with forked.command(*command, folder=tmp_path) as process:
        deadline = time.monotonic() + 120
        while not samples.is_file() or samples.read_bytes().count(b"\n") < 5:
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline, "the evaluation makes no progress"
            time.sleep(0.002)
        process.kill()
        process.wait()
    assert not (samples.parent / "results.json").exists()
    with forked.command(*command, folder=tmp_path) as process:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    assert "of them done before" in errors
    assert run_eval(*words, "--output", tmp_path / "whole") == 0
    killed, whole = (tmp_path / name / "tiny-arithmetic" for name in ("killed", "whole"))
    assert read_results(killed) == read_results(whole)
    for file in FILES:
        assert (killed / file).read_bytes() == (whole / file).read_bytes(), file


def test_other_settings_in_the_same_folder_are_refused(
    tiny_folder: Path, other_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "tiny"
    shutil.copytree(tiny_folder, model)
    command = ["eval", model, *SMALL, "--output", tmp_path / "evals"]
    assert main([*map(str, command)]) == 0
    message = error_of(capsys, *command, "--temperature", "0.7")
    assert "holds an evaluation with other settings (temperature was 1.0, now 0.7)" in message
    assert "choose another --output, or delete that folder" in message
    shutil.rmtree(model)
    shutil.copytree(other_folder, model)
    assert "(weights was " in error_of(capsys, *command)


def test_two_models_are_compared_on_the_same_problems(
    tiny_folder: Path, other_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_eval(tiny_folder, other_folder, *SMALL, "--output", tmp_path) == 0
    together = capsys.readouterr().out
    folders = [tmp_path / "tiny-arithmetic", tmp_path / "other-arithmetic"]
    output = tmp_path / "both"
    assert main(["compare", *map(str, folders), "--output", str(output)]) == 0
    table = capsys.readouterr().out.strip()
    assert table in together
    assert (output / "comparison.md").read_text().strip() == table
    verdict = json.loads((output / "comparison.json").read_text())["verdict"]
    assert verdict in table
    page = (output / "pass_at_k.html").read_text()
    assert page.count('"line":') == 2
    longer = tmp_path / "longer"
    assert run_eval(other_folder, *SMALL[:-1], "9", "--output", longer) == 0
    message = error_of(capsys, "compare", folders[0], longer / "other-arithmetic")
    assert "max_tokens = 8 and other with 9: evaluate both with the same" in message
    assert "name the folder of a finished evaluation" in error_of(
        capsys, "compare", folders[0], tmp_path
    )


def test_the_default_max_tokens_is_lowered_to_the_context(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [tiny_folder, "--task", "arithmetic", "--prompts", "2", "--samples", "1"]
    words += ["--output", tmp_path]
    assert run_eval(*words) == 0
    assert "At most 122 tokens are sampled, not 4,096: the context of" in capsys.readouterr().err
    message = error_of(capsys, "eval", *words, "--max-tokens", "123")
    assert message.startswith("error: --max-tokens 123 does not fit: the context of")
    assert message.endswith("has 128 tokens, and the longest prompt 6; give at most 122.")


def test_a_run_stands_for_its_newest_checkpoint(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "a"
    assert "is not a folder here" in error_of(capsys, "eval", run, *SMALL)
    (run / "checkpoints").mkdir(parents=True)
    assert "has no checkpoint yet" in error_of(capsys, "eval", run, *SMALL)
    config = tmp_path / "config.toml"
    config.write_text(
        f'[model]\nname = "{tiny_folder}"\n[task]\nname = "arithmetic"\n[rollout]\n'
        "prompts_per_step = 2\nsamples_per_prompt = 2\nmax_tokens = 4\n[training]\nsteps = 2\n"
        f'[run]\nname = "a"\nfolder = "{tmp_path / "runs"}"\ncheckpoint_every = 1\n'
    )
    assert main(["train", str(config)]) == 0
    assert run_eval(run, run / "checkpoints" / "step-1", *SMALL, "--output", tmp_path) == 0
    assert (tmp_path / "a-step-2-arithmetic" / "results.json").is_file()
    assert (tmp_path / "a-step-1-arithmetic" / "results.json").is_file()


def test_short_names_of_models_are_unique() -> None:
    assert short_names(["Qwen/Qwen3-0.6B", "m/x.gguf", "runs/a/checkpoints/step-5"]) == [
        "Qwen3-0.6B",
        "x",
        "a-step-5",
    ]
    assert short_names(["/x/a/model", "/x/b/model"]) == ["a-model", "b-model"]
    runs = ["one/a/checkpoints/step-5", "two/a/checkpoints/step-5"]
    assert short_names(runs) == ["one-a-step-5", "two-a-step-5"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--task", "arithmetic", "--temperature", "0", "--samples", "2"],
            "set --samples 1, or raise the temperature",
        ),
        (["--task", "arithmetik"], "did you mean 'arithmetic'?"),
        (["--suite", "aime24", "--data", "."], "aime24.jsonl.gz is not a file"),
        (
            ["--task", "derail", "--template", "x{problem}"],
            "--template requires a file with problems",
        ),
        (["--suite", "arithmetic", "--template", "x"], "--template requires a file in --task"),
        (["--suite", "arithmetic,arithmetic"], "two tasks named 'arithmetic'"),
        (["--training.steps=3"], "'--training.steps=3' is not an option of eval"),
        (["--task", "arithmetic", "--rollout.vllm.sleep"], 'requires rollout.engine = "vllm"'),
        (["--prompts", "2"], "is no run that has one: name it with --task or --suite"),
        (["--task", "arithmetic", "--task.levl=1"], "did you mean 'level'?"),
        (["--suite", "arithmetic", "--task.level", "1"], "--task.level is an option of one task"),
        (["--task.name=arithmetic"], "write --task arithmetic"),
    ],
)
def test_what_can_not_be_evaluated_is_refused(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert sentence in error_of(capsys, "eval", tiny_folder, *words)
    twice = error_of(capsys, "eval", tiny_folder, tiny_folder, "--task", "arithmetic")
    assert "named twice" in twice


def test_a_file_with_markup_in_its_name_and_ids_is_written_safely(
    tiny_folder: Path, tmp_path: Path
) -> None:
    data = tmp_path / "<b>a|b&.jsonl"
    rows = [{"id": "</script>\u2028", "problem": "1+1=", "answer": "2"}]
    rows += [{"problem": "2+2=", "answer": 4}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run_eval(tiny_folder, *SMALL, "--task", data, "--output", tmp_path / "e") == 0
    (folder,) = (tmp_path / "e").iterdir()
    page = (folder / "pass_at_k.html").read_text()
    assert page.count("</script>") == page.count("<script")
    assert "<b>a" not in page
    assert "&lt;b&gt;a|b&amp;" in page
    assert "| &lt;b>a\\|b& |" in (folder / "results.md").read_text()
    problems = read_results(folder)["problems"]["<b>a|b&"]
    assert [problem["id"] for problem in problems] == ["</script>\u2028", "1"]


def test_greedy_is_one_sample(tiny_folder: Path, tmp_path: Path) -> None:
    words = ["--prompts", "3", "--max-tokens", "4", "--temperature", "0", "--output", tmp_path]
    words += ["--task", "arithmetic"]
    assert run_eval(tiny_folder, *words) == 0
    assert read_results(tmp_path / "tiny-arithmetic")["settings"]["samples"] == 1


def test_evaluation_prompts_share_no_random_numbers_with_those_of_a_run(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"id": "7", "problem": "1+1=", "answer": "2"}\n')
    suite = load_suite([TaskChoice(str(data)), TaskChoice("arithmetic")], num_endless=3)
    sampled = [task.sampling_id(problem) for task in suite for problem in task.problems]
    assert len(set(sampled)) == 4
    trained = [build_task("file", seed=0, path=str(data)), build_task("arithmetic", seed=0)]
    for task in trained:
        # a sample ends in a number, an evaluated problem in a slash
        assert task.prompt(0).id[-1].isdigit()
    assert all(each.startswith("evaluation/") and each.endswith("/") for each in sampled)


def test_named_tasks_come_from_a_folder_of_data() -> None:
    data = shared_data("aime24.jsonl.gz").parent
    names = ["aime24", "amc23", "amo_bench", "math500", "gsm8k"]
    suite = load_suite([TaskChoice(name) for name in names], data=str(data))
    sizes = {task.name: len(task.problems) for task in suite}
    assert sizes == {"aime24": 30, "amc23": 40, "amo_bench": 39, "math500": 500, "gsm8k": 1319}
    few = load_suite([TaskChoice("aime24")], data=str(data), limit=7)[0]
    assert few.problems == suite[0].problems[:7]
    assert few.digest != suite[0].digest


def test_an_environment_is_played_and_its_turns_are_kept(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--task",
        f"{OWN_TASK}:Talk",
        "--prompts",
        "4",
        "--samples",
        "3",
        "--max-tokens",
        "110",
    ]
    words += ["--output", str(tmp_path), "--data", str(tmp_path)]  # which has no file of it
    assert run_eval(tiny_folder, *words, "--max-turns", "3") == 0
    folder = tmp_path / "tiny-Talk"
    lines = (folder / "samples.jsonl").read_text().splitlines()
    samples = [sample for line in lines for sample in json.loads(line)["samples"]]
    lengths = {len(sample["turns"]) for sample in samples}
    assert max(lengths) == 5
    for sample in samples:
        roles = [turn["role"] for turn in sample["turns"]]
        assert roles == (["policy", "environment"] * 3)[: len(roles)]
        assert sample["turns"][-1]["text"] == sample["text"]
        said = "".join(turn["text"] for turn in sample["turns"][::2])
        # a token of the tiny model is a character, or a special one; a reply has 14
        assert len(said) <= sample["tokens"] < len(said) + 14
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["max_turns"] == 3
    assert settings["max_sequences"] == 64
    message = error_of(capsys, "eval", tiny_folder, *words, "--max-turns", "2")
    assert "(max_turns was 3, now 2)" in message


def test_another_chat_template_is_another_setting(tiny_folder: Path, policy: Policy) -> None:
    suite = load_suite([TaskChoice("arithmetic")], num_endless=2)
    rollout = RolloutConfig()

    def settings() -> dict[str, Any]:
        return recorded_settings(SamplingSettings(), suite, rollout, policy, max_sequences=4)

    assert settings()["chat_template"] is None
    assert settings()["max_turns"] is None
    found = set()
    for template in ("{{ messages[0].content }}", "{{ messages[0].content }}!"):
        policy.tokenizer.chat_template = template
        found.add(settings()["chat_template"])
    assert len(found) == 2


def test_tasks_without_a_data_file_need_none_in_the_folder(tmp_path: Path) -> None:
    names = ["guess_number", "calculator", "arithmetic", f"{OWN_TASK}:Short"]
    suite = load_suite([TaskChoice(name) for name in names], data=str(tmp_path), num_endless=2)
    assert [task.name for task in suite] == ["guess_number", "calculator", "arithmetic", "Short"]


def test_the_limits_of_graders_can_be_set(tiny_folder: Path, tmp_path: Path) -> None:
    words = ["--task", f"{OWN_TASK}:Slow", "--prompts", "1", "--samples", "1", "--max-tokens", "2"]
    words += ["--output", str(tmp_path), "--reward.time_limit=0.2", "--reward.workers=1"]
    assert run_eval(tiny_folder, *words) == 0
    (line,) = (tmp_path / "tiny-Slow" / "samples.jsonl").read_text().splitlines()
    assert json.loads(line)["samples"][0]["status"] == "timed_out"


def test_a_prompt_without_a_grade_leaves_the_mean_a_number(policy: Policy) -> None:
    task = build_task(f"{OWN_TASK}:Moody", seed=0)
    result = evaluate(policy, task, num_prompts=3, num_samples=2, max_tokens=2)
    assert result.mean_reward == 0.5
    assert result.standard_error == 0.0
    assert result.num_prompts == 2
