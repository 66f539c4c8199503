"""The operator of packed attention, with its kernels replaced by float32 math on a CPU."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.models.test_packing import CONFIGS, pack
from tests.support.train_sequences import make_sequence
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM

from trustbatch.models.packing import attention as attention_module
from trustbatch.models.packing import layout as layout_module
from trustbatch.models.packing import operator
from trustbatch.models.packing.layout import PackedLayout, Segment, layout_of
from trustbatch.models.policy import Policy
from trustbatch.models.tiny import build_tokenizer
from trustbatch.training.layers import compile_layers, recompute_layers
from trustbatch.training.logprobs import token_logprobs


def scores(query: Tensor, key: Tensor, scaling: float, window: int) -> Tensor:
    """[..., H, L, L] of query and key [..., H, L, D], masked."""
    place = torch.arange(query.shape[-2])
    distance = place[:, None] - place
    seen = (distance >= 0) & (distance < (window or 10**9))
    return (query @ key.transpose(-1, -2) * scaling).masked_fill(~seen, -torch.inf)


def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int = 0) -> Any:
    heads = query.shape[-3] // key.shape[-3]
    key, value = (part.repeat_interleave(heads, dim=-3) for part in (key, value))
    score = scores(query, key, scaling, window)
    return score.softmax(-1) @ value, score.logsumexp(-1)


def attend_backward(
    gradient: Tensor, parts: Any, scaling: float, window: int = 0
) -> tuple[Tensor, ...]:
    """FlashAttention's backward pass: P = exp(S - lse), dS = P (dP - rowsum(dO O))."""
    query, key, value, attended, logsumexp = parts
    heads = query.shape[-3] // key.shape[-3]
    wide_key, wide_value = (part.repeat_interleave(heads, dim=-3) for part in (key, value))
    p = (scores(query, wide_key, scaling, window) - logsumexp[..., None]).exp()
    d_p = gradient @ wide_value.transpose(-1, -2)
    d_s = p * (d_p - (gradient * attended).sum(-1, keepdim=True)) * scaling
    wide = (d_s.transpose(-1, -2) @ query, p.transpose(-1, -2) @ gradient)
    return d_s @ wide_key, *(part.unflatten(-3, (-1, heads)).sum(-3) for part in wide)


def flash(query: Tensor, key: Tensor, value: Tensor, packed: PackedLayout, *how: Any) -> Any:
    sizes = packed.starts.diff().tolist()  # type: ignore[union-attr]
    parts = zip(*(part.split(sizes) for part in (query, key, value)), strict=True)
    found = [attend(*(part.transpose(0, 1) for part in own), *how) for own in parts]
    attended, logsumexp = zip(*found, strict=True)
    return torch.cat(attended, dim=1).transpose(0, 1), torch.cat(logsumexp, dim=1)


def flash_backward(gradient: Tensor, parts: Any, packed: PackedLayout, *how: Any) -> Any:
    sizes = packed.starts.diff().tolist()  # type: ignore[union-attr]
    *tensors, logsumexp = parts
    split = zip(*(part.split(sizes) for part in (gradient, *tensors)), strict=True)
    found = []
    for own, lse in zip(split, logsumexp.split(sizes, dim=1), strict=True):
        d_out, *rest = (part.transpose(0, 1) for part in own)
        found.append(attend_backward(d_out, (*rest, lse), *how))
    return tuple(torch.cat(each, dim=1).transpose(0, 1) for each in zip(*found, strict=True))


def cudnn(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    attended, logsumexp = attend(query, key, value, scaling)
    return attended, logsumexp[..., None]


def cudnn_backward(gradient: Tensor, parts: Any, scaling: float) -> Any:
    *tensors, logsumexp = parts
    return attend_backward(gradient, (*tensors, logsumexp[..., 0]), scaling)


def use_kernels(monkeypatch: pytest.MonkeyPatch, *, has_cudnn: bool) -> list[str]:
    """Replace the kernels; returns the names of those that are called from now on."""
    calls: list[str] = []
    replaced = (("_flash", flash), ("_flash_backward", flash_backward))
    for name, function in (*replaced, ("_cudnn", cudnn), ("_cudnn_backward", cudnn_backward)):

        def note(*arguments: Any, name: str = name, function: Any = function) -> Any:
            calls.append(name)
            return function(*arguments)

        monkeypatch.setattr(operator, name, note)
    monkeypatch.setattr(operator, "_may_use_cudnn", lambda *_: has_cudnn)
    monkeypatch.setattr(attention_module, "fits_kernels", lambda *_: True)
    return calls


@pytest.fixture
def policy() -> Policy:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["qwen3"]))
    return Policy(model, build_tokenizer(), name="qwen3", precision="float32")


CASES: dict[str, list[tuple[int, int]]] = {
    "ragged": [(3, 4), (3, 1), (5, 7)],
    "even": [(3, 4), (2, 5)],
    "shared": [(3, 4), (3, 4), (3, 4)],
    "shared, ragged": [(3, 4), (3, 1), (3, 9), (2, 4)],
}
"""lengths of prompt and response; equal prompts are of one group"""


@pytest.mark.parametrize("has_cudnn", [False, True])
@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_operator_and_its_gradient(
    case: str, is_long: bool, has_cudnn: bool, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_module, "LONG_SEQUENCE", 1 if is_long else 10**9)
    sequences = [
        make_sequence([prompt] * prompt, [2 + (number + i) % 9 for i in range(response)], 1.0)
        for number, (prompt, response) in enumerate(CASES[case])
    ]
    calls: list[str] = []
    found = []
    for uses_operator in (False, True):
        if uses_operator:
            calls = use_kernels(monkeypatch, has_cudnn=has_cudnn)
        (batch,) = pack(policy, sequences, share="copies" if "shared" in case else "no")
        policy.model.zero_grad()
        logp = token_logprobs(policy, batch, temperature=1.0).logp
        (logp * torch.arange(len(logp)).sin()).sum().backward()
        grads = [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
        found.append((logp.detach(), torch.cat(grads)))
    is_for_cudnn = is_long or "ragged" not in case
    expected = "_cudnn" if is_for_cudnn and has_cudnn else "_flash"
    assert set(calls) == {expected, f"{expected}_backward"}
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm() / one.norm()) < 1e-5


def test_windows_reach_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = use_kernels(monkeypatch, has_cudnn=True)
    packed = PackedLayout.of([Segment(5), Segment(5)])
    query, key, value = (torch.randn(10, heads, 8, requires_grad=True) for heads in (4, 2, 2))

    def attend_within(window: int | None) -> Tensor:
        return operator.attend_by_kernels(query, key, value, packed, None, window)

    expected, _ = flash(query, key, value, packed, 8**-0.5, 3)
    torch.testing.assert_close(attend_within(3), expected)
    found, exact = (
        torch.autograd.grad(each.square().sum(), (query, key, value))
        for each in (attend_within(3), expected)
    )
    torch.testing.assert_close(found, exact)
    calls.clear()
    torch.testing.assert_close(attend_within(5), attend_within(None))  # as long as the longest
    assert calls == ["_cudnn", "_cudnn"]


def test_long_sequences_are_padded_to_a_length_that_cudnn_has_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_kernels(monkeypatch, has_cudnn=True)
    lengths = []
    kernel = operator._cudnn
    monkeypatch.setattr(
        operator, "_cudnn", lambda q, *rest: lengths.append(q.shape[2]) or kernel(q, *rest)
    )
    for segments in ([2049], [2048, 2100], [2100, 2100]):
        packed = PackedLayout.of([Segment(length) for length in segments])
        query = torch.randn(sum(segments), 1, 8)
        assert operator.attend_by_kernels(query, query, query, packed, None, None).shape[0] == (
            sum(segments)
        )
    assert lengths == [2560, 2048, 2560, 2100]  # the last two sequences in one call


@pytest.fixture
def counter() -> Iterator[CompileCounterWithBackend]:
    """Counts graphs, which are run as they are."""
    torch._dynamo.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_compiled_layer_is_one_graph_for_any_layout(
    policy: Policy,
    counter: CompileCounterWithBackend,
    is_recomputed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_kernels(monkeypatch, has_cudnn=False)
    compiled = copy.deepcopy(policy)
    compile_layers(compiled.model, backend=counter)  # type: ignore[arg-type]
    if is_recomputed:
        recompute_layers(compiled.model)
    generator = torch.Generator().manual_seed(0)
    num_graphs = []
    for number in range(8):
        lengths = torch.randint(1, 9, (number % 5 + 1,), generator=generator).tolist()
        responses = (2, 3) if number % 3 == 0 else ()
        segments = [Segment(length, responses) for length in lengths]
        num_tokens = sum(segment.num_tokens for segment in segments)
        ids = torch.randint(2, 12, (num_tokens,), generator=generator)
        at = torch.arange(num_tokens)
        results = []
        for each in (policy, compiled):
            layout = PackedLayout.of(segments, copies_prompts=True)
            with torch.no_grad():
                each.hidden_states(ids, layout, at)
            each.model.zero_grad()
            hidden = each.hidden_states(ids, layout, at)
            del layout  # the graph keeps what its backward pass needs
            (hidden * at[:, None].sin()).sum().backward()
            results.append([hidden.detach(), each.model.model.layers[0].mlp.up_proj.weight.grad])
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
        num_graphs.append(counter.frame_count)
    assert num_graphs[0] <= 3  # with gradient and without
    assert num_graphs[-1] == num_graphs[0], num_graphs


def test_a_handle_stands_for_the_layout_where_the_tensors_are() -> None:
    packed: PackedLayout = PackedLayout.of([Segment(3, (2, 1))], copies_prompts=True)
    moved: PackedLayout = packed.to(torch.device("meta"))
    assert layout_of(packed.handle).position_ids is packed.position_ids
    assert layout_of(moved.handle).position_ids.is_meta
    assert moved.copies is not None
    assert moved.copies.token.is_meta
    handle = packed.handle
    del packed
    assert layout_of(handle).longest == 5
