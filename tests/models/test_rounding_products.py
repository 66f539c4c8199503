"""Products of operands that are rounded to bfloat16, kept in float32."""

import pytest
import torch

from trustbatch.models.rounding import multiply_rounded

PRODUCTS = torch.backends.mkldnn.matmul


@pytest.mark.parametrize("precision", ["none", "ieee"])
def test_the_product_is_that_of_the_rounded_operands(precision: str) -> None:
    before = PRODUCTS.fp32_precision
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randn(size, generator=generator).bfloat16().float() for size in ((37, 96), (96, 1024))
    )
    exact = left.double() @ right.double()
    try:
        PRODUCTS.fp32_precision = precision
        found = multiply_rounded(left, right)
        assert PRODUCTS.fp32_precision == precision
    finally:
        PRODUCTS.fp32_precision = before
    # sums in float32: rounding the result to bfloat16 would change it by up to 0.06
    assert float((found.double() - exact).abs().max()) < 1e-4


def test_other_products_keep_their_precision_after_an_error() -> None:
    before = PRODUCTS.fp32_precision
    with pytest.raises(RuntimeError):
        multiply_rounded(torch.ones(2, 3), torch.ones(4, 5))
    assert PRODUCTS.fp32_precision == before
    numbers = torch.full((64, 256), 1.0 + 2.0**-12)  # which bfloat16 does not have
    assert float(torch.mm(numbers, numbers.T)[0, 0]) > 256.1
