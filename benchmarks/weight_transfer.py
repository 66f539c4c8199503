"""How long new weights take to reach engines, by each way of cluster.weight_transfer.

    python benchmarks/weight_transfer.py [--shape 0.6b] [--dtype bfloat16] [--engines 1 2]

Publishes tensors of a Qwen3's shapes from this process, and has 1 or 2 engines, each an actor on
Ray, copy them into tensors of their own at the same time. With several GPUs and --device cuda each
process has one, and "process_group" is NCCL; on a CPU it is gloo. "publish" is what the trainer
waits for.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from qwen3_shapes import SHAPES, Shape
from torch import Tensor

from trustbatch.cluster.ray_runtime import joined_ray
from trustbatch.config import parse_config

METHODS = ("shared_memory", "disk", "process_group")


def shapes_of(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of each parameter of a Qwen3 with tied embeddings."""
    yield "embed", (shape.vocabulary, shape.hidden)
    for layer in range(shape.layers):
        yield f"{layer}.q", (shape.heads * shape.head_dim, shape.hidden)
        for name in ("k", "v"):
            yield f"{layer}.{name}", (shape.key_value_heads * shape.head_dim, shape.hidden)
        yield f"{layer}.o", (shape.hidden, shape.heads * shape.head_dim)
        for name in ("gate", "up"):
            yield f"{layer}.{name}", (shape.intermediate, shape.hidden)
        yield f"{layer}.down", (shape.hidden, shape.intermediate)
        for name in ("q_norm", "k_norm"):
            yield f"{layer}.{name}", (shape.head_dim,)
        for name in ("input_norm", "output_norm"):
            yield f"{layer}.{name}", (shape.hidden,)
    yield "norm", (shape.hidden,)


class Engine:
    """Copies published weights into its own tensors."""

    def __init__(self, shapes: list[tuple[str, tuple[int, ...]]], dtype: Any, device: str) -> None:
        torch.set_num_threads(1)
        self.own = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in shapes}

    def take(self, publication: Any) -> float:
        """Copy a version; returns a number that depends on all of it."""
        from trustbatch.cluster.publishers import this_endpoint

        for name, tensor in publication.tensors(this_endpoint()):
            self.own[name].copy_(tensor)
        return sum(float(tensor.flatten()[-1]) for tensor in self.own.values())


def publisher_for(method: str, folder: Path) -> Any:
    """Return the publisher of a run with such a setting."""
    import ray

    from trustbatch.cluster.publishers import ObjectStorePublisher
    from trustbatch.weight_sync.group_publisher import ProcessGroupPublisher
    from trustbatch.weight_sync.publications import DiskPublisher

    if method == "process_group":
        return ProcessGroupPublisher(address=ray.util.get_node_ip_address(), seconds=600.0)
    return DiskPublisher(folder) if method == "disk" else ObjectStorePublisher()


def measure(method: str, engines: list[Any], weights: list[tuple[str, Tensor]], rounds: int) -> str:
    """Publish some versions, and return the times of publishing and of loading them."""
    import ray

    publishing, taking = [], []
    with tempfile.TemporaryDirectory() as folder:
        publisher = publisher_for(method, Path(folder))
        for version in range(1, rounds + 2):
            for _, tensor in weights:
                tensor.fill_(version)
            started = time.perf_counter()
            publication = publisher.publish(weights, version)
            published = time.perf_counter()
            found = ray.get([engine.take.remote(publication) for engine in engines], timeout=600)
            taking.append(time.perf_counter() - published)
            publishing.append(published - started)
            assert found == [float(version * len(weights))] * len(engines)
            publisher.forget(publication)
            del publication
        publisher.close()
    sent = sum(tensor.nbytes for _, tensor in weights) * len(engines) / 1e9
    later = statistics.median(taking[1:])
    return (
        f"| {method} | {len(engines)} | {statistics.median(publishing):.2f} | {taking[0]:.2f} | "
        f"{later:.2f} | {sent / later:.2f} |"
    )


def main() -> None:
    """Measure each method with each number of engines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--methods", choices=METHODS, nargs="+", default=METHODS)
    parser.add_argument("--rounds", type=int, default=3, help="after the first, which makes links")
    options = parser.parse_args()
    most = max(options.engines)
    tree = {"model": {"name": "any"}, "task": {"name": "arithmetic"}, "cluster": {"engines": most}}
    dtype: torch.dtype = getattr(torch, options.dtype)
    shapes = list(shapes_of(SHAPES[options.shape]))
    weights = [
        (name, torch.zeros(shape, dtype=dtype, device=options.device)) for name, shape in shapes
    ]
    size = sum(tensor.nbytes for _, tensor in weights) / 1e9
    print(
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"{platform.machine()}, torch {torch.__version__}: python {' '.join(sys.argv)}\n"
        f"{size:.2f} GB in {len(weights)} tensors\n"
    )
    print("| way | engines | publish s | first take s | take s | GB/s |\n|---|---|---|---|---|---|")
    with joined_ray(parse_config(tree)):
        import ray

        remote: Any = ray.remote(Engine)
        place = remote.options(num_cpus=1, num_gpus=1 if options.device == "cuda" else 0)
        engines = [place.remote(shapes, dtype, options.device) for _ in range(most)]
        ray.get([engine.__ray_ready__.remote() for engine in engines], timeout=600)
        for count in options.engines:
            for method in options.methods:
                print(measure(method, engines[:count], weights, options.rounds), flush=True)


if __name__ == "__main__":
    main()
