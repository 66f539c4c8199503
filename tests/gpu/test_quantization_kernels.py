"""Splits of the fused product's sums; TRITON_INTERPRET=1 runs the kernels without a GPU."""

import os
from dataclasses import replace

import pytest
import torch

from trustbatch.models.quantization.formats import FORMATS, NF4_BLOCK, Codes, quantize
from trustbatch.models.quantization.tiles import Tile, tile_for

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# the interpreter has no products of bfloat16, and no e4m3
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
HALF = torch.float16 if INTERPRETED else torch.bfloat16
NAMES = ["int8", "nf4"] if INTERPRETED else sorted(FORMATS)

if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from trustbatch.models.quantization import kernels  # noqa: E402

pytestmark = pytest.mark.gpu
OUTPUTS = 80  # the last tile is a part of one


def coded(name: str, columns: int) -> Codes:
    values = torch.randn(OUTPUTS, columns, generator=torch.Generator().manual_seed(0))
    return quantize(values.to(DEVICE), name)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))
    return values.to(DEVICE, dtype)


def close(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Whether sums are in float32, and rounded once."""
    rtol, atol = (1e-5, 1e-4) if INTERPRETED else (2**-8, 2e-3)
    torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=atol)


def columns_of(weight: Codes, begin: int, end: int) -> Codes:
    """Return some columns of a weight, whole blocks of them."""
    per_byte = 2 if weight.format.name == "nf4" else 1
    codes = weight.codes[:, begin // per_byte : end // per_byte].contiguous()
    scales = weight.scales
    if weight.format.block is not None:
        scales = scales[:, begin // weight.format.block : end // weight.format.block].contiguous()
    return Codes(codes, scales, weight.format, end - begin)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("splits", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("rows", [1, 5, 40, 100])
@pytest.mark.parametrize("name", NAMES)
def test_a_split_product_multiplies_the_same_numbers(
    name: str, rows: int, splits: int, has_bias: bool
) -> None:
    weight = coded(name, 1024)  # 8 tiles: of 3 splits the last has 2, and 16 are only 8
    inputs = random(rows, 1024, dtype=DTYPE)
    bias = random(OUTPUTS, dtype=DTYPE) if has_bias else None
    exact = inputs.double() @ weight.dequantized(DTYPE).double().t()
    if bias is not None:
        exact += bias.double()
    found = kernels.multiply(inputs, weight, bias, replace(tile_for(rows, name), splits=splits))
    close(found, exact)


@pytest.mark.parametrize("name", NAMES)
def test_sums_of_splits_are_added_in_their_order(name: str) -> None:
    weight = coded(name, 1024)
    inputs, bias = random(5, 1024), random(OUTPUTS)
    tile = Tile(outputs=32, splits=3)
    total = torch.zeros(5, OUTPUTS, device=DEVICE)
    for begin, end in ((0, 384), (384, 768), (768, 1024)):
        part = inputs[:, begin:end].contiguous()
        own = columns_of(weight, begin, end)
        total += kernels.multiply(part, own, None, replace(tile, splits=1))
    assert torch.equal(kernels.multiply(inputs, weight, bias, tile), total + bias)


@pytest.mark.parametrize("splits", [1, 2])
def test_a_result_is_rounded_once(splits: int) -> None:
    codes = torch.ones(OUTPUTS, 1024, dtype=torch.uint8, device=DEVICE)
    weight = Codes(codes, torch.ones(OUTPUTS, 1, device=DEVICE), FORMATS["int8"], 1024)
    inputs = torch.full((2, 1024), 4.0, dtype=HALF, device=DEVICE)
    inputs[:, 0] = 5  # the first half is 511 * 4 + 5 = 2049, which HALF rounds to 2048
    inputs[0, 512:] = -4
    inputs[1, 512:] = 0
    bias = torch.zeros(OUTPUTS, dtype=HALF, device=DEVICE)
    tile = replace(tile_for(2, "int8"), splits=splits)
    found = kernels.multiply(inputs, weight, bias, tile)
    assert bool((found[0] == 1).all())  # 2049 - 512 * 4
    found = kernels.multiply(inputs, weight, bias - 2048, tile)
    assert bool((found[1] == 1).all())  # 2049 + 0 - 2048


def test_multiprocessors_decide_on_the_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, inputs = coded("int8", 1024), random(20, 1024)
    one, two = (
        kernels.multiply(inputs, weight, None, replace(tile_for(20, "int8"), splits=splits))
        for splits in (1, 2)
    )
    assert not torch.equal(one, two)  # their sums round differently
    for processors, expected in ((0, one), (132, two)):
        monkeypatch.setattr(kernels, "num_processors", lambda device, n=processors: n)
        assert torch.equal(kernels.multiply(inputs, weight, None), expected)


def test_smaller_tiles_of_columns_are_split_too() -> None:
    weight = coded("nf4", 5 * NF4_BLOCK)
    inputs = random(3, 5 * NF4_BLOCK, dtype=DTYPE)
    exact = inputs.double() @ weight.dequantized(DTYPE).double().t()
    close(kernels.multiply(inputs, weight, None, Tile(columns=NF4_BLOCK, splits=2)), exact)
