"""The configurations for GPUs of a size fit them, by the commands that they show themselves."""

import json
import re
import shlex
from pathlib import Path

import pytest
from transformers import Qwen3Config

from trustbatch.cli import main
from trustbatch.models.loading import count_parameters
from trustbatch.models.tiny import build_tokenizer

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("gpu-*.toml"))
COMMAND = re.compile(r"^#   (trustbatch train .* --dry-run .*?)(?:  +#.*)?$", re.MULTILINE)
# width, MLP, layers, heads, whether the head is the embedding, and parameters as published
SHAPES = {
    "Qwen/Qwen3-0.6B": (1024, 3072, 28, 16, True, 596_049_920),
    "Qwen/Qwen3-1.7B": (2048, 6144, 28, 16, True, 1_720_574_976),
    "Qwen/Qwen3-4B": (2560, 9728, 36, 32, True, 4_022_468_096),
    "Qwen/Qwen3-8B": (4096, 12288, 36, 32, False, 8_190_735_360),
    "Qwen/Qwen3-14B": (5120, 17408, 40, 40, False, 14_768_307_200),
}


def commands() -> list[tuple[str, ...]]:
    texts = [file.read_text(encoding="utf-8").replace("\\\n#     ", "") for file in CONFIGS]
    return [tuple(shlex.split(line)[1:]) for text in texts for line in COMMAND.findall(text)]


def model_of(command: tuple[str, ...]) -> str:
    chosen = [word.partition("=")[2] for word in command if word.startswith("--model.name=")]
    written = re.search(r'^name = "(Qwen/.*)"$', (ROOT / command[1]).read_text(), re.MULTILINE)
    assert written is not None
    return chosen[0] if chosen else written[1]


def write_shape(name: str, folder: Path) -> None:
    """Write what a plan reads of a model: its shape, and a tokenizer of its own."""
    width, mlp, layers, heads, is_tied, _ = SHAPES[name]
    Qwen3Config(
        vocab_size=151_936,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=is_tied,
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def test_each_configuration_shows_its_plan() -> None:
    assert {command[1] for command in commands()} == {f"configs/{file.name}" for file in CONFIGS}
    assert len(CONFIGS) == 4


@pytest.mark.parametrize("command", commands(), ids=lambda command: " ".join(command[1:6]))
def test_the_plan_fits(
    command: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = model_of(command)
    write_shape(model, tmp_path / "shape")
    # the shapes that are known without files are the same
    assert count_parameters(model)[0] == SHAPES[model][-1]
    # a token a character, of digits and signs alone: longer than the prompts of most problems
    problem = {"id": "1", "problem": "1+" * 400 + "1=", "answer": "401"}
    (tmp_path / "train.jsonl").write_text(json.dumps(problem) + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    train, config, *options = command
    local = [f"--model.name={tmp_path / 'shape'}", "--task.template={problem}"]
    assert main([train, str(ROOT / config), *options, *local]) == 0
    printed = capsys.readouterr().out
    assert f"{SHAPES[model][-1]:,} parameters" in printed
    assert re.search(r"prompts of up to [89]\d\d tokens", printed)
    assert "fits: needs" in printed
    assert "does not fit" not in printed
