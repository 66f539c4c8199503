"""Packed sequences give the same results as separate ones, in every model family that packs."""

import copy
import random
from typing import Any

import pytest
import torch
from tests.support.train_sequences import make_sequence
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from trustbatch.batching.micro_batches import MicroBatch, micro_batches
from trustbatch.models.packing import layout as layout_module
from trustbatch.models.packing.attention import _ToCopies
from trustbatch.models.packing.layout import PackedLayout, Segment
from trustbatch.models.packing.probe import has_plain_head
from trustbatch.models.policy import Policy
from trustbatch.models.tiny import build_tokenizer
from trustbatch.training.logprobs import token_logprobs
from trustbatch.types import TrainSequence

SHAPE: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}
GROUPED = SHAPE | {"num_key_value_heads": 2}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**GROUPED),
    "qwen2": Qwen2Config(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED, head_dim=8),
    "mistral": MistralConfig(**GROUPED, sliding_window=5),
    "gemma3": Gemma3TextConfig(**GROUPED, **WINDOWS, head_dim=8),
    "gpt2": GPT2Config(
        vocab_size=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1
    ),
    "gpt_neox": GPTNeoXConfig(**SHAPE),
    "cohere": CohereConfig(**GROUPED),  # scales its logits
    "gemma2": Gemma2Config(**GROUPED, **WINDOWS, head_dim=8),  # caps logits and attention
    "falcon": FalconConfig(
        vocab_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=2
    ),  # its attention can't be replaced
}
PACKS = [name for name in CONFIGS if name not in ("gemma2", "falcon")]
PLAIN_HEAD = [name for name in CONFIGS if name not in ("gemma2", "cohere")]


def make_policy(name: str) -> Policy:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)  # attention then depends on what it sees
    return Policy(model.double(), build_tokenizer(), name=name, precision="float32")


@pytest.fixture(scope="module")
def sequences() -> list[TrainSequence]:
    """Responses of 1 to 12 tokens to prompts of 1 to 9; each advantage is a sequence's number."""
    rng = random.Random(0)
    found: list[TrainSequence] = []
    for prompt_length, samples in ((3, 4), (9, 4), (5, 1), (1, 3)):
        prompt = [rng.randrange(2, 16) for _ in range(prompt_length)]
        for length in (1, 12, 2, 7)[:samples]:
            response = [rng.randrange(2, 16) for _ in range(length)]
            found.append(make_sequence(prompt, response, float(len(found))))
    return found


def alone(policy: Policy, sequence: TrainSequence) -> Tensor:
    """Log-probs of a response from a forward pass of the model as it came, without any layout."""
    response = sequence.completion.token_ids
    ids = torch.tensor([*sequence.prompt_token_ids, *response.tolist()])[None, :-1]
    logits = policy.model(input_ids=ids, use_cache=False).logits[0, -len(response) :]
    return logits.log_softmax(-1).gather(-1, response[:, None]).squeeze(-1)


def by_sequence(batches: list[MicroBatch], logps: list[Tensor]) -> dict[float, Tensor]:
    return {
        float(batch.advantage[batch.sequence == number][0]): logp[batch.sequence == number]
        for batch, logp in zip(batches, logps, strict=True)
        for number in range(len(batch.policies))
    }


def pack(
    policy: Policy, sequences: list[TrainSequence], *, share: str, max_tokens: int = 10**6
) -> list[MicroBatch]:
    return micro_batches(
        sequences,
        max_tokens=max_tokens,
        pad_token_id=0,
        packs=policy.packs,
        may_share_prompts=share != "no",
        copies_prompts=share == "copies",
    )


def loss_of(logps: dict[float, Tensor]) -> Tensor:
    """Any function of the log-probs that treats no two tokens alike."""
    return torch.stack(
        [(logp * torch.sin(torch.arange(len(logp)) + n)).sum() for n, logp in logps.items()]
    ).sum()


def gradient(policy: Policy, loss: Tensor) -> Tensor:
    policy.model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", CONFIGS)
def test_which_models_pack_and_which_have_a_plain_head(name: str) -> None:
    policy = make_policy(name)
    assert policy.packs == (name in PACKS)
    assert (policy.head is not None) == (name in PLAIN_HEAD)


def test_a_second_policy_on_one_model_packs_too(policy: Policy) -> None:
    assert Policy(policy.model, policy.tokenizer, name="again", precision="float32").packs


def test_a_cap_is_noticed_where_logits_are_small() -> None:
    """Training may make them large."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["gemma2"])).eval()
    with torch.no_grad():
        assert float(model(torch.tensor([[2, 3]])).logits.abs().max()) < 1
    assert not has_plain_head(model)


@pytest.mark.parametrize("max_tokens", [10**6, 30, 1])
@pytest.mark.parametrize("share", ["no", "tables", "copies"])
@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_and_gradients_are_those_of_each_sequence_alone(
    name: str, share: str, max_tokens: int, sequences: list[TrainSequence]
) -> None:
    policy = make_policy(name)
    expected = {s.advantage: alone(policy, s) for s in sequences}
    expected_gradient = gradient(policy, loss_of(expected))
    batches = pack(policy, sequences, share=share, max_tokens=max_tokens)
    logps = [token_logprobs(policy, batch, temperature=1.0).logp for batch in batches]
    found = by_sequence(batches, logps)
    assert found.keys() == expected.keys()
    for number, logp in found.items():
        torch.testing.assert_close(logp, expected[number], rtol=0, atol=1e-6)
    difference = gradient(policy, loss_of(found)) - expected_gradient
    # models round to float32 on the way, e.g. in their norms
    assert float(difference.norm() / expected_gradient.norm()) < 1e-6


@pytest.mark.parametrize("share", ["no", "tables", "copies"])
@pytest.mark.parametrize("name", PACKS)
def test_no_sequence_sees_another(name: str, share: str, sequences: list[TrainSequence]) -> None:
    policy = make_policy(name)
    changed = list(sequences)
    response = [token % 14 + 2 for token in sequences[1].completion.token_ids.tolist()]
    changed[1] = make_sequence(list(sequences[1].prompt_token_ids), response, 1.0)
    found = []
    for version in (sequences, changed):
        (batch,) = pack(policy, version, share=share)
        with torch.no_grad():
            logp = token_logprobs(policy, batch, temperature=1.0).logp
        found.append(by_sequence([batch], [logp]))
    before, after = found
    for number in before:
        assert torch.equal(before[number], after[number]) == (number != 1)


def test_rows_of_very_unequal_length_get_tables_of_their_own(
    sequences: list[TrainSequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy("mistral")
    found = []
    for worth in (2**18, 1):
        monkeypatch.setattr(layout_module, "MIN_SAVED_SCORES", worth)
        (batch,) = pack(policy, sequences, share="tables")
        assert batch.packed is not None
        found.append((batch, len(batch.packed.tables)))
    (one, few), (other, many) = found
    assert many > few
    torch.testing.assert_close(
        *(token_logprobs(policy, batch, temperature=1.0).logp for batch in (one, other))
    )


def test_a_response_is_computed_behind_its_prompt() -> None:
    layout = PackedLayout.of([Segment(3, (2, 1)), Segment(2)])
    assert layout.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 0, 1]
    assert layout.starts is None
    plain = PackedLayout.of([Segment(3), Segment(2)])
    assert plain.starts is not None
    assert plain.starts.tolist() == [0, 3, 5]
    assert plain.longest == 3
    # no copy where all segments have one length
    assert PackedLayout.of([Segment(3), Segment(3)]).padded is None


def test_copies_make_whole_sequences_of_shared_prompts() -> None:
    layout = PackedLayout.of([Segment(2), Segment(3, (2, 0, 1))], copies_prompts=True)
    assert layout.position_ids.tolist() == [0, 1, 0, 1, 2, 3, 4, 3]
    copies = layout.copies
    assert copies is not None
    assert copies.layout.starts is not None
    assert copies.layout.starts.tolist() == [0, 2, 7, 10, 14]
    assert copies.token.tolist() == [0, 1, 2, 3, 4, 5, 6, 2, 3, 4, 2, 3, 4, 7]
    assert copies.own.tolist() == [0, 1, 2, 3, 4, 5, 6, 13]
    assert PackedLayout.of([Segment(2), Segment(3)], copies_prompts=True).copies is None


def test_gradients_of_the_copies_of_a_prompt_are_added_without_rounding() -> None:
    copies = PackedLayout.of([Segment(1, (0,) * 300)], copies_prompts=True).copies
    assert copies is not None
    one = torch.ones(1, 2, 4, dtype=torch.bfloat16, requires_grad=True)
    _ToCopies.apply(one, copies).sum().backward()  # type: ignore[attr-defined]
    assert one.grad is not None
    assert one.grad.unique().tolist() == [300.0]  # in bfloat16, 256 + 1 is 256


def test_a_micro_batch_without_a_sequence_has_no_tokens_but_a_gradient() -> None:
    for name in ("llama", "cohere", "gemma2"):
        policy = make_policy(name)
        one = make_sequence([2, 3], [4], 0.0)
        ((full,), (empty,)) = (
            micro_batches(
                [one], max_tokens=9, pad_token_id=0, packs=policy.packs, rank=rank, num_ranks=2
            )
            for rank in (0, 1)
        )
        assert len(full.target) == 1
        assert empty.input_ids.numel() == 1
        assert empty.policies == ()
        assert empty.top_token_ids is not None
        logp = token_logprobs(policy, empty, temperature=1.0, with_top=True)
        assert logp.logp.shape == (0,)
        assert logp.top_logp is not None
        assert logp.top_logp.shape == (0, 2)
        assert float(gradient(policy, logp.logp.sum()).abs().max()) == 0.0


def test_gradient_checkpointing_computes_the_same(sequences: list[TrainSequence]) -> None:
    policy = make_policy("qwen3")
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            policy.model.gradient_checkpointing_enable()
            policy.model.train()  # transformers checkpoints in training mode only
        (batch,) = pack(policy, sequences, share="tables")
        logp = token_logprobs(policy, batch, temperature=1.0).logp
        found.append(gradient(policy, loss_of(by_sequence([batch], [logp]))))
    torch.testing.assert_close(*found)


def test_a_compiled_layer_computes_the_same(sequences: list[TrainSequence]) -> None:
    policy = make_policy("qwen3")
    batches = [
        batch
        for share in ("tables", "copies", "no")
        for batch in pack(policy, sequences, share=share)
    ]
    found = []
    for compiled in (False, True):
        if compiled:
            for layer in policy.model.model.layers:
                layer.compile(backend="eager")
        logps = [token_logprobs(policy, batch, temperature=1.0).logp for batch in batches]
        found.append(torch.cat(logps))
    torch.testing.assert_close(*found)


def test_a_packing_model_behaves_as_before_without_a_layout(policy: Policy) -> None:
    """Rows padded on the left, as the portable decoder has them."""
    assert policy.packs
    ids = torch.tensor([[0, 0, 3, 4], [5, 6, 7, 8]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    found = []
    for implementation in (policy.model.config._attn_implementation, "sdpa"):
        policy.model.set_attn_implementation(implementation)
        found.append(policy.model(input_ids=ids, attention_mask=mask, use_cache=False).logits)
    assert torch.equal(*found)
