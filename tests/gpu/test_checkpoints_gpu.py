"""Checkpoints of a model on a GPU: the copy is made before the next step, and all comes back."""

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import torch.distributed as dist
from tests.support import checkpoint_ranks as ranks

from trustbatch.checkpoints.load import newest_checkpoint, restore
from trustbatch.checkpoints.loop_state import LoopState
from trustbatch.checkpoints.save import Checkpointer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("sharded", [False, True])
def test_state_on_a_gpu_comes_back_bit_for_bit(
    tiny_folder: Path, tmp_path: Path, sharded: bool
) -> None:
    if sharded:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    try:
        trainer = ranks.make_trainer(tiny_folder, device="cuda")
        checkpointer = Checkpointer(tmp_path, trainer, keep=2)
        for step in (1, 2):
            ranks.take_step(trainer, step)
            checkpointer.save(LoopState(step=step))
        saved = ranks.whole_state(trainer)
        ranks.take_step(trainer, 3)  # while the checkpoint is written
        checkpointer.finish()
        again = ranks.make_trainer(tiny_folder, device="cuda")
        newest = newest_checkpoint(tmp_path)
        assert newest is not None
        assert restore(newest, again).step == 2
        restored = ranks.whole_state(again)
        assert restored.keys() == saved.keys()
        for name, tensor in restored.items():
            assert tensor.device == saved[name].device
            assert torch.equal(tensor, saved[name])
        ranks.take_step(again, 3)
    finally:
        if sharded:
            dist.destroy_process_group()
