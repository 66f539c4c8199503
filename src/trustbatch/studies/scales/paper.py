"""The scale of the paper: its tables of hyper-parameters, on eight GPUs.

docs/studies.md says how each row of the tables became a key, and which rows leave a choice.
"""

import math
from dataclasses import replace
from typing import Any

from trustbatch.evaluation.suite import DATA_FILES
from trustbatch.studies.scales.gpu import BENCHMARKS, OTHER_MODEL, from_folder
from trustbatch.studies.scales.scale import Scale, Suite

SMALL_MODEL = "Qwen/Qwen2.5-1.5B"
SAMPLES_PER_PROMPT = 4
"""not in the paper's tables, but in the recipes of its code; with it, 512 samples are 64 prompts
for each of 2 rollout GPUs"""
STEPS = 30
"""not in the paper's tables; its last evaluated checkpoint is that of iteration 30"""


def paper_scale(*, data: str | None = None) -> Scale:
    """Return it; `data` is a folder with the files of tasks, which come from the hub otherwise."""
    long = _family(train_batch=48, micro_batch=4, rollout_batch=64, samples=512, max_tokens=4096)
    return Scale(
        name="paper",
        base=_base(data),
        families={
            "temperature": long,
            # each GPU that samples has the other model as well
            "mixing": {**long, "rollout.vllm.gpu_memory_utilization": 0.45},
            "two_anchor": long,
            "fp8": {
                "model.name": "Qwen/Qwen3-8B-Base",
                # its template would put an empty thought before the answer
                "task.thinking": None,
                "cluster.trainers": 5,
                "cluster.engines": 3,
                "run.checkpoint_every": 15,
                "run.keep_checkpoints": 2,
                **_family(
                    train_batch=5, micro_batch=1, rollout_batch=16, samples=256, max_tokens=16384
                ),
            },
            "async": {"training.mini_batches": 1},
        },
        seeds=(0,),
        other_model="Qwen/Qwen3-8B",
        lag_key="cluster.max_lag",
        suite=Suite(
            tasks=[{"name": name} for name in BENCHMARKS],
            samples=16,
            temperature=1.0,
            top_p=0.95,
            max_tokens=4096,
            engine="vllm",
        ),
        least_seconds=300.0,
        end_seconds=600.0,
        gpu_memory_gib=80.0,
    )


def small_paper_scale(*, data: str | None = None) -> Scale:
    """Return the same with the other model of the paper's figures, which is in none of its tables.

    So each experiment has the rows of its column, whatever is trained.
    """
    scale = paper_scale(data=data)
    base = scale.base_of("clip")
    base["model"]["name"] = SMALL_MODEL
    del base["task"]["thinking"]  # it has no thoughts
    own = ("model.name", "task.thinking")
    fp8 = {key: value for key, value in scale.families["fp8"].items() if key not in own}
    return replace(
        scale,
        name="paper-1.5b",
        base=base,
        families={**scale.families, "fp8": fp8},
        other_model=OTHER_MODEL,  # the paper mixes with the larger model only
    )


def _base(data: str | None) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": {"name": "Qwen/Qwen3-4B-Thinking-2507", "precision": "bfloat16"},
        # an answer counts before a thought has ended, too: few of this model's do in 1,024 tokens
        "task": {
            "name": "deepscaler",
            "thinking": False,
            **from_folder(data, DATA_FILES["deepscaler"]),
        },
        "rollout": {
            "engine": "vllm",
            "samples_per_prompt": SAMPLES_PER_PROMPT,
            "temperature": 1.0,
            "vllm": {"tensor_parallel": 1, "gpu_memory_utilization": 0.9},
        },
        "training": {
            "steps": STEPS,
            "optimizer": "adamw",
            "learning_rate": 1e-5,
            "betas": [0.9, 0.95],
            "weight_decay": 0.01,
            "gradient_clip": 1.0,
            "schedule": "cosine",
            "warmup_fraction": 0.1,
            "gradient_checkpointing": True,
        },
        # the engines take turns with the trainers unless a study is about lag
        "cluster": {"trainers": 6, "engines": 2, "max_lag": 0},
        "run": {"checkpoint_every": 10, "keep_checkpoints": 1},
    }
    family = _family(train_batch=48, micro_batch=8, rollout_batch=64, samples=512, max_tokens=1024)
    for key, value in family.items():
        table, name = key.split(".")
        base[table][name] = value
    return base


def _family(
    *, train_batch: int, micro_batch: int, rollout_batch: int, samples: int, max_tokens: int
) -> dict[str, Any]:
    """Translate the rows of the table of runs that differ between experiments."""
    return {
        "rollout.prompts_per_step": samples // SAMPLES_PER_PROMPT,
        "rollout.prompts_per_call": rollout_batch,
        "rollout.max_tokens": max_tokens,
        # the fewest optimizer steps of which none has more sequences than the train batch
        "training.mini_batches": math.ceil(samples / train_batch),
        "training.micro_batch_tokens": micro_batch * max_tokens,
    }
