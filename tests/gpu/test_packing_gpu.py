"""Packed attention on a GPU: varlen and one-by-one kernels against float32 rows of each alone."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from trustbatch.batching.micro_batches import MicroBatch, micro_batches
from trustbatch.models.packing import layout as layout_module
from trustbatch.models.packing import operator
from trustbatch.models.packing.attention import packed_attention
from trustbatch.models.packing.layout import PackedLayout, Segment
from trustbatch.models.policy import Policy
from trustbatch.training.logprobs import token_logprobs
from trustbatch.types import Completion, FinishReason, Provenance, TrainSequence

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu
LENGTHS = (130, 1, 77, 300, 64)
EVEN = (96,) * 5
PROVENANCE = Provenance(
    policy="p",
    version=0,
    engine="native",
    precision="bfloat16",
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    logprob_mode="processed",
)


def attend(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, lengths: tuple[int, ...]
) -> Tensor:
    """Each sequence alone, with an explicit mask, in the precision of its input."""
    parts = []
    heads = query.shape[1] // key.shape[1]
    for q, k, v in zip(*(part.split(lengths, dim=2) for part in (query, key, value)), strict=True):
        k, v = (part.repeat_interleave(heads, dim=1) for part in (k, v))
        place = torch.arange(q.shape[2], device=q.device)
        distance = place[:, None] - place
        seen = (distance >= 0) & (distance < (window or 10**9))
        score = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
        parts.append(score.softmax(-1) @ v)
    return torch.cat(parts, dim=2).transpose(1, 2)


def watch_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the kernels that are called from now on."""
    calls: list[str] = []

    def watch(name: str) -> None:
        original = getattr(operator, name)
        monkeypatch.setattr(operator, name, lambda *a: calls.append(name) or original(*a))

    for name in ("_flash", "_flash_backward", "_cudnn", "_cudnn_backward"):
        watch(name)
    return calls


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("lengths", [LENGTHS, EVEN])
@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_and_its_gradient(
    dtype: torch.dtype,
    one_by_one: bool,
    lengths: tuple[int, ...],
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layout_module, "LONG_SEQUENCE", 1 if one_by_one else 10**9)
    kernels = watch_kernels(monkeypatch)
    layout: PackedLayout = PackedLayout.of([Segment(n) for n in lengths]).to(torch.device("cuda"))
    torch.manual_seed(0)
    tensors = [
        torch.randn(1, heads, sum(lengths), 64, device="cuda", dtype=dtype).requires_grad_()
        for heads in (4, 2, 2)
    ]
    exact = [part.detach().float().requires_grad_() for part in tensors]
    found, _ = packed_attention(
        None, *tensors, None, packed=layout, scaling=64**-0.5, sliding_window=window
    )
    expected = attend(*exact, window, lengths)
    weight = torch.randn_like(expected)
    (found.float() * weight).sum().backward()
    (expected * weight).sum().backward()
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=tolerance)
    for mine, theirs in zip(tensors, exact, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        difference = (mine.grad.float() - theirs.grad).norm() / theirs.grad.norm()
        assert float(difference) < tolerance
    if dtype is torch.bfloat16:
        is_for_cudnn = window is None and (one_by_one or lengths == EVEN)
        kernel = "_cudnn" if is_for_cudnn else "_flash"
        assert set(kernels) == {kernel, f"{kernel}_backward"}


@pytest.fixture(params=["own prompts", "one prompt", "one prompt, even"])
def sequences(request: pytest.FixtureRequest) -> list[TrainSequence]:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, 16, (4, 4), generator=generator).tolist()
    return [
        TrainSequence(
            prompt_token_ids=tuple(prompts[number if request.param == "own prompts" else 0]),
            completion=Completion(
                prompt_id="p",
                sample=0,
                token_ids=torch.randint(2, 16, (length,), generator=generator),
                behavior_logp=-torch.ones(length),
                top_token_ids=None,
                behavior_top_logp=None,
                finish_reason=FinishReason.STOP,
                provenance=PROVENANCE,
                text="",
            ),
            advantage=1.0,
        )
        for number, length in enumerate(
            (20, 20, 20, 20) if "even" in request.param else (1, 20, 7, 33)
        )
    ]


def pack(policy: Policy, sequences: list[TrainSequence]) -> MicroBatch:
    (batch,) = micro_batches(
        sequences,
        max_tokens=10**6,
        pad_token_id=0,
        packs=policy.packs,
        may_share_prompts=True,
        copies_prompts=policy.copies_prompts,
    )
    return batch.to(policy.device)


def step(policy: Policy, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    policy.model.zero_grad()
    logp = token_logprobs(policy, batch, temperature=1.0).logp
    (logp * torch.sin(torch.arange(len(logp), device=logp.device))).sum().backward()
    grads = [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
    return logp.detach(), torch.cat(grads)


def test_bfloat16_policy_against_float32(
    tiny_folder: Path, sequences: list[TrainSequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy.load(str(tiny_folder), device="cuda", precision="bfloat16")
    exact = Policy.load(str(tiny_folder), device="cuda", precision="float32")
    assert policy.packs
    batch = pack(policy, sequences)
    is_shared = len({sequence.prompt_token_ids for sequence in sequences}) == 1
    assert batch.packed is not None
    assert (batch.packed.copies is not None) == is_shared
    calls = watch_kernels(monkeypatch)
    logp, gradient = step(policy, batch)
    assert calls
    expected, expected_gradient = step(exact, batch)
    assert float((logp - expected).abs().mean()) < 0.05
    assert float((gradient - expected_gradient).norm() / expected_gradient.norm()) < 0.1
