"""The scale of one GPU: a model of half a billion parameters on word problems, minutes a run."""

from pathlib import Path
from typing import Any

from trustbatch.evaluation.suite import DATA_FILES
from trustbatch.studies.scales.scale import HeldOutTask, Scale, Suite

MODEL = "Qwen/Qwen2.5-Coder-0.5B-Instruct"
OTHER_MODEL = "Qwen/Qwen2.5-Coder-1.5B-Instruct"
"""has the same tokenizer"""
STEPS = 50
TRAIN_FILES = {"gsm8k": "gsm8k_train", "deepscaler": "deepscaler_preview_31k"}
HELD_OUT = {"gsm8k": "gsm8k", "deepscaler": "math500"}
MAX_TOKENS = {"gsm8k": 400, "deepscaler": 1024}
LONG_COMPLETIONS = 1024
BENCHMARKS = ("aime24", "aime25", "aime26", "amo_bench", "amc23")


def gpu_scale(*, task: str = "gsm8k", data: str | None = None) -> Scale:
    """Return it; `data` is a folder with the files of tasks, which come from the hub otherwise."""
    max_tokens = MAX_TOKENS[task]
    return Scale(
        name="gpu",
        base={
            "model": {"name": MODEL},
            "task": {"name": task, **from_folder(data, TRAIN_FILES[task])},
            "rollout": {"prompts_per_step": 48, "samples_per_prompt": 8, "max_tokens": max_tokens},
            "training": {
                "steps": STEPS,
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
        },
        seeds=(0, 1, 2),
        other_model=OTHER_MODEL,
        held_out=HeldOutTask(
            task={"name": HELD_OUT[task], "seed": 0, "shuffle": False, **_held_out(task, data)},
            num_prompts=256,
            num_samples=4,
        ),
        suite=Suite(tasks=[{"name": name} for name in BENCHMARKS], max_tokens=2048),
        least_seconds=60.0,
        end_seconds=45.0,
    )


def from_folder(data: str | None, file: str) -> dict[str, Any]:
    """Return where a task finds its rows; nothing where they are on the hub."""
    return {} if data is None else {"path": str(Path(data) / f"{file}.jsonl.gz")}


def _held_out(task: str, data: str | None) -> dict[str, Any]:
    name = HELD_OUT[task]
    if data is not None:
        return from_folder(data, DATA_FILES.get(name, name))
    return {"split": "test"} if name == "gsm8k" else {}
