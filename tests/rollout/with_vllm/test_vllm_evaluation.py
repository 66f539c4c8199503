"""The same evaluation with the native engine and with vLLM (its CPU build, in float32)."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from trustbatch.cli import main
from trustbatch.evaluation.comparison import compare
from trustbatch.evaluation.results import read_results
from trustbatch.models.policy import Policy
from trustbatch.types import Prompt

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
]

SMALL_VLLM = ["--rollout.vllm.kv_cache_gib=0.25", "--rollout.vllm.enforce_eager=true"]


@pytest.fixture
def likely_digits(tiny_folder: Path, tmp_path: Path) -> Path:
    """Problems whose answer is the untrained model's likeliest digit: right now and then."""
    policy = Policy.load(str(tiny_folder), device="cpu", precision="float32")
    digits = policy.tokenizer.convert_tokens_to_ids(list("0123456789"))
    file = tmp_path / "digits.jsonl"
    with file.open("w") as lines:
        for number in range(40):
            text = f"{number + 10}+{99 - number}="
            token_ids = policy.encode(Prompt(id=text, text=text, answer=""))
            with torch.no_grad():
                logits = policy.logits(torch.tensor([token_ids]), num_last=1)[0, -1]
            answer = str(int(logits[digits].argmax()))
            lines.write(json.dumps({"problem": text, "answer": answer}) + "\n")
    return file


def test_both_engines_agree_within_their_intervals(
    tiny_folder: Path, likely_digits: Path, tmp_path: Path
) -> None:
    results = {}
    for engine, options in (("native", []), ("vllm", SMALL_VLLM)):
        command = ["eval", str(tiny_folder), "--task", str(likely_digits), "--engine", engine]
        command += ["--max-tokens", "1", "--output", str(tmp_path / engine)]
        assert main([*command, *options]) == 0
        results[engine] = read_results(tmp_path / engine / "tiny-digits")
    native, vllm = (results[engine].scores[0] for engine in ("native", "vllm"))
    assert 0.1 < native.pass_at_k[0].value < 0.9
    for one, two in zip(native.pass_at_k, vllm.pass_at_k, strict=True):
        assert one.low <= two.value <= one.high, f"pass@{one.k}"
        assert two.low <= one.value <= two.high, f"pass@{one.k}"
    difference = compare(results["native"], results["vllm"]).differences[0]
    assert difference.low <= 0 <= difference.high
    assert not difference.is_significant
