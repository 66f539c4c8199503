"""The scale of a laptop: a small language in which objectives die, many as on a real model.

Long completions that a slip derails, a long tail of words and a weak signal: few samples, a high
learning rate. docs/cpu-scale.md has what dies here beside what dies on a real model.
"""

from trustbatch.models.derail import MAX_TOKENS
from trustbatch.studies.scales.scale import HeldOutTask, Scale, Suite
from trustbatch.studies.tiny_models import DERAIL_MODEL, OTHER_DERAIL_MODEL
from trustbatch.tasks.derail import NUM_HELD_OUT

STEPS = 20
HELD_OUT = {"name": "derail", "split": "test"}


def cpu_scale() -> Scale:
    """Return it: all seeds start from one model, as on a GPU."""
    return Scale(
        name="cpu",
        base={
            "model": {"name": DERAIL_MODEL, "device": "cpu"},
            "task": {"name": "derail"},
            "rollout": {"prompts_per_step": 16, "samples_per_prompt": 4, "max_tokens": MAX_TOKENS},
            "training": {
                "steps": STEPS,
                "mini_batches": 8,
                "learning_rate": 1.2e-3,
                # a rate that fades ends what drifts before it has got anywhere
                "schedule": "constant",
                "warmup_fraction": 0.0,
            },
            "run": {"checkpoint_every": STEPS, "keep_checkpoints": 1, "rollouts_every": STEPS},
        },
        families={
            "async": {"training.mini_batches": 1},
            # as in the paper, what was learned half-way is evaluated too
            "fp8": {"run.checkpoint_every": STEPS // 2, "run.keep_checkpoints": 2},
        },
        seeds=(0, 1, 2, 3, 4),
        other_model=OTHER_DERAIL_MODEL,
        held_out=HeldOutTask(task={**HELD_OUT, "seed": 0}, num_prompts=NUM_HELD_OUT, num_samples=4),
        suite=Suite(tasks=[HELD_OUT], num_endless=NUM_HELD_OUT, max_tokens=MAX_TOKENS),
        # sums depend on the number of threads in their last bits
        threads=1,
        least_seconds=2.0,
        end_seconds=5.0,
    )
