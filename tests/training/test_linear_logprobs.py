"""Log-probs without logits: against plain log_softmax, and what must not appear in memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trustbatch.training import linear_logprobs as module
from trustbatch.training.linear_logprobs import EntropyUse, linear_logprobs

Outputs = tuple[Tensor, Tensor | None, Tensor | None]


def plain_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    *,
    temperature: float,
    top_token_ids: Tensor | None = None,
    entropy: EntropyUse = EntropyUse.NONE,
    precision: torch.dtype | None = None,
) -> Outputs:
    """The same from logits [T, V]; rounds the operands, not the products."""
    if precision is not None:
        hidden, weight = (part.to(precision).to(part.dtype) for part in (hidden, weight))
    log_p = (torch.nn.functional.linear(hidden, weight, bias) / temperature).log_softmax(-1)
    entropies = None
    if entropy is not EntropyUse.NONE:
        entropies = -(log_p.exp() * log_p.nan_to_num(neginf=0.0)).sum(-1)
    if entropies is not None and entropy is EntropyUse.REPORTED:
        entropies = entropies.detach()
    top_logp = None if top_token_ids is None else log_p.gather(1, top_token_ids)
    return log_p.gather(1, token_ids[:, None])[:, 0], top_logp, entropies


class Head:
    """A random head, tokens, and weights that make a loss of all outputs."""

    def __init__(
        self,
        num_tokens: int = 7,
        vocabulary: int = 300,
        width: int = 6,
        *,
        with_bias: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        torch.manual_seed(0)
        self.hidden = torch.randn(num_tokens, width, dtype=dtype)
        self.weight = torch.randn(vocabulary, width, dtype=dtype)
        self.bias = torch.randn(vocabulary, dtype=dtype) if with_bias else None
        self.token_ids = torch.randint(vocabulary, (num_tokens,))
        self.top_token_ids = torch.randint(vocabulary, (num_tokens, 4))
        if num_tokens > 2:
            self.top_token_ids[0, 1] = self.token_ids[0]  # the sampled one again
            self.top_token_ids[1] = self.token_ids[1]  # and nothing else
            self.token_ids[2] = vocabulary - 1
        self.of_logp = torch.randn(num_tokens, dtype=dtype)
        self.of_top = torch.randn(num_tokens, 4, dtype=dtype)
        self.of_entropy = torch.randn(num_tokens, dtype=dtype)

    def leaves(self) -> list[Tensor | None]:
        return [
            None if part is None else part.detach().clone().requires_grad_()
            for part in (self.hidden, self.weight, self.bias)
        ]

    def run(
        self,
        function: Callable[..., Outputs],
        *,
        entropy: EntropyUse = EntropyUse.LEARNED,
        top: bool = True,
        **options: Any,
    ) -> tuple[Outputs, list[Tensor | None]]:
        """Outputs, and the gradients of a loss that weighs them."""
        leaves = self.leaves()
        options.setdefault("temperature", 1.0)
        outputs = function(
            *leaves,
            self.token_ids,
            top_token_ids=self.top_token_ids if top else None,
            entropy=entropy,
            **options,
        )
        loss = torch.zeros((), dtype=self.hidden.dtype)
        weights = (self.of_logp, self.of_top, self.of_entropy)
        for output, weight in zip(outputs, weights, strict=True):
            if output is not None and output.requires_grad:
                loss = loss + (output * weight).sum()
        loss.backward()
        return outputs, [None if leaf is None else leaf.grad for leaf in leaves]


def assert_same(actual: tuple, expected: tuple, **tolerance: float) -> None:
    for one, other in zip((*actual[0], *actual[1]), (*expected[0], *expected[1]), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, **tolerance)


@pytest.fixture
def slices_of_128(monkeypatch: pytest.MonkeyPatch) -> None:
    """As small as slices get: 300 ids are three, of which one is shorter."""
    monkeypatch.setattr(module, "CPU_SLICE_BYTES", 1)


@pytest.mark.parametrize("entropy", EntropyUse)
@pytest.mark.parametrize("top", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.usefixtures("slices_of_128")
def test_values_and_gradients_are_those_of_log_softmax(
    entropy: EntropyUse, top: bool, temperature: float, with_bias: bool
) -> None:
    head = Head(with_bias=with_bias)
    options = {"entropy": entropy, "top": top, "temperature": temperature}
    found, expected = head.run(linear_logprobs, **options), head.run(plain_logprobs, **options)
    assert_same(found, expected)
    learned = found[0][2] is not None and found[0][2].requires_grad
    assert learned == (entropy is EntropyUse.LEARNED)


@pytest.mark.usefixtures("slices_of_128")
def test_gradients_are_those_of_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE_MULTIPLE", 4)
    head = Head(num_tokens=3, vocabulary=10, width=2, with_bias=True)

    def function(*leaves: Tensor) -> Outputs:
        return linear_logprobs(
            *leaves,
            head.token_ids,
            temperature=0.8,
            top_token_ids=head.top_token_ids,
            entropy=EntropyUse.LEARNED,
        )

    assert torch.autograd.gradcheck(function, head.leaves())


@pytest.mark.parametrize("slice_bytes", [1, 7 * 8 * 128, 7 * 8 * 256, 7 * 8 * 299, 7 * 8 * 384])
def test_the_size_of_slices_changes_nothing(
    slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = Head(with_bias=True)
    expected = head.run(linear_logprobs, temperature=0.6)
    monkeypatch.setattr(module, "CPU_SLICE_BYTES", slice_bytes)
    assert_same(head.run(linear_logprobs, temperature=0.6), expected)


@pytest.mark.usefixtures("slices_of_128")
def test_order_of_tokens_is_kept() -> None:
    head = Head()
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    expected, _ = head.run(linear_logprobs)
    for name in ("hidden", "token_ids", "top_token_ids", "of_logp", "of_top", "of_entropy"):
        setattr(head, name, getattr(head, name)[order])
    for actual, output in zip(head.run(linear_logprobs)[0], expected, strict=True):
        assert actual is not None
        assert output is not None
        torch.testing.assert_close(actual, output[order])


@pytest.mark.usefixtures("slices_of_128")
def test_tokens_that_the_bias_excludes() -> None:
    head = Head(with_bias=True)
    assert head.bias is not None
    head.bias[:140] = -torch.inf  # the first slice whole
    head.bias[290] = -torch.inf
    head.token_ids[0], head.token_ids[3] = 200, 290
    head.of_logp[3] = 0.0  # its log-prob is -inf
    excluded = head.top_token_ids < 140
    excluded[1] |= head.token_ids[1] < 140
    head.of_top[excluded] = 0.0
    head.of_logp[head.token_ids < 140] = 0.0

    def finite_loss(function: Callable[..., Outputs]) -> Callable[..., Outputs]:
        # plain torch would make 0 * -inf of the tokens without weight in the loss
        def wrapped(*args: Any, **options: Any) -> Outputs:
            logp, top_logp, entropy = function(*args, **options)
            assert top_logp is not None
            return (
                logp.masked_fill(logp == -torch.inf, -1.0),
                top_logp.masked_fill(top_logp == -torch.inf, -1.0),
                entropy,
            )

        return wrapped

    actual, gradients = head.run(finite_loss(linear_logprobs))
    expected, plain_gradients = head.run(finite_loss(plain_logprobs))
    assert_same((actual, gradients[:2]), (expected, plain_gradients[:2]))
    logp, _, entropy = linear_logprobs(
        head.hidden,
        head.weight,
        head.bias,
        head.token_ids,
        temperature=1.0,
        entropy=EntropyUse.REPORTED,
    )
    assert logp[3] == -torch.inf
    assert entropy is not None
    assert bool(entropy.isfinite().all())


def test_a_logit_that_is_not_a_number_is_not_hidden() -> None:
    head = Head()
    head.hidden[2, 0] = torch.nan
    outputs, _ = head.run(linear_logprobs)
    for output in outputs:
        assert output is not None
        assert bool(output[2].isnan().all())
        assert bool(output[:2].isfinite().all())


def test_an_id_outside_the_vocabulary_is_not_a_number() -> None:
    head = Head()
    head.token_ids[1] = 300
    outputs, _ = head.run(linear_logprobs)
    assert bool(outputs[0][1].isnan())
    assert bool(outputs[0][2:].isfinite().all())


def test_no_tokens() -> None:
    outputs, gradients = Head(num_tokens=0, with_bias=True).run(linear_logprobs)
    assert [tuple(output.shape) for output in outputs if output is not None] == [(0,), (0, 4), (0,)]
    assert [tuple(part.shape) for part in gradients if part is not None] == [
        (0, 6),
        (300, 6),
        (300,),
    ]
    assert all(bool((part == 0).all()) for part in gradients if part is not None)


@pytest.mark.usefixtures("slices_of_128")
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_16_bits_round_the_operands_and_not_the_logits(precision: torch.dtype) -> None:
    head = Head(num_tokens=64, width=32, dtype=torch.float32)
    options = {"precision": precision, "temperature": 0.9}
    (logp, *others), gradients = head.run(linear_logprobs, **options)
    expected, plain_gradients = head.run(plain_logprobs, **options)
    assert logp.dtype == torch.float32
    assert_same(((logp, *others), []), (expected, []), rtol=1e-5, atol=1e-5)
    # the gradient of the logits is an operand too: 8 bits, over a sum of many
    for gradient, plain in zip(gradients[:2], plain_gradients[:2], strict=True):
        assert gradient is not None
        assert plain is not None
        assert (gradient - plain).norm() < 5e-3 * plain.norm()
        assert gradient.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_does_not_reach_in(dtype: torch.dtype) -> None:
    head = Head(num_tokens=16, width=32, dtype=torch.float32)
    expected = head.run(linear_logprobs, precision=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = head.run(linear_logprobs, precision=dtype)
    assert_same(actual, expected, rtol=0.0, atol=0.0)


def test_parameters_in_bfloat16_get_gradients_in_bfloat16() -> None:
    head = Head(num_tokens=16, width=32, dtype=torch.bfloat16)
    outputs, gradients = head.run(linear_logprobs)
    assert {output.dtype for output in outputs if output is not None} == {torch.float32}
    assert {part.dtype for part in gradients if part is not None} == {torch.bfloat16}


class ProductWatch(TorchDispatchMode):
    """Counts matrix products, and remembers the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_products = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.num_products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        for part in made if isinstance(made, tuple | list) else (made,):
            if isinstance(part, Tensor):
                # the storage, so that a large tensor isn't hidden behind a view of a part
                held = part.untyped_storage().nbytes() // part.element_size()
                self.largest = max(self.largest, held, part.numel())
        return made


def largest_tensor(function: Callable[..., Outputs], head: Head) -> int:
    with ProductWatch() as watch:
        head.run(function)
    return watch.largest


@pytest.mark.parametrize(
    ("num_tokens", "vocabulary"), [(1024, 20_000), (1024, 40_000), (2048, 20_000)]
)
def test_no_tensor_of_tokens_times_vocabulary_appears(num_tokens: int, vocabulary: int) -> None:
    """In neither pass is a tensor larger than a slice, however large T and V are."""
    head = Head(num_tokens, vocabulary, width=8, dtype=torch.float32)
    assert largest_tensor(linear_logprobs, head) <= module.CPU_SLICE_BYTES // 4
    assert num_tokens * vocabulary > 2 * module.CPU_SLICE_BYTES // 4


def test_the_watch_sees_the_logits_of_the_plain_way() -> None:
    head = Head(256, 1000, width=8, dtype=torch.float32)
    assert largest_tensor(plain_logprobs, head) == 256 * 1000
    # and sees every product of one slice: two of logits, one of each gradient
    with ProductWatch() as watch:
        head.run(linear_logprobs)
    assert watch.num_products == 4


@pytest.mark.parametrize(
    ("frozen", "expected"), [((), 4), ((1,), 3), ((0,), 3), ((0, 1), 1)], ids=str
)
def test_frozen_parts_cost_no_product(frozen: tuple[int, ...], expected: int) -> None:
    head = Head()
    hidden, weight, _ = head.leaves()
    leaves = [hidden, weight]
    for index in frozen:
        leaf = leaves[index]
        assert leaf is not None
        leaf.requires_grad_(False)
    with ProductWatch() as watch:
        logp, _, _ = linear_logprobs(*leaves, None, head.token_ids, temperature=1.0)
        if logp.requires_grad:
            logp.sum().backward()
    assert watch.num_products == expected
    for index, leaf in enumerate(leaves):
        assert leaf is not None
        assert (leaf.grad is None) == (index in frozen)


def test_without_gradient_nothing_is_kept() -> None:
    head = Head()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda part: part):  # type: ignore
        with torch.no_grad(), ProductWatch() as watch:
            logp, _, _ = linear_logprobs(*head.leaves(), head.token_ids, temperature=1.0)
        assert watch.num_products == 1
        assert not logp.requires_grad
        assert not kept
        linear_logprobs(*head.leaves(), head.token_ids, temperature=1.0)
    # hidden, weight, ids, logp and normalizer
    assert sorted(tuple(part.shape) for part in kept) == [(7,), (7, 1), (7, 1), (7, 6), (300, 6)]


def test_only_the_entropy_is_learned_from() -> None:
    head = Head()
    head.of_logp.zero_()
    head.of_top.zero_()
    expected = head.run(plain_logprobs)
    hidden, weight, _ = head.leaves()
    _, _, entropy = linear_logprobs(
        hidden, weight, None, head.token_ids, temperature=1.0, entropy=EntropyUse.LEARNED
    )
    assert entropy is not None
    (entropy * head.of_entropy).sum().backward()
    assert hidden is not None
    assert weight is not None
    torch.testing.assert_close(hidden.grad, expected[1][0])
    torch.testing.assert_close(weight.grad, expected[1][1])
