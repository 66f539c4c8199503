"""Direct weight transfer from a GPU: by NCCL to another one, through host memory to the same."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from trustbatch.cluster.ray_runtime import joined_ray
from trustbatch.config import parse_config

pytestmark = pytest.mark.gpu


def test_nccl_brings_tensors_and_outlives_a_dead_engine() -> None:
    loopback = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_HOSTID": "trainer"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("nccl_group.py")],
        env=os.environ | loopback,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_an_engine_gets_what_a_gpu_holds() -> None:
    """With one GPU through host memory, and the log says so; with several by NCCL."""
    tree = {"model": {"name": "any"}, "task": {"name": "arithmetic"}, "cluster": {"engines": 2}}
    with joined_ray(parse_config(tree)):
        import ray

        from trustbatch.cluster.publishers import this_endpoint
        from trustbatch.weight_sync.group_publisher import ProcessGroupPublisher
        from trustbatch.weight_sync.process_group import Backend

        class Taker:
            def take(self, publication: Any) -> tuple[str, list[float]]:
                tensors = [tensor for _, tensor in publication.tensors(this_endpoint())]
                return tensors[0].device.type, [float(tensor.double().sum()) for tensor in tensors]

        has_several = torch.cuda.device_count() > 1
        weights = [(f"w{n}", torch.full((2**24,), float(n), device="cuda")) for n in range(20)]
        publisher = ProcessGroupPublisher(address=ray.util.get_node_ip_address(), seconds=120.0)
        publication = publisher.publish(weights, 3)
        for _, tensor in weights:
            tensor.zero_()  # the copy is another one
        remote: Any = ray.remote(Taker)
        engines = [remote.options(num_gpus=0.5).remote() for _ in range(2)]
        found = ray.get([engine.take.remote(publication) for engine in engines], timeout=300)
        expected = [2.0**24 * n for n in range(20)]
        assert found == [("cuda" if has_several else "cpu", expected)] * 2
        backend = Backend.NCCL if has_several else Backend.GLOO
        assert {group.backend for _, group in publisher._groups.values()} == {backend}
        publisher.close()
