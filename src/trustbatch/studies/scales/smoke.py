"""The scale of tests and quick looks: the quickstart's tiny model on sums, ten seconds a run.

Nothing dies here that dies on a real model: conclusions come from the cpu scale.
"""

from trustbatch.quickstart import EVALUATION_SEED, MAX_TOKENS
from trustbatch.studies.scales.scale import HeldOutTask, Scale, Suite
from trustbatch.studies.tiny_models import NEXT_TINY_MODEL, TINY_MODEL

STEPS = 40
LEVELS = (1, 2, 4)
"""those on which the warm start is right now and then: no longer sums, no products"""


def smoke_scale() -> Scale:
    """Return it: every seed has a warm start of its own, as in the quickstart."""
    return Scale(
        name="smoke",
        base={
            "model": {"name": TINY_MODEL, "device": "cpu"},
            "task": {"name": "arithmetic", "level": 2},
            "rollout": {"prompts_per_step": 24, "samples_per_prompt": 8, "max_tokens": MAX_TOKENS},
            # several optimizer steps a batch, as in the paper: with one, every ratio of fresh
            # rollouts is 1 and all objectives are the same
            "training": {"steps": STEPS, "mini_batches": 8, "learning_rate": 3e-4},
            "run": {"checkpoint_every": STEPS, "keep_checkpoints": 1, "rollouts_every": STEPS},
        },
        families={
            "async": {"training.mini_batches": 1},
            # as in the paper, what was learned half-way is evaluated too
            "fp8": {"run.checkpoint_every": STEPS // 2, "run.keep_checkpoints": 2},
        },
        seeds=(0, 1, 2, 3, 4),
        other_model=NEXT_TINY_MODEL,
        held_out=HeldOutTask(
            task={"name": "arithmetic", "seed": EVALUATION_SEED, "level": 2},
            num_prompts=512,
            num_samples=4,
        ),
        suite=Suite(
            tasks=[
                {"name": "arithmetic", "label": f"arithmetic-{level}", "level": level}
                for level in LEVELS
            ],
            num_endless=128,
            max_tokens=MAX_TOKENS,
        ),
        # sums depend on the number of threads in their last bits
        threads=1,
        least_seconds=2.0,
        end_seconds=5.0,
    )
