from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from trustbatch.errors import CheckpointError
from trustbatch.models.tiny import TINY_VOCABULARY, build_model, build_tokenizer, warm_start


@pytest.fixture(scope="module")
def short_start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    lines: list[str] = []
    folder = tmp_path_factory.mktemp("tiny") / "parent" / "model"
    warm_start(folder, seed=3, progress=lines.append, clean_steps=3, noisy_steps=2)
    return folder, lines


def test_tokenizer_keeps_text_and_knows_its_special_tokens() -> None:
    tokenizer = build_tokenizer()
    assert len(tokenizer) == len(TINY_VOCABULARY) == 16
    for text in ("12+34=", "12+34=46</s>", "9*8-7=65", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("12+34=46</s>")) == 9
    assert tokenizer.eos_token == "</s>"
    assert tokenizer.pad_token == "<pad>"
    assert tokenizer.chat_template is None


@pytest.mark.parametrize("text", ["1 2", "a", "1\n", "é"])
def test_tokenizer_refuses_an_unknown_character(text: str) -> None:
    with pytest.raises(Exception, match="Missing"):
        build_tokenizer().encode(text)


def test_model_is_a_small_tied_qwen3_that_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(model, Qwen3ForCausalLM)
    assert 200_000 < sum(p.numel() for p in model.parameters()) < 1_000_000
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config is not None
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_folder_loads_as_an_ordinary_checkpoint(short_start: tuple[Path, list[str]]) -> None:
    folder, _ = short_start
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer("12+34=", return_tensors="pt")
    assert set(prompt) == {"input_ids", "attention_mask"}
    assert model.generate(**prompt, max_new_tokens=4, do_sample=True).shape[1] <= 10
    assert (folder / "model.safetensors").is_file()
    assert isinstance(model, Qwen3ForCausalLM)
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 1
    assert tokenizer.decode(tokenizer.encode("12+34=46</s>")) == "12+34=46</s>"


def test_progress_names_both_phases_and_nothing_else_is_left(
    short_start: tuple[Path, list[str]],
) -> None:
    folder, lines = short_start
    assert lines[0].startswith("clean sums: step 1/5")
    assert lines[-1].startswith("noisy sums: step 5/5")
    assert list(folder.parent.iterdir()) == [folder]


def test_seed_alone_decides_the_weights(
    short_start: tuple[Path, list[str]], tmp_path: Path
) -> None:
    torch.manual_seed(12345)
    again = warm_start(tmp_path / "again", seed=3, clean_steps=3, noisy_steps=2)
    other = warm_start(tmp_path / "other", seed=4, clean_steps=3, noisy_steps=2)
    first = AutoModelForCausalLM.from_pretrained(short_start[0]).state_dict()
    same = AutoModelForCausalLM.from_pretrained(again).state_dict()
    different = AutoModelForCausalLM.from_pretrained(other).state_dict()
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not all(torch.equal(first[name], different[name]) for name in first)


def test_interruption_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        if "noisy" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm_start(tmp_path / "model", progress=interrupt, clean_steps=1, noisy_steps=1)
    assert list(tmp_path.iterdir()) == []


def test_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("trustbatch.models.tiny.os.rename", fail)
    with pytest.raises(OSError, match="disk full"):
        warm_start(tmp_path / "model", clean_steps=1, noisy_steps=1)
    assert list(tmp_path.iterdir()) == []


def test_existing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="already exists"):
        warm_start(tmp_path, clean_steps=1, noisy_steps=1)
