"""The sizes at which every study can be run.

- smoke: for tests and quick looks, about ten seconds per run. The quickstart's tiny model on sums;
  objectives that collapse on a real model do not collapse here.
- cpu: for a laptop. A small language in which objectives collapse as they do on a real model: long
  completions that one error derails, a long tail of words, and a weak signal from few samples at a
  high learning rate. docs/cpu-scale.md compares it with a real model.
- gpu: for one GPU, minutes per run. A model of half a billion parameters on word problems.
- paper, paper-1.5b: the paper's tables of hyper-parameters, on eight GPUs. docs/studies.md says how
  each row became a key, and which rows leave a choice.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from trustbatch.evaluation.suite import DATA_FILES
from trustbatch.models.derail import MAX_TOKENS as DERAIL_MAX_TOKENS
from trustbatch.quickstart import EVALUATION_SEED
from trustbatch.quickstart import MAX_TOKENS as TINY_MAX_TOKENS
from trustbatch.studies.study import HeldOutTask, Scale, Suite
from trustbatch.studies.tiny_models import (
    DERAIL_MODEL,
    NEXT_TINY_MODEL,
    OTHER_DERAIL_MODEL,
    TINY_MODEL,
)
from trustbatch.tasks.derail import NUM_HELD_OUT

SMOKE_STEPS = 40
SMOKE_LEVELS = (1, 2, 4)
"""those that the warm start sometimes solves: short sums, no products"""


def smoke_scale() -> Scale:
    """Return the smoke scale: every seed has its own warm start, as in the quickstart."""
    return Scale(
        name="smoke",
        base={
            "model": {"name": TINY_MODEL, "device": "cpu"},
            "task": {"name": "arithmetic", "level": 2},
            "rollout": {
                "prompts_per_step": 24,
                "samples_per_prompt": 8,
                "max_tokens": TINY_MAX_TOKENS,
            },
            # several optimizer steps per batch, as in the paper: with one, every ratio of fresh
            # rollouts is 1 and all objectives are the same
            "training": {"steps": SMOKE_STEPS, "mini_batches": 8, "learning_rate": 3e-4},
            "run": {
                "checkpoint_every": SMOKE_STEPS,
                "keep_checkpoints": 1,
                "rollouts_every": SMOKE_STEPS,
            },
        },
        families={
            "async": {"training.mini_batches": 1},
            # as in the paper, the checkpoint at half of the steps is evaluated too
            "fp8": {"run.checkpoint_every": SMOKE_STEPS // 2, "run.keep_checkpoints": 2},
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
                for level in SMOKE_LEVELS
            ],
            num_endless=128,
            max_tokens=TINY_MAX_TOKENS,
        ),
        # the last bits of sums depend on the number of threads
        threads=1,
        least_seconds=2.0,
        end_seconds=5.0,
    )


CPU_STEPS = 20
DERAIL_HELD_OUT = {"name": "derail", "split": "test"}


def cpu_scale() -> Scale:
    """Return the CPU scale: all seeds start from one model, as on a GPU."""
    return Scale(
        name="cpu",
        base={
            "model": {"name": DERAIL_MODEL, "device": "cpu"},
            "task": {"name": "derail"},
            "rollout": {
                "prompts_per_step": 16,
                "samples_per_prompt": 4,
                "max_tokens": DERAIL_MAX_TOKENS,
            },
            "training": {
                "steps": CPU_STEPS,
                "mini_batches": 8,
                "learning_rate": 1.2e-3,
                # a decaying rate would end a drift before it shows
                "schedule": "constant",
                "warmup_fraction": 0.0,
            },
            "run": {
                "checkpoint_every": CPU_STEPS,
                "keep_checkpoints": 1,
                "rollouts_every": CPU_STEPS,
            },
        },
        families={
            "async": {"training.mini_batches": 1},
            # as in the paper, the checkpoint at half of the steps is evaluated too
            "fp8": {"run.checkpoint_every": CPU_STEPS // 2, "run.keep_checkpoints": 2},
        },
        seeds=(0, 1, 2, 3, 4),
        other_model=OTHER_DERAIL_MODEL,
        held_out=HeldOutTask(
            task={**DERAIL_HELD_OUT, "seed": 0}, num_prompts=NUM_HELD_OUT, num_samples=4
        ),
        suite=Suite(
            tasks=[DERAIL_HELD_OUT], num_endless=NUM_HELD_OUT, max_tokens=DERAIL_MAX_TOKENS
        ),
        # the last bits of sums depend on the number of threads
        threads=1,
        least_seconds=2.0,
        end_seconds=5.0,
    )


GPU_MODEL = "Qwen/Qwen2.5-Coder-0.5B-Instruct"
GPU_OTHER_MODEL = "Qwen/Qwen2.5-Coder-1.5B-Instruct"
"""has the same tokenizer"""
GPU_STEPS = 50
GPU_TRAIN_FILES = {"gsm8k": "gsm8k_train", "deepscaler": "deepscaler_preview_31k"}
GPU_HELD_OUT = {"gsm8k": "gsm8k", "deepscaler": "math500"}
GPU_MAX_TOKENS = {"gsm8k": 400, "deepscaler": 1024}
LONG_COMPLETIONS = 1024
MATH_BENCHMARKS = ("aime24", "aime25", "aime26", "amo_bench", "amc23")


def gpu_scale(*, task: str = "gsm8k", data: str | None = None) -> Scale:
    """Return the GPU scale; `data` is a folder with the task files; default: the hub."""
    max_tokens = GPU_MAX_TOKENS[task]
    return Scale(
        name="gpu",
        base={
            "model": {"name": GPU_MODEL},
            "task": {"name": task, **from_folder(data, GPU_TRAIN_FILES[task])},
            "rollout": {"prompts_per_step": 48, "samples_per_prompt": 8, "max_tokens": max_tokens},
            "training": {
                "steps": GPU_STEPS,
                "mini_batches": 8,
                "learning_rate": 4e-6,
                "micro_batch_tokens": 16384,
                "compile": True,
            },
            "run": {"checkpoint_every": 25, "keep_checkpoints": 1, "rollouts_every": 25},
        },
        families={
            "async": {"training.mini_batches": 1},
            "fp8": {"rollout.max_tokens": max(max_tokens, LONG_COMPLETIONS)},
            # many short runs, of which several share a GPU
            "evidence": {
                "rollout.prompts_per_step": 24,
                "training.steps": 16,
                "training.micro_batch_tokens": 4096,
                "training.compile": False,
                "run.rollouts_logged": 0,
            },
        },
        seeds=(0, 1, 2),
        other_model=GPU_OTHER_MODEL,
        held_out=HeldOutTask(
            task={"name": GPU_HELD_OUT[task], "seed": 0, "shuffle": False, **_held_out(task, data)},
            num_prompts=256,
            num_samples=4,
        ),
        suite=Suite(tasks=[{"name": name} for name in MATH_BENCHMARKS], max_tokens=2048),
        least_seconds=60.0,
        end_seconds=45.0,
    )


def from_folder(data: str | None, file: str) -> dict[str, Any]:
    """Return the option that points a task at its file; none if it comes from the hub."""
    return {} if data is None else {"path": str(Path(data) / f"{file}.jsonl.gz")}


def _held_out(task: str, data: str | None) -> dict[str, Any]:
    name = GPU_HELD_OUT[task]
    if data is not None:
        return from_folder(data, DATA_FILES.get(name, name))
    return {"split": "test"} if name == "gsm8k" else {}


SMALL_PAPER_MODEL = "Qwen/Qwen2.5-1.5B"
PAPER_SAMPLES_PER_PROMPT = 4
"""not in the paper's tables, but in the recipes of its code; with it, 512 samples are 64 prompts
for each of 2 rollout GPUs"""
PAPER_STEPS = 30
"""not in the paper's tables; its last evaluated checkpoint is that of iteration 30"""


def paper_scale(*, data: str | None = None) -> Scale:
    """Return the paper's scale; `data` is a folder with the task files; default: the hub."""
    long = _family(train_batch=48, micro_batch=4, rollout_batch=64, samples=512, max_tokens=4096)
    return Scale(
        name="paper",
        base=_base(data),
        families={
            "temperature": long,
            # each rollout GPU holds the other model as well
            "mixing": {**long, "rollout.vllm.gpu_memory_utilization": 0.45},
            "two_anchor": long,
            "fp8": {
                "model.name": "Qwen/Qwen3-8B-Base",
                # its template would put an empty thinking block before the answer
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
            tasks=[{"name": name} for name in MATH_BENCHMARKS],
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
    """Return the paper's scale with the smaller model of its figures.

    No table of the paper has it: each experiment uses the hyper-parameters of the larger model.
    """
    scale = paper_scale(data=data)
    base = scale.base_of("clip")
    base["model"]["name"] = SMALL_PAPER_MODEL
    del base["task"]["thinking"]  # it has no thinking mode
    own = ("model.name", "task.thinking")
    fp8 = {key: value for key, value in scale.families["fp8"].items() if key not in own}
    return replace(
        scale,
        name="paper-1.5b",
        base=base,
        families={**scale.families, "fp8": fp8},
        other_model=GPU_OTHER_MODEL,  # the paper mixes only with the larger model
    )


def _base(data: str | None) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": {"name": "Qwen/Qwen3-4B-Thinking-2507", "precision": "bfloat16"},
        # answers inside an open thinking block count too: few of them are closed in 1,024 tokens
        "task": {
            "name": "deepscaler",
            "thinking": False,
            **from_folder(data, DATA_FILES["deepscaler"]),
        },
        "rollout": {
            "engine": "vllm",
            "samples_per_prompt": PAPER_SAMPLES_PER_PROMPT,
            "temperature": 1.0,
            "vllm": {"tensor_parallel": 1, "gpu_memory_utilization": 0.9},
        },
        "training": {
            "steps": PAPER_STEPS,
            "optimizer": "adamw",
            "learning_rate": 1e-5,
            "betas": [0.9, 0.95],
            "weight_decay": 0.01,
            "gradient_clip": 1.0,
            "schedule": "cosine",
            "warmup_fraction": 0.1,
            "gradient_checkpointing": True,
        },
        # engines and trainers alternate, except in studies of lag
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
    """Translate the rows of the paper's table that differ between experiments."""
    return {
        "rollout.prompts_per_step": samples // PAPER_SAMPLES_PER_PROMPT,
        "rollout.prompts_per_call": rollout_batch,
        "rollout.max_tokens": max_tokens,
        # the fewest optimizer steps with at most `train_batch` sequences each
        "training.mini_batches": math.ceil(samples / train_batch),
        "training.micro_batch_tokens": micro_batch * max_tokens,
    }


def build_scale(name: str, *, task: str | None = None, data: str | None = None) -> Scale:
    """Return a scale by name; `task` applies to the gpu scale alone (default: gsm8k)."""
    if name == "smoke":
        return smoke_scale()
    if name == "cpu":
        return cpu_scale()
    if name == "gpu":
        return gpu_scale(task=task or "gsm8k", data=data)
    return paper_scale(data=data) if name == "paper" else small_paper_scale(data=data)
