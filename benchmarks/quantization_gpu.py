"""Linear layers with quantized weights on a GPU: time and error beside bfloat16, as JSON lines.

    python benchmarks/quantization_gpu.py                      # trustbatch's own, and bitsandbytes
    python benchmarks/quantization_gpu.py --tiles --model 14b  # tiles of the fused kernel

Shapes are those of Qwen3-8B or 14B, with the joined products of the native engine. Each call has
weights of its own, more than the L2 cache holds, and all calls are replayed as one CUDA graph, so
that a time is that of the GPU alone. bitsandbytes and torchao are measured where they are
installed.
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trustbatch.models.quantization.formats import FORMATS, Codes, bytes_per_weight, quantize
from trustbatch.models.quantization.kernels import LARGEST_ROWS, dequantize, multiply
from trustbatch.models.quantization.tiles import MAX_SPLITS, Tile, num_processors, num_splits

SHAPES = {
    "8b": {
        "qkv": (6144, 4096),
        "output": (4096, 4096),
        "gate_up": (24576, 4096),
        "down": (4096, 12288),
    },
    "14b": {
        "qkv": (7168, 5120),
        "output": (5120, 5120),
        "gate_up": (34816, 5120),
        "down": (5120, 17408),
    },
}
TILES = [
    Tile(outputs=outputs, columns=columns, warps=8 if outputs == 128 else 4, stages=stages)
    for outputs in (32, 64, 128)
    for columns, stages in ((64, 4), (128, 2), (128, 4))
]
DISTINCT_BYTES = 160 * 2**20
MOST_COPIES = 16
Call = Callable[[Tensor], Tensor]


def main() -> None:
    """Print a line for each way, shape and number of rows, and of tiles their sums over shapes."""
    args = parse()
    torch.manual_seed(0)
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}))
    lines = []
    for line in measurements(args):
        lines.append(line)
        print(json.dumps(line), flush=True)
    for line in fastest(lines) if args.tiles else ():
        print(json.dumps(line))


def measurements(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what each way takes, until the time is over."""
    begin = time.monotonic()
    for shape in args.shapes:
        outputs, columns = SHAPES[args.model][shape]
        weight = 0.02 * torch.randn(outputs, columns, device="cuda", dtype=torch.bfloat16)
        for rows in args.rows or ([8, 64] if args.tiles else [1, 8, 64, 128, 256, 4096, 16384]):
            inputs = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
            exact = functional.linear(inputs, weight).float()
            of_formats = tiles if args.tiles else everything
            for name, calls in of_formats(weight, rows, args.formats):
                if time.monotonic() - begin > args.seconds:
                    return
                yield {"shape": shape, "rows": rows, "way": name} | measured(calls, inputs, exact)


def fastest(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a layer's microseconds with each tile, if every shape has its best splits."""
    best: dict[tuple[int, str], dict[str, tuple[float, str]]] = {}
    for line in lines:
        if "microseconds" in line:
            tile, _, splits = line["way"].partition(", splits ")
            shapes = best.setdefault((line["rows"], tile), {})
            found = (line["microseconds"], splits)
            shapes[line["shape"]] = min(found, shapes.get(line["shape"], found))
    num_shapes = len({line["shape"] for line in lines})
    sums = [
        (rows, round(sum(micro for micro, _ in shapes.values()), 2), tile, shapes)
        for (rows, tile), shapes in best.items()
        if len(shapes) == num_shapes
    ]
    for rows, micro, tile, shapes in sorted(sums, key=lambda each: each[:2]):
        splits = {shape: each for shape, (_, each) in shapes.items() if each}
        yield {"layer": micro, "rows": rows, "way": tile, "splits": splits}


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


def everything(
    weight: Tensor, rows: int, formats: list[str] | None
) -> Iterator[tuple[str, list[Call]]]:
    """Yield each way with a call for each copy of its weights."""
    yield (
        "bfloat16",
        [lambda x, w=w: functional.linear(x, w) for (w,) in copies(weight, size=weight.nbytes)],
    )
    for name in formats or FORMATS:
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


def tiles(weight: Tensor, rows: int, formats: list[str] | None) -> Iterator[tuple[str, list[Call]]]:
    """Yield the fused product as it is, and with different tiles and splits; by default of nf4."""
    for name in formats or ["nf4"]:
        coded = copies_of(quantize(weight, name))
        yield f"{name} fused", [lambda x, w=w: multiply(x, w, None) for w in coded]
        for tile in TILES:
            for splits in splits_to_try(weight, rows, tile):
                own = replace(tile, splits=splits)
                yield (
                    f"{name} fused {tile.outputs}x{tile.columns}, {tile.warps} warps, "
                    f"{tile.stages} stages, splits {splits}",
                    [lambda x, w=w, t=own: multiply(x, w, None, t) for w in coded],
                )


def splits_to_try(weight: Tensor, rows: int, tile: Tile) -> list[int]:
    """Return no split, the number that `multiply` would take, and its neighbors."""
    outputs, columns = weight.shape
    num_tiles = -(-outputs // tile.outputs) * -(-rows // LARGEST_ROWS)
    own = num_splits(num_tiles, columns // tile.columns, num_processors(weight.device))
    return sorted({1, max(own // 2, 1), own, min(2 * own, MAX_SPLITS)})


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
    parser.add_argument("--model", choices=SHAPES, default="8b", help="whose shapes")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES["8b"], default=[*SHAPES["8b"]])
    parser.add_argument("--rows", nargs="+", type=int, help="1 to 16384, of tiles 8 and 64")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, help="all, of tiles nf4")
    parser.add_argument("--tiles", action="store_true", help="tiles of the fused kernel alone")
    parser.add_argument("--seconds", type=float, default=500.0, help="when to stop")
    return parser.parse_args()


if __name__ == "__main__":
    main()
