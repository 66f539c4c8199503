"""FSDP2 over NCCL: two ranks, which NCCL takes for two machines, share one GPU.

`NCCL_HOSTID` gives each process a machine of its own, so that one GPU is enough to see the
collectives of sharded training. It shows that results are right, and nothing about several GPUs.
"""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from safetensors.torch import load_file

from trustbatch.cli import main
from trustbatch.observe.run_folder import read_metrics

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
SECONDS = 240

CONFIG = """
[model]
name = "{model}"
device = "cuda"
precision = "float32"
{model_options}
[task]
name = "arithmetic"
[rollout]
prompts_per_step = 5
samples_per_prompt = 4
max_tokens = 6
temperature = 1.1
canary_every = 1
[objective]
name = "{objective}"
entropy_coef = 0.1  # a gradient above rounding, which Adam would turn into steps of its own
[training]
steps = 4
mini_batches = 2
learning_rate = 1e-3
micro_batch_tokens = 64
[run]
name = "run"
folder = "{folder}"
checkpoint_every = 2
"""
CASES = {
    "p3o": ("p3o", ""),
    "pact": ("pact", ""),
    "grpo with adapters": ("grpo", "lora = { rank = 4 }"),
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one_and_one_goes_on_alone(
    case: str, tiny_folder: Path, tmp_path: Path
) -> None:
    objective, model_options = CASES[case]
    configs = {name: tmp_path / f"{name}.toml" for name in ("one", "two")}
    for name, file in configs.items():
        settings = {"model": tiny_folder, "folder": tmp_path / name, "objective": objective}
        file.write_text(CONFIG.format(**settings, model_options=model_options))
    assert main(["train", str(configs["one"])]) == 0
    train_on_two_ranks(configs["two"])
    expected = read_metrics(tmp_path / "one" / "run")
    assert_same_run(read_metrics(tmp_path / "two" / "run"), expected)
    assert_same_weights(tmp_path / "two" / "run", tmp_path / "one" / "run")

    shutil.rmtree(tmp_path / "two" / "run" / "checkpoints" / "step-4")
    assert main(["train", str(configs["two"])]) == 0
    assert_same_run(read_metrics(tmp_path / "two" / "run"), expected)
    assert_same_weights(tmp_path / "two" / "run", tmp_path / "one" / "run")


def train_on_two_ranks(config: Path) -> None:
    """Start both ranks, each as the only process of its machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "tests.support.ranks.train", str(config)],
            cwd=ROOT,
            env=os.environ | shared | {"RANK": str(rank), "NCCL_HOSTID": f"machine-{rank}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], said[0][-3000:] + said[1][-3000:]


def assert_same_run(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Compare all that does not measure rounding or time."""
    assert len(actual) == len(expected)
    for mine, other in zip(actual, expected, strict=True):
        assert mine.keys() == other.keys()
        for key, value in other.items():
            if not key.startswith(("time/", "canary/", "memory/")):
                assert mine[key] == pytest.approx(value, rel=1e-3, abs=1e-6), key


def assert_same_weights(actual: Path, expected: Path) -> None:
    """Compare the weights of the last checkpoints, which Adam has moved by about 1e-3 a step."""
    mine, other = (weights_of(run / "checkpoints" / "step-4") for run in (actual, expected))
    assert mine.keys() == other.keys()
    for name, tensor in other.items():
        torch.testing.assert_close(mine[name], tensor, rtol=1e-3, atol=2e-5, msg=name)


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint's model files."""
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {
        f"{file.parent.name}:{name}": tensor
        for file in files
        if "trainer" not in file.parts[-2]
        for name, tensor in load_file(file).items()
    }
