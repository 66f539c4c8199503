"""Triton kernels against plain torch; TRITON_INTERPRET=1 runs them without a GPU."""

import math
import os

import pytest
import torch

from trustbatch.rollout.native import operations, prompt_tiles
from trustbatch.rollout.native.cache import HeadNorms, Heads
from trustbatch.rollout.native.dense_cache import DenseCache
from trustbatch.rollout.native.linear import quantize_rows
from trustbatch.rollout.token_blocks import BLOCK

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]

if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from trustbatch.rollout.native import adapter_kernels, kernels  # noqa: E402
from trustbatch.rollout.native.paged_cache import SPARE, PagedCache  # noqa: E402

pytestmark = pytest.mark.gpu


E4M3_NAN = 0x7F


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_delta", [True, False])
def test_add_rms_norm(dtype: torch.dtype, with_delta: bool) -> None:
    residual = torch.randn(5, 96, device=DEVICE)
    delta = torch.randn(5, 96, device=DEVICE).to(dtype) if with_delta else None
    weight = torch.rand(96, device=DEVICE) + 0.5
    # the other one is a CPU's
    copy = residual.clone().cpu()
    delta_copy = None if delta is None else delta.cpu()
    expected = operations.add_rms_norm(copy, delta_copy, weight.cpu(), 1e-6, dtype)
    found = kernels.add_rms_norm(residual, delta, weight, 1e-6, dtype)
    close(found.cpu(), expected, dtype)
    torch.testing.assert_close(residual.cpu(), copy)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = (torch.randn(7, 2 * 1100, device=DEVICE) * 3).to(dtype)
    close(kernels.silu_mul(gate_up), operations.silu_mul(gate_up), dtype)


def test_block_statistics_with_excluded_tokens_and_blocks() -> None:
    logits = torch.randn(3, 70, BLOCK, device=DEVICE) * 5
    logits[0, 3] = -torch.inf
    logits[1, 5, 17:] = -torch.inf
    (maxima,), (sums,) = kernels.block_statistics(logits, 0.7)
    torch.testing.assert_close(maxima, logits.amax(-1) / 0.7)
    # a block of excluded tokens only has maximum -inf, and sum 0
    expected = torch.logsumexp(logits / 0.7, -1)
    torch.testing.assert_close(sums.log() + maxima, expected)
    assert sums[0, 3] == 0
    logits[2, 69, 3] = torch.nan
    assert bool(kernels.block_statistics(logits, 0.7)[1][0, 2, 69].isnan())


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no e4m3")
def test_tokens_are_quantized_as_rows_are() -> None:
    rows = torch.randn(6, 200, device=DEVICE, dtype=torch.bfloat16)
    rows[3] = 0
    quantized, scale = kernels.quantize_tokens(rows)
    expected, expected_scale = quantize_rows(rows)
    torch.testing.assert_close(scale, expected_scale)
    assert (quantized.float() != expected.float()).float().mean() < 1e-2  # ties of the division
    # e4m3 has three bits after the first: half a unit is a sixteenth
    torch.testing.assert_close(quantized.float() * scale, rows.float(), rtol=1 / 15, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_processors", [1, 64])
@pytest.mark.parametrize(
    ("with_norms", "shares", "is_fp8"),
    [
        (True, True, False),
        (False, True, False),
        (True, False, False),
        (False, False, True),
        (True, True, True),
    ],
)
def test_pages_hold_and_read_what_the_dense_cache_does(
    dtype: torch.dtype,
    num_processors: int,
    with_norms: bool,
    shares: bool,
    is_fp8: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts of several lengths, copies, growth, rows that leave and rows that enter."""
    torch.manual_seed(0)
    heads = Heads(num_query=6, num_kv=2, dim=32, epsilon=1e-6)
    norms = None
    if with_norms:
        norms = HeadNorms(torch.rand(32, device=DEVICE), torch.rand(32, device=DEVICE))
    angles = torch.rand(600, 16, device=DEVICE).repeat(1, 2) * 6
    rotary = (angles.cos(), angles.sin())
    paged = PagedCache(
        heads, 2, dtype, device=DEVICE, max_rows=16, room=lambda _: math.inf, is_fp8=is_fp8
    )
    paged.num_processors = num_processors
    monkeypatch.setattr(prompt_tiles, "LEAST_SAVED", 0 if shares else 2**60)
    monkeypatch.setattr(prompt_tiles, "LEAST_SHARE", 0)
    dense = DenseCache(heads, 2, dtype, is_fp8=is_fp8)
    if DEVICE.type == "cuda":
        for part in (paged.keys, paged.values):
            for page in part:
                page.fill_(E4M3_NAN if is_fp8 else torch.nan)

    def prompts(lengths: list[int], copies: list[int]) -> None:
        for cache in (paged, dense):
            cache.add_prompts(lengths, copies)
        for layer in range(2):
            shape = (len(lengths), heads.num_kv, max(lengths), heads.dim)
            keys, values = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
            paged.store_prompts(layer, keys, values)
            dense.store_prompts(layer, keys.cpu(), values.cpu())
        for cache in (paged, dense):
            cache.finish_prompts()

    def step() -> None:
        position = torch.tensor(paged.lengths, device=DEVICE)
        for cache in (paged, dense):
            cache.reserve(1, 1)
        assert paged.shares_pages == shares
        for layer in range(2):
            width = (heads.num_query + 2 * heads.num_kv) * heads.dim
            qkv = torch.randn(len(position), width, device=DEVICE).to(dtype)
            actual = paged.attend(layer, qkv, norms, rotary, position)
            cpu = [part.cpu() for part in (qkv, *rotary, position)]
            cpu_norms = None if norms is None else HeadNorms(*(part.cpu() for part in norms))
            expected = dense.attend(layer, cpu[0], cpu_norms, (cpu[1], cpu[2]), cpu[3])
            if is_fp8:
                difference = (actual.cpu() - expected).abs()
                # a rounding that falls on the other side; the interpreter rounds 127 to 64
                assert difference.max() < (0.6 if INTERPRETED else 0.2)
                is_exact = dtype == torch.float32 and not INTERPRETED
                assert difference.mean() < (1e-3 if is_exact else 1e-2)
            else:
                close(actual.cpu(), expected, dtype)
        for cache in (paged, dense):
            cache.advance(1)

    prompts([70, 64, 3, 130], [3, 2, 1, 2])
    for _ in range(3):
        step()
    for cache in (paged, dense):
        cache.keep([0, 2, 4, 5, 7])
    step()
    prompts([200, 5], [2, 4])
    for _ in range(70 if DEVICE.type == "cuda" else 4):
        step()
    for cache in (paged, dense):
        cache.keep([])
    assert sorted(paged._free) == list(range(1, paged.num_pages))


def test_a_cleared_pool_starts_with_what_it_needed_before() -> None:
    """Growing takes time and leaves holes: a run pays for it once."""
    heads = Heads(num_query=2, num_kv=1, dim=16, epsilon=1e-6)
    cache = PagedCache(heads, 1, torch.float32, device=DEVICE, max_rows=16, room=lambda _: math.inf)
    cache.add_prompts([640] * 8, [1] * 8)
    cache.finish_prompts()
    held = 1 + 8 * 10
    address = cache.address
    cache.clear()
    assert (cache.rows, cache.num_pages) == ([], 1)
    assert cache.address != address
    cache.add_prompts([64], [1])
    assert cache.num_pages == int(held * SPARE)
    cache.clear()
    cache.add_prompts([64], [1])
    assert cache.num_pages < held  # short completions need no large pool for good


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "rank", "num_rows"), [((128, 32, 32), 4, 5), ((96, 96), 40, 70), ((50,), 100, 33)]
)
def test_adapters_are_added_layer_by_layer(
    sizes: tuple[int, ...], rank: int, num_rows: int, dtype: torch.dtype
) -> None:
    """Inputs are parts of longer rows; a rank of no power of two, a tile that is not full."""
    width, down = sum(sizes), rank * len(sizes)
    joined = torch.randn(num_rows, width + down + 7, device=DEVICE).to(dtype)
    up = torch.randn(width, rank, device=DEVICE).to(dtype)
    arguments = (joined[:, :width], joined[:, width : width + down], up, sizes, 0.3)
    found = adapter_kernels.add_low_rank(*arguments)
    assert found.is_contiguous()
    # products of up to 100 numbers of size 1
    tolerance = 1e-5 if dtype == torch.float32 else 0.25
    expected = operations.add_low_rank(*arguments)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=tolerance)
    if dtype == torch.bfloat16:  # rounded at the same places: few differ, by the order of sums
        assert float((found == expected).float().mean()) > 0.9


def test_layers_that_no_tile_divides_are_added_too() -> None:
    outputs, down = torch.randn(3, 60, device=DEVICE), torch.randn(3, 4, device=DEVICE)
    arguments = (outputs, down, torch.randn(60, 2, device=DEVICE), (20, 40), 2.0)
    close(
        adapter_kernels.add_low_rank(*arguments),
        operations.add_low_rank(*arguments),
        torch.float32,
    )
