"""Products by oneDNN, of linear layers and heads in float32."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

from trustbatch.models import products
from trustbatch.models.products import (
    multiply,
    restore_linear_layers,
    speed_up_linear_layers,
)

needs_onednn = pytest.mark.skipif(
    not products.has_onednn_products(), reason="this build of torch has no products by oneDNN"
)


@pytest.fixture
def preferred(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the weights of products that were computed by oneDNN, as on any CPU of AMD."""
    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    shapes: list[tuple[int, ...]] = []
    multiply_by_onednn = products.multiply_by_onednn

    def watched(rows: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(weight.shape))
        return multiply_by_onednn(rows, weight, *bias)

    monkeypatch.setattr(products, "multiply_by_onednn", watched)
    return shapes


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@needs_onednn
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("trains", ["all", "inputs", "weight"])
def test_a_layer_computes_what_it_did(
    preferred: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    with_bias: bool,
    trains: str,
) -> None:
    monkeypatch.setattr(products, "LEAST_WORK", 0)
    layer = nn.Linear(48, 80, bias=with_bias)
    exact = copy.deepcopy(layer).double()
    speed_up_linear_layers(layer)
    inputs = random(3, 7, 48).requires_grad_(trains != "weight")
    layer.weight.requires_grad_(trains != "inputs")
    wide = inputs.detach().double().requires_grad_(trains != "weight")
    # a gradient that is no contiguous matrix, as attention gives
    upstream = random(3, 80, 7, seed=1).transpose(1, 2)
    found, expected = layer(inputs), exact(wide)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    found.backward(upstream)
    expected.backward(upstream.double())
    assert len(preferred) == (3 if trains == "all" else 2)
    pairs = [(inputs.grad, wide.grad), (layer.weight.grad, exact.weight.grad)]
    if with_bias:
        assert layer.bias.grad is not None
        pairs.append((layer.bias.grad, exact.bias.grad))
    for own, other in pairs:
        if own is not None:
            assert other is not None
            torch.testing.assert_close(own.double(), other, rtol=1e-5, atol=1e-5)
    assert (inputs.grad is None) == (trains == "weight")
    assert (layer.weight.grad is None) == (trains == "inputs")


@needs_onednn
def test_what_gains_nothing_is_left_to_torch(preferred: list[tuple[int, ...]]) -> None:
    small, large = nn.Linear(64, 64), nn.Linear(1024, 1024)
    for layer in (small, large):
        speed_up_linear_layers(layer)
    rows = random(100, 64)
    assert torch.equal(small(rows), functional.linear(rows, small.weight, small.bias))
    assert multiply(rows, random(64, 64)).shape == (100, 64)
    wide = random(100, 1024)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert large(wide).dtype == torch.bfloat16
    assert large.double()(wide.double()).dtype == torch.float64
    assert preferred == []
    large.float()(wide)
    left, right = random(300, 1024), random(1024, 512)
    torch.testing.assert_close(multiply(left, right), left @ right, rtol=1e-5, atol=1e-3)
    assert preferred == [(1024, 1024), (512, 1024)]
    # oneDNN has no gradients of its own
    left.requires_grad_()
    multiply(left, right).sum().backward()
    assert left.grad is not None
    assert len(preferred) == 2


@pytest.mark.usefixtures("preferred")
def test_a_layer_that_has_moved_or_has_a_forward_of_its_own_is_left_alone() -> None:
    layer, other = nn.Linear(1024, 1024), nn.Linear(4, 4)
    other.forward = lambda input: input  # pyright: ignore[reportAttributeAccessIssue]
    for each in (layer, other):
        speed_up_linear_layers(each)
    # as a GPU, for which there is no such kernel
    moved = layer.to("meta")
    assert moved(torch.empty(100, 1024, device="meta")).grad_fn.name() == "AddmmBackward0"
    assert float(other(torch.ones(4)).sum()) == 4.0


@needs_onednn
@pytest.mark.usefixtures("preferred")
def test_only_what_a_gradient_needs_is_kept() -> None:
    layer = nn.Linear(1024, 1024, bias=False).requires_grad_(False)
    speed_up_linear_layers(layer)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each), lambda _: None):
        layer(random(100, 1024).requires_grad_())
    assert [each.shape for each in kept] == [(1024, 1024)]


@needs_onednn
def test_a_copy_of_a_layer_has_weights_of_its_own(preferred: list[tuple[int, ...]]) -> None:
    layer = nn.Linear(512, 512)
    speed_up_linear_layers(layer)
    rows = random(512, 512)
    before = layer(rows)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with torch.no_grad():
            other.weight.zero_()
            other.bias.zero_()
        assert not bool(other(rows).any())
    assert torch.equal(layer(rows), before)
    assert len(preferred) == 4


@pytest.mark.usefixtures("preferred")
def test_layers_can_be_restored() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    speed_up_linear_layers(model)
    assert "forward" in vars(model[0])
    restore_linear_layers(model)
    assert "forward" not in vars(model[0])


def test_another_cpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "prefers_onednn", lambda: False)
    layer = nn.Linear(4, 4)
    speed_up_linear_layers(layer)
    assert "forward" not in vars(layer)
