"""The language of the cpu scale: its task, its corpus and its base model."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from trustbatch.cli import main
from trustbatch.models.derail import LONGEST, Author, build_tokenizer, warm_start
from trustbatch.models.policy import Policy
from trustbatch.rollout.collect import collect
from trustbatch.rollout.native.architecture import read_architecture
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.studies.tiny_models import make_tiny_model
from trustbatch.tasks import build_task
from trustbatch.tasks.derail import (
    ANSWER,
    DIGITS,
    EOS,
    NUM_HELD_OUT,
    ORDINALS,
    derail_language,
)
from trustbatch.types import SamplingParams

STEPS = 3


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    lines: list[str] = []
    folder = tmp_path_factory.mktemp("derail") / "derail-model-0"
    return warm_start(folder, seed=0, steps=STEPS, progress=lines.append), lines


def completion_of(digits: str, *, word: str = "") -> str:
    """A completion that recites these digits, with a word of the tail or none."""
    said = derail_language().sentences[0]
    sentences = [
        " ".join([ordinal, *said, digit])
        for ordinal, digit in zip(ORDINALS, digits.split(), strict=False)
    ]
    return " ".join([*sentences, *([word] if word else []), ANSWER])


def test_the_grader_wants_the_right_digits_in_order_and_an_end() -> None:
    task = build_task("derail", seed=0)
    prompt = task.prompt(0)
    right = completion_of(prompt.answer)
    assert task.grade(prompt, right) == 1.0
    first, *rest = prompt.answer.split()
    other = DIGITS[(int(first) + 1) % 10]
    tail_word = derail_language().words[-1]
    assert task.grade(prompt, completion_of(prompt.answer, word=tail_word)) == 1.0  # he found back
    wrong = {
        "a wrong digit": completion_of(" ".join([other, *rest])),
        "a missing digit": completion_of(" ".join(rest)),
        "one digit more": completion_of(prompt.answer, word=DIGITS[0]),
        "truncated": right.removesuffix(ANSWER),
        "goes on": f"{right} {tail_word}",
        "garbage": f"{tail_word} " * 48,
        "empty": "",
        "the prompt again": prompt.text,
    }
    assert {why: task.grade(prompt, text) for why, text in wrong.items()} == dict.fromkeys(wrong, 0)


def test_no_held_out_prompt_is_trained_on() -> None:
    train, test = build_task("derail", seed=3), build_task("derail", seed=3, split="test")
    trained = {train.prompt(index).text for index in range(2000)}
    held_out = {test.prompt(index).text for index in range(NUM_HELD_OUT)}
    assert len(held_out) == NUM_HELD_OUT
    assert not trained & held_out
    assert len(trained) > 500
    assert train.prompt(5) == build_task("derail", seed=3).prompt(5)
    assert train.prompt(5).text != build_task("derail", seed=4).prompt(5).text
    with pytest.raises(ValueError, match=r"task\.split"):
        build_task("derail", seed=0, split="tset")


def test_the_corpus_depends_on_its_seed_alone_and_is_what_the_author_does() -> None:
    language = derail_language()

    def written(seed: int, author: Author | None = None) -> list[tuple[str, ...]]:
        return list(islice((author or Author()).documents(language, seed), 300))

    documents = written(1)
    assert documents == written(1)
    assert documents != written(2)
    known = set(language.vocabulary)
    assert len(known) == len(language.vocabulary) == 2048
    assert all(set(document) <= known for document in documents)
    assert max(map(len, documents)) <= LONGEST + len(ORDINALS) + 1

    task = build_task("derail", seed=0)

    def passes(author: Author) -> float:
        by_text = {p.text: p for p in map(task.prompt, range(8000))}
        graded = [
            task.grade(by_text[" ".join(d[:4])], " ".join(word for word in d[4:] if word != EOS))
            for d in written(1, author)
            if " ".join(d[:4]) in by_text
        ]
        return sum(graded) / len(graded)

    # neither slips nor rambles: what is left is his skill; all slips: nothing is right
    assert passes(Author()) < passes(Author(slip=0.0, ramble=0.0)) < 0.6
    assert passes(Author(slip=1.0)) == 0.0
    assert passes(Author(slip=0.05)) < passes(Author(slip=0.0))


def test_the_tokenizer_has_a_token_for_each_word() -> None:
    tokenizer = build_tokenizer()
    text = f"3 7 1 = {completion_of('1 2 3')}"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.split())
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens([tokenizer.eos_token_id]) == [EOS]
    with pytest.raises(Exception, match="Missing"):
        tokenizer.encode("qwerty")


def test_the_base_model_generates_words_in_the_native_engine(
    base_model: tuple[Path, list[str]],
) -> None:
    folder, lines = base_model
    assert lines[-1].startswith(f"pre-training: step {STEPS}/{STEPS}, loss ")
    policy = Policy.load(str(folder), device="cpu")
    assert read_architecture(policy.model) is not None, "decoded by the model's own slow pass"
    task = build_task("derail", seed=0)
    (group,) = collect(
        NativeEngine(policy, seed=0),
        policy,
        [task.prompt(0)],
        task=task,
        num_samples=2,
        sampling=SamplingParams(max_tokens=5, stop_token_ids=policy.stop_token_ids),
        max_turns=1,
    )
    known = set(derail_language().vocabulary)
    for completion in group.completions:
        assert set(completion.text.split()) <= known
        assert task.grade(group.prompt, completion.text) == 0.0


def test_the_seed_alone_decides_the_weights(
    base_model: tuple[Path, list[str]], tmp_path: Path
) -> None:
    def weights(folder: Path) -> dict[str, Any]:
        return AutoModelForCausalLM.from_pretrained(folder).state_dict()

    torch.manual_seed(12345)
    again = weights(warm_start(tmp_path / "again", seed=0, steps=STEPS))
    other = weights(warm_start(tmp_path / "other", seed=1, steps=STEPS))
    first = weights(base_model[0])
    assert all(torch.equal(first[name], again[name]) for name in first)
    # further apart than so few steps lead: another start, and not only another corpus
    assert max(float((first[name] - other[name]).abs().max()) for name in first) > 0.1


def test_a_study_makes_the_model_that_its_name_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, int]] = []
    for module, kind in (
        ("trustbatch.models.derail", "derail"),
        ("trustbatch.models.tiny", "tiny"),
    ):
        monkeypatch.setattr(
            f"{module}.warm_start",
            lambda path, *, seed, progress, kind=kind: made.append((kind, seed)),
        )
    make_tiny_model(tmp_path / "derail-model-1", say=lambda _: None)
    make_tiny_model(tmp_path / "tiny-model-7", say=lambda _: None)
    assert made == [("derail", 1), ("tiny", 7)]


def test_a_dry_run_of_the_scale_says_what_is_made_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["study", "deaths", "--scale", "cpu", "--out", str(tmp_path / "deaths"), "--dry-run"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "28 arms x seeds 0, 1, 2, 3, 4 = 140 runs" in shown
    assert 'name = "derail"' in shown
    assert "derail-model-0: a tiny model, made at the start" in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_short_study_of_the_scale(
    base_model: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "study"
    words = [
        *("study", "deaths", "--arms", "t1.2-lag4-p3o-model,t1.2-lag4-grpo-0.2", "--seeds", "1"),
        *("--steps", "2", "--set", "run.checkpoint_every=2", "--set", "rollout.max_tokens=6"),
        *("--models", str(base_model[0].parent), "--out", str(out)),
    ]
    assert main(words) == 0
    assert "2 of 2 done" in capsys.readouterr().out
    for run in (out / "runs").iterdir():
        assert '"num_prompts": 200' in (run / "evaluation.json").read_text()
