"""The task reasoning_gym, with the real package."""

import pickle
from collections import Counter
from contextlib import closing
from typing import Any

import pytest

from trustbatch.evaluation.suite import TaskChoice, load_suite
from trustbatch.rewards import Scorer
from trustbatch.tasks import build_task
from trustbatch.tasks.base import HELD_OUT_SEED
from trustbatch.tasks.reasoning_gym import BLOCK, NUM_BLOCKS, ReasoningGym
from trustbatch.types import Prompt

BOTH = {"chain_sum": {"weight": 2, "min_terms": 2, "max_terms": 2}, "spell_backward": {}}


def answered(prompt: Prompt, answer: str | None = None) -> str:
    return f"Let me think. <answer>{prompt.answer if answer is None else answer}</answer>"


def test_prompts_follow_from_seed_index_and_weights() -> None:
    with closing(ReasoningGym(datasets=BOTH, seed=3)) as task:
        prompts = [task.prompt(index) for index in range(9)]
        assert prompts == [task.prompt(index) for index in range(9)]
    assert Counter(prompt.task for prompt in prompts) == {"chain_sum": 6, "spell_backward": 3}
    assert len({prompt.id for prompt in prompts}) == 9
    for prompt in prompts:
        assert "<answer>answer here</answer>" in prompt.system
        if prompt.task == "chain_sum":  # two terms, as asked for
            assert len([word for word in prompt.text.split() if word in "+-"]) == 1
    with closing(ReasoningGym(datasets=BOTH, seed=4)) as other:
        assert other.prompt(0).text != prompts[0].text


def test_a_problem_does_not_depend_on_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ransom note goes through a set of letters, whose order differs from process to process."""
    found = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        with closing(ReasoningGym(datasets=["ransom_note"])) as task:
            found.append([task.prompt(index).text for index in range(3)])
    assert found[0] == found[1]


def test_scores_are_those_of_the_package_with_partial_ones() -> None:
    with closing(ReasoningGym(datasets=BOTH)) as task:
        sum_, word = task.prompt(0), task.prompt(1)
        assert {sum_.task, word.task} == set(BOTH)
        sum_, word = (sum_, word) if sum_.task == "chain_sum" else (word, sum_)
        assert task.grade(sum_, answered(sum_)) == 1.0
        assert task.grade(sum_, sum_.answer) == 0.0  # not between the tags
        assert task.grade(sum_, answered(sum_, "x")) == 0.0
        last = answered(sum_, "x") + answered(sum_)
        assert task.grade(sum_, last) == 1.0
        # a share of the letters in their places counts
        almost = word.answer[:-1] + "?"
        assert 0.0 < task.grade(word, answered(word, almost)) < 1.0


def test_without_tags_the_completion_is_the_answer() -> None:
    options = {"datasets": ["chain_sum"], "system_prompt": "Answer with one number only."}
    with closing(ReasoningGym(**options, answer_tags=False)) as task:
        prompt = task.prompt(0)
        assert task.grade(prompt, f" {prompt.answer}\n") == 1.0
        # the package gives a part to a text that contains the answer: its share of the letters
        text = f"It is {prompt.answer}"
        assert task.grade(prompt, text) == pytest.approx(len(prompt.answer) / len(text))
        assert task.grade(prompt, "x") == 0.0


def test_the_grader_runs_in_a_process_and_refuses_another_problem() -> None:
    with closing(ReasoningGym(datasets=["chain_sum"])) as task:
        assert not getattr(task, "grades_in_process", False)
        prompt = task.prompt(0)
        twin = pickle.loads(pickle.dumps(task))
        assert "_generator" not in vars(twin)
        assert twin.grade(prompt, answered(prompt)) == 1.0
        other = Prompt(id="p", text="another", answer="1", details=prompt.details)
        with pytest.raises(ValueError, match="chain_sum does not generate problem"):
            twin.grade(other, answered(prompt))
        with closing(Scorer(task)) as scorer:
            scorer.prepare()


@pytest.mark.parametrize("turn", [0, BLOCK * NUM_BLOCKS - 1, BLOCK * NUM_BLOCKS])
def test_no_seed_of_a_run_meets_the_seeds_of_evaluations(turn: int) -> None:
    half = BLOCK * NUM_BLOCKS
    held_out = ReasoningGym(datasets=["chain_sum"], seed=HELD_OUT_SEED)
    assert half <= held_out.number_of(turn) < 2 * half <= 2**32
    for seed in range(50):
        assert 0 <= ReasoningGym(datasets=["chain_sum"], seed=seed).number_of(turn) < half


def test_an_evaluation_has_problems_of_its_own() -> None:
    choice = TaskChoice("reasoning_gym", {"datasets": ["chain_sum"]})
    (evaluated,) = load_suite([choice], num_endless=4)
    numbers = {problem.details["number"] for problem in evaluated.problems}
    assert min(numbers) >= BLOCK * NUM_BLOCKS
    evaluated.task.close()  # type: ignore[attr-defined]


def test_with_a_size_there_are_epochs_and_a_curriculum() -> None:
    options = {"datasets": ["chain_sum", "spell_backward"], "size": 6}
    task: Any = build_task("reasoning_gym", seed=0, **options)
    assert task.describe() == "reasoning_gym: 6 problems"
    ids = [task.prompt(index).id for index in range(12)]
    assert len(set(ids)) == 12
    assert {id.split("#")[0] for id in ids[:6]} == {problem.id for problem in task.problems}
    prompt = task.prompt(0)
    assert pickle.loads(pickle.dumps(task)).grade(prompt, answered(prompt)) == 1.0
    curriculum: Any = build_task("reasoning_gym", seed=0, curriculum={"low": 0.2}, **options)
    assert "pass rates from 0.2 to 0.9" in curriculum.describe()
    assert curriculum.prompt(0).task in options["datasets"]


def test_it_can_be_a_part_of_a_mixture() -> None:
    parts = [{"name": "reasoning_gym", "datasets": ["chain_sum"]}, {"name": "arithmetic"}]
    mixture: Any = build_task("mixture", seed=0, parts=parts)
    with closing(mixture):
        prompt = mixture.prompt(0)
        assert prompt.task == "reasoning_gym"
        assert mixture.grade(prompt, answered(prompt)) == 1.0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"datasets": ["chain_sums"]}, r"no data set .* \(did you mean 'chain_sum'\?\)"),
        ({"datasets": "chain_sum"}, r"task\.datasets must be a list: write \['chain_sum'\]\."),
        ({"datasets": []}, r"task\.datasets needs a name"),
        ({"datasets": ["chain_sum"] * 2}, "has 'chain_sum' twice: give it a weight instead"),
        ({"datasets": ["composite"]}, "There is no data set 'composite'"),
        ({"datasets": {"chain_sum": 2}}, r"task\.datasets\.chain_sum = 2 must be a table"),
        ({"datasets": {"chain_sum": {"weight": 0}}}, "chain_sum.weight = 0 must be above 0"),
        ({"datasets": {"chain_sum": {"min_term": 1}}}, r"\(did you mean 'min_terms'\?\)"),
        ({"datasets": {"chain_sum": {"seed": 1}}}, "has no option 'seed'"),
        ({"datasets": {"chain_sum": {"min_terms": 9}}}, "can't be used .*max_terms must be"),
        ({"datasets": ["chain_sum"], "system_prompt": "defalt"}, r"did you mean 'default'\?"),
        ({"datasets": ["chain_sum"], "answer_tags": False}, "asks for <answer> tags, which task"),
        ({"datasets": ["chain_sum"], "size": 0}, r"task\.size must be at least 1"),
        ({"datasets": ["chain_sum"], "generate_seconds": 0}, "generate_seconds must be above 0"),
        ({"datasets": ["chain_sum"], "curriculum": {}}, "reasoning_gym is endless"),
        ({}, r"The task reasoning_gym needs the option datasets: set task\.datasets"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        build_task("reasoning_gym", seed=0, **options)


def test_a_text_of_ones_own_says_how_to_answer() -> None:
    own = "Write the answer between <answer> and </answer>."
    assert ReasoningGym(datasets=["chain_sum"], system_prompt=own).system == own
    assert ReasoningGym(datasets=["chain_sum"], system_prompt="").system == ""
