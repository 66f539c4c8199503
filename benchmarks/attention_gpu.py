"""Time the attention of packed sequences on a GPU, forward and backward, one line of JSON per case.

    python benchmarks/attention_gpu.py

32k tokens as sequences of 576, 4096 or 16384, at 16 query and 8 key heads of 128, in bfloat16. The
FLOP/s figure counts causal work alone: 4 x heads x head x (L^2 / 2) forward, 2.5 times that
backward.
"""

import argparse
import inspect
import json
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

TOKENS = 32768
LENGTHS = (576, 4096, 16384)
QUERY_HEADS, KEY_HEADS, HEAD = 16, 8, 128
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""of query [N, Hq, D], key and value [N, Hkv, D]"""


def varlen(lengths: list[int]) -> Attention:
    """One kernel that knows where sequences begin."""
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    longest = max(lengths)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return varlen_attn(
            query, key, value, starts, starts, longest, longest, window_size=(-1, 0), **GROUPED
        )

    return attend


def one_by_one(lengths: list[int], backend: SDPBackend) -> Attention:
    """One kernel call per sequence."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = zip(*(part.split(lengths) for part in (query, key, value)), strict=True)
        with sdpa_kernel(backend):
            return torch.cat(
                [
                    scaled_dot_product_attention(
                        *(tensor.transpose(0, 1)[None] for tensor in part),
                        is_causal=True,
                        enable_gqa=True,
                    )[0].transpose(0, 1)
                    for part in parts
                ]
            )

    return attend


def as_rows(lengths: list[int], backend: SDPBackend) -> Attention:
    """All sequences have one length here, so rows need no padding."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = (
            part.unflatten(0, (len(lengths), lengths[0])).transpose(1, 2)
            for part in (query, key, value)
        )
        with sdpa_kernel(backend):
            attended = scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2).flatten(0, 1)

    return attend


def flex(lengths: list[int]) -> Attention:
    """One compiled kernel with a block mask."""
    sequence = torch.arange(len(lengths), device="cuda").repeat_interleave(
        torch.tensor(lengths, device="cuda")
    )

    def sees(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (sequence[query] == sequence[key]) & (query >= key)

    num_tokens = sum(lengths)
    mask = create_block_mask(sees, None, None, num_tokens, num_tokens, device="cuda", _compile=True)
    compiled = torch.compile(flex_attention)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = (part.transpose(0, 1)[None] for part in (query, key, value))
        return compiled(*parts, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return attend


CHOICES: dict[str, Callable[[list[int]], Attention]] = {
    "varlen": varlen,
    "one by one, cuDNN": lambda lengths: one_by_one(lengths, SDPBackend.CUDNN_ATTENTION),
    "one by one, flash": lambda lengths: one_by_one(lengths, SDPBackend.FLASH_ATTENTION),
    "rows, cuDNN": lambda lengths: as_rows(lengths, SDPBackend.CUDNN_ATTENTION),
    "rows, flash": lambda lengths: as_rows(lengths, SDPBackend.FLASH_ATTENTION),
    "flex": flex,
}


def milliseconds(action: Callable[[], object], repeats: int) -> float:
    """Median time on the device."""
    for _ in range(3):
        action()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        action()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repeats // 2]


def measure(
    attend: Attention,
    inputs: tuple[Tensor, Tensor, Tensor],
    gradient: Tensor,
    lengths: list[int],
    repeats: int,
) -> dict[str, float]:
    """Time the forward pass, and forward and backward together."""
    # the choices differ by rounding alone, or something is wrong
    checksum = float((attend(*inputs).float() * gradient.float()).mean())
    forward = milliseconds(lambda: attend(*inputs), repeats)
    both = milliseconds(lambda: torch.autograd.grad(attend(*inputs), inputs, gradient), repeats)
    flops = sum(4 * QUERY_HEADS * HEAD * n**2 / 2 for n in lengths)
    return {
        "checksum": round(checksum, 6),
        "forward_ms": round(forward, 3),
        "both_ms": round(both, 3),
        "forward_tflops": round(flops / forward / 1e9, 1),
        "both_tflops": round(3.5 * flops / both / 1e9, 1),
    }


def main() -> None:
    """Time every choice at every length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", choices=list(CHOICES), help="one of the choices")
    options = parser.parse_args()
    for length in LENGTHS:
        lengths = [length] * (TOKENS // length)
        shapes = [(sum(lengths), heads, HEAD) for heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS)]
        query, key, value = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
            for shape in shapes
        )
        gradient = torch.randn_like(query)
        for name in [options.only] if options.only else CHOICES:
            line: dict[str, object] = {"length": length, "choice": name}
            try:
                attend = CHOICES[name](lengths)
                line |= measure(attend, (query, key, value), gradient, lengths, options.repeats)
            except RuntimeError as error:
                line["error"] = str(error).splitlines()[0]
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
