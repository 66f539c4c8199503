"""Trains with P3OTrainer on each of several ranks, and writes what each step was."""

from pathlib import Path

import torch
from accelerate.state import PartialState
from tests.support.trl_cases import Sampler, make_trainer, train

from trustbatch.utils.distributed import this_rank

SETTINGS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "ddp_find_unused_parameters": False,
}
OBJECTIVES = ("p3o", "m2po")


def main(model: str, output: str) -> None:
    """Take two steps with each objective: one fresh, one off-policy."""
    torch.set_num_threads(1)
    folder = Path(model)
    for objective in OBJECTIVES:
        trainer = make_trainer(
            folder,
            Path(output),
            objective=objective,
            rollout_func=Sampler(folder),
            settings=SETTINGS,
        )
        steps = train(trainer)
        rank = this_rank()
        torch.save([vars(step) for step in steps], f"{output}/{objective}-{rank}.pt")
        log = trainer.state.log_history[0]
        names = ("loss", "policy/loss", "one_minus_ess")
        torch.save({name: log[name] for name in names}, f"{output}/{objective}-{rank}-log.pt")
    PartialState().destroy_process_group()
