"""Log-probs without logits on a GPU; TRITON_INTERPRET=1 runs the kernels without one."""

import os

import pytest
import torch
from torch import Tensor

from trustbatch.training import linear_logprobs as module
from trustbatch.training import logprob_passes
from trustbatch.training.linear_logprobs import EntropyUse, linear_logprobs
from trustbatch.training.logprob_passes import OutputGradients, SliceStatistics

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# the interpreter cuts numbers off to bfloat16 instead of rounding them
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]

if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from trustbatch.training import logprob_kernels  # noqa: E402

pytestmark = pytest.mark.gpu


def example_ids(num_tokens: int, vocabulary: int, num_ids: int) -> Tensor:
    ids = torch.randint(vocabulary, (num_tokens, num_ids), device=DEVICE)
    ids[0] = ids[0, 0].clone()  # repeated
    ids[1, 0] = vocabulary - 1
    return ids


def example_bias(vocabulary: int) -> Tensor:
    bias = torch.randn(vocabulary, device=DEVICE)
    bias[:140] = -torch.inf  # the first slice whole
    return bias


@pytest.mark.parametrize("num_ids", [1, 5])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_kernels_do_what_plain_torch_does(
    num_ids: int, with_bias: bool, with_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three slices, several blocks in each and the last one not full."""
    monkeypatch.setattr(logprob_kernels, "STATISTICS_BLOCK", 64)
    monkeypatch.setattr(logprob_kernels, "GRADIENT_BLOCK", 32)
    torch.manual_seed(0)
    logits = torch.randn(6, 300, device=DEVICE) * 6
    ids = example_ids(6, 300, num_ids)
    bias = example_bias(300) if with_bias else None
    slices = [(0, 128), (128, 256), (256, 300)]

    def statistics(passes: object) -> SliceStatistics:
        found = SliceStatistics.empty(ids, torch.float32, with_entropy=with_entropy)
        for first, last in slices:
            passes.add_slice(  # type: ignore[attr-defined]
                found,
                logits[:, first:last].clone(memory_format=torch.contiguous_format),
                None if bias is None else bias[first:last],
                first=first,
                temperature=0.7,
            )
        return found

    actual, expected = statistics(logprob_kernels), statistics(logprob_passes)
    torch.testing.assert_close(actual.picked, expected.picked)
    torch.testing.assert_close(actual.normalizer(), expected.normalizer())
    if with_entropy:
        torch.testing.assert_close(actual.entropy(), expected.entropy(), rtol=1e-5, atol=1e-5)

    normalizer = expected.normalizer()
    outputs = OutputGradients(
        ids=ids,
        logp=expected.picked - normalizer[:, None],
        d_logp=torch.randn(ids.shape, device=DEVICE),
        normalizer=normalizer,
        entropy=expected.entropy() if with_entropy else None,
        d_entropy=torch.randn(6, device=DEVICE) * 3 if with_entropy else None,
    )
    for dtype in DTYPES:
        for first, last in slices:
            one, other = (
                passes.logit_gradients(
                    outputs,
                    logits[:, first:last].clone(memory_format=torch.contiguous_format),
                    None if bias is None else bias[first:last],
                    first=first,
                    temperature=0.7,
                    dtype=dtype,
                )
                for passes in (logprob_kernels, logprob_passes)
            )
            assert one.dtype == dtype
            # bfloat16: one unit in the last place, where the float32 numbers straddle a tie
            tolerance = 5e-5 if dtype == torch.float32 else 2**-7
            torch.testing.assert_close(one, other, rtol=tolerance, atol=1e-5)


def test_a_logit_that_is_not_a_number_is_not_hidden() -> None:
    logits = torch.randn(3, 100, device=DEVICE)
    logits[1, 40] = torch.nan
    found = SliceStatistics.empty(example_ids(3, 100, 1), torch.float32, with_entropy=True)
    logprob_kernels.add_slice(found, logits, None, first=0, temperature=1.0)
    assert found.normalizer().isnan().tolist() == [False, True, False]
    assert found.entropy().isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("num_tokens", [40, 0])
def test_the_whole_function_with_kernels_and_without(
    precision: torch.dtype, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(module, "CPU_SLICE_BYTES", 1)
    monkeypatch.setattr(module, "GPU_SLICE_BYTES", 1)
    leaves = [torch.randn(shape, device=DEVICE) for shape in ((num_tokens, 32), (1000, 32))]
    ids = example_ids(num_tokens, 1000, 4) if num_tokens else torch.zeros(0, 4, dtype=torch.long)
    ids = ids.to(DEVICE)

    def run(passes: object) -> list[Tensor]:
        monkeypatch.setattr(module, "_passes", lambda logits: passes)
        hidden, weight = (leaf.clone().requires_grad_() for leaf in leaves)
        logp, top_logp, entropy = linear_logprobs(
            hidden,
            weight,
            None,
            ids[:, 0],
            temperature=0.8,
            top_token_ids=ids[:, 1:],
            entropy=EntropyUse.LEARNED,
            precision=precision,
        )
        assert top_logp is not None
        assert entropy is not None
        (logp.sum() - top_logp.sum() * 0.5 + entropy.sum() * 2).backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        return [logp, top_logp, entropy, hidden.grad, weight.grad]

    *outputs, d_hidden, d_weight = run(logprob_kernels)
    *plain_outputs, plain_d_hidden, plain_d_weight = run(logprob_passes)
    for output, plain in zip(outputs, plain_outputs, strict=True):
        torch.testing.assert_close(output, plain, rtol=1e-5, atol=1e-5)
    tolerance = 1e-5 if precision == torch.float32 else 2e-3
    for gradient, plain in ((d_hidden, plain_d_hidden), (d_weight, plain_d_weight)):
        assert (gradient - plain).norm() <= tolerance * plain.norm()


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_bfloat16_is_as_near_to_float64_as_its_operands_are() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(512, 256, device=DEVICE)
    weight = torch.randn(30_000, 256, device=DEVICE) * 0.3
    ids = torch.randint(30_000, (512,), device=DEVICE)
    found = linear_logprobs(
        hidden,
        weight,
        None,
        ids,
        temperature=1.0,
        entropy=EntropyUse.REPORTED,
        precision=torch.bfloat16,
    )
    exact = linear_logprobs(
        hidden.bfloat16().double(),
        weight.bfloat16().double(),
        None,
        ids,
        temperature=1.0,
        entropy=EntropyUse.REPORTED,
    )
    for index in (0, 2):
        one, other = found[index], exact[index]
        assert one is not None
        assert other is not None
        # logits of about 20 in bfloat16 would be off by 0.05
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_memory_is_that_of_a_slice_and_of_the_gradients() -> None:
    num_tokens, vocabulary, width = 16_384, 151_936, 256
    hidden = torch.randn(num_tokens, width, device=DEVICE, requires_grad=True)
    weight = torch.randn(vocabulary, width, device=DEVICE, requires_grad=True)
    ids = torch.randint(vocabulary, (num_tokens,), device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logp, _, entropy = linear_logprobs(
        hidden,
        weight,
        None,
        ids,
        temperature=1.0,
        entropy=EntropyUse.LEARNED,
        precision=torch.bfloat16,
    )
    assert entropy is not None
    (logp + entropy).sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    gradients = 4 * width * (vocabulary + num_tokens)
    # a slice, its gradient in half as many bytes, and the operands and products of one slice
    assert peak - gradients < 1.75 * module.GPU_SLICE_BYTES
    assert 4 * num_tokens * vocabulary > 5 * peak
