"""Linear layers with quantized weights on a GPU: time and error beside bfloat16, as JSON lines.

    python benchmarks/quantization_gpu.py                  # what trustbatch uses, and bitsandbytes
    python benchmarks/quantization_gpu.py --tiles --rows 8 64   # tiles of the fused kernel

Shapes are those of Qwen3-8B, with the joined products of the native engine. Each call has weights
of its own, more than the L2 cache holds, and all calls are replayed as one CUDA graph, so that a
time is that of the GPU alone. bitsandbytes and torchao are measured where they are installed.
"""

import argparse
import importlib.util
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trustbatch.models.quantization.formats import FORMATS, Codes, bytes_per_weight, quantize
from trustbatch.models.quantization.kernels import Tile, dequantize, multiply

SHAPES = {
    "qkv": (6144, 4096),
    "output": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
}
DISTINCT_BYTES = 160 * 2**20
MOST_COPIES = 16
Call = Callable[[Tensor], Tensor]


def main() -> None:
    """Print a line for each way, shape and number of rows."""
    args = parse()
    torch.manual_seed(0)
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}))
    begin = time.monotonic()
    for shape in args.shapes:
        outputs, columns = SHAPES[shape]
        weight = 0.02 * torch.randn(outputs, columns, device="cuda", dtype=torch.bfloat16)
        for rows in args.rows:
            inputs = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
            exact = functional.linear(inputs, weight).float()
            ways = tiles(weight, rows) if args.tiles else everything(weight, rows)
            for name, calls in ways:
                if time.monotonic() - begin > args.seconds:
                    return
                line = {"shape": shape, "rows": rows, "way": name}
                print(json.dumps(line | measured(calls, inputs, exact)), flush=True)


def measured(calls: list[Call], inputs: Tensor, exact: Tensor) -> dict[str, Any]:
    """Return the microseconds of a call and its relative error, or why it can't be measured."""
    try:
        error = (calls[0](inputs).float() - exact).norm() / exact.norm()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call(inputs)
    except (RuntimeError, NotImplementedError, AssertionError, ValueError, TypeError) as failure:
        return {"failed": f"{type(failure).__name__}: {failure}".splitlines()[0][:200]}
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    repeats = 3 if len(inputs) > 1024 else 20
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    micro = 1e3 * start.elapsed_time(end) / repeats / len(calls)
    return {"microseconds": round(micro, 2), "error": round(float(error), 5)}


def everything(weight: Tensor, rows: int) -> Iterator[tuple[str, list[Call]]]:
    """Yield each way with a call for each copy of its weights."""
    yield (
        "bfloat16",
        [lambda x, w=w: functional.linear(x, w) for (w,) in copies(weight, size=weight.nbytes)],
    )
    for name in FORMATS:
        coded = copies_of(quantize(weight, name))
        if rows <= 256:
            yield f"{name} fused", [lambda x, w=w: multiply(x, w, None) for w in coded]
        yield (
            f"{name} dequantized",
            [lambda x, w=w: functional.linear(x, dequantize(w, torch.bfloat16)) for w in coded],
        )
    if importlib.util.find_spec("bitsandbytes"):
        yield from of_bitsandbytes(weight)
    if importlib.util.find_spec("torchao"):
        yield from of_torchao(weight)


def tiles(weight: Tensor, rows: int) -> Iterator[tuple[str, list[Call]]]:
    """Yield the fused product with different tiles."""
    for name in FORMATS:
        coded = copies_of(quantize(weight, name))
        for outputs, columns, warps, stages in itertools.product(
            (32, 64, 128), (64, 128, 256), (4, 8), (3, 5)
        ):
            if (outputs == 32 and warps == 8) or (name == "fp8" and columns > 128):
                continue  # its scales are of 128 columns
            tile = Tile(outputs=outputs, columns=columns, warps=warps, stages=stages)
            yield (
                f"{name} fused {outputs}x{columns}, {warps} warps, {stages} stages",
                [lambda x, w=w, t=tile: multiply(x, w, None, t) for w in coded],
            )


def of_bitsandbytes(weight: Tensor) -> Iterator[tuple[str, list[Call]]]:
    """Yield the ways of bitsandbytes; its 8-bit layer can't be captured in a CUDA graph."""
    import bitsandbytes as bnb
    import bitsandbytes.functional as bnb_functional

    codes, state = bnb_functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    coded = copies(codes, size=codes.nbytes)
    yield "bitsandbytes nf4", [lambda x, c=c: bnb.matmul_4bit(x, c.t(), state) for (c,) in coded]
    yield (
        "bitsandbytes nf4 dequantized",
        [
            lambda x, c=c: functional.linear(x, bnb_functional.dequantize_4bit(c, state))
            for (c,) in coded
        ],
    )


def of_torchao(weight: Tensor) -> Iterator[tuple[str, list[Call]]]:
    """Yield the ways of torchao that need no other package."""
    from torchao import quantization

    for name, config in (
        ("int8", quantization.Int8WeightOnlyConfig()),
        ("fp8", quantization.Float8WeightOnlyConfig()),
    ):
        layer = torch.nn.Linear(
            weight.shape[1], len(weight), bias=False, device="cuda", dtype=torch.bfloat16
        )
        layer.weight.data.copy_(weight)
        quantization.quantize_(layer.requires_grad_(False), config)
        yield f"torchao {name}", [layer]


def copies(*tensors: Tensor, size: float) -> list[tuple[Tensor, ...]]:
    """Return copies that together are larger than the L2 cache."""
    count = min(max(-(-DISTINCT_BYTES // int(size)), 1), MOST_COPIES)
    return [tuple(each.clone() for each in tensors) for _ in range(count)]


def copies_of(weight: Codes) -> list[Codes]:
    """Return copies of a quantized weight."""
    size = len(weight.codes) * weight.columns * bytes_per_weight(weight.format.name, weight.columns)
    return [
        Codes(codes, scales, weight.format, weight.columns)
        for codes, scales in copies(weight.codes, weight.scales, size=size)
    ]


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 128, 256, 4096, 16384])
    parser.add_argument("--tiles", action="store_true", help="tiles of the fused kernel alone")
    parser.add_argument("--seconds", type=float, default=500.0, help="when to stop")
    return parser.parse_args()


if __name__ == "__main__":
    main()
