"""AsyncP3OTrainer: TRL's asynchronous trainer with a rollout worker of ours, on a CPU.

Its attention is a CUDA kernel, which is replaced by a plain one, and its vLLM server is a queue of
completions. The rest is TRL's: planner, packing, data loader, loop and accounting.
"""

import math
import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tests.support.trl_cases import PROMPTS, difference, own_gradient, train
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from trustbatch.errors import ConfigError
from trustbatch.integrations.step_totals import as_objective
from trustbatch.integrations.trl import AsyncP3OTrainer
from trustbatch.models.policy import Policy
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.types import GenerationRequest, SamplingParams, TrainSequence


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    *_: Any,
    softmax_scale: float,
    **__: Any,
) -> Tensor:
    """Causal attention of segments [n, heads, size], each aligned with the end of its keys."""
    parts = []
    for number in range(len(starts_q) - 1):
        q = query[starts_q[number] : starts_q[number + 1]].transpose(0, 1)
        own = slice(starts_k[number], starts_k[number + 1])
        repeats = query.shape[1] // key.shape[1]
        k, v = (
            each[own].transpose(0, 1).repeat_interleave(repeats, dim=0) for each in (key, value)
        )
        sees = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        sees = sees.tril(k.shape[1] - q.shape[1])
        part = scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=softmax_scale)
        parts.append(part.transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = SimpleNamespace(flash_attn_varlen_func=attention)
    monkeypatch.setattr(packing, "_flash_attn", lambda: kernel)
    # asks CUDA for the name of the GPU
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)


class Worker:
    """A rollout worker of TRL whose completions were generated before."""

    def __init__(self, sequences: list[TrainSequence]) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        for number, sequence in enumerate(sequences):
            prompt, completion = sequence.prompt_token_ids, sequence.completion
            ids = [*prompt, *completion.token_ids.tolist()]
            trained = np.arange(len(ids)) >= len(prompt)
            logp = np.zeros(len(ids), dtype=np.float32)
            logp[trained] = completion.behavior_logp.numpy()
            self.rollout_buffer.put(
                RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=np.array(ids),
                    completion_mask=trained.astype(np.int64),
                    old_log_probs=logp,
                    advantage=sequence.advantage,
                    model_version=0,
                    group_id=number // 4,
                    metrics={"reward": 0.0},
                )
            )

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None: ...

    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError("all completions are used")


class NoTransfer:
    """Sends weights nowhere."""

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Any) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


@pytest.fixture(scope="module")
def sequences(tiny_folder: Path) -> list[TrainSequence]:
    """Completions of a warmer policy: two steps, and what the data loader takes ahead."""
    policy = Policy.load(str(tiny_folder), device="cpu", precision="float32")
    sampling = SamplingParams(max_tokens=7, stop_token_ids=policy.stop_token_ids, temperature=1.4)
    requests = [
        GenerationRequest(
            prompt_id=f"{text} {turn}",
            token_ids=tuple(policy.tokenizer.encode(text)),
            num_samples=4,
            sampling=sampling,
        )
        for turn in range(4)
        for text in PROMPTS
    ]
    tokens = {request.prompt_id: request.token_ids for request in requests}
    return [
        TrainSequence(
            prompt_token_ids=tokens[completion.prompt_id],
            completion=completion,
            advantage=math.sin(number),
        )
        for number, completion in enumerate(NativeEngine(policy, seed=0).generate(requests))
    ]


def make_trainer(
    model: Path, folder: Path, sequences: list[TrainSequence], *, number: int = 2, **arguments: Any
) -> AsyncP3OTrainer:
    settings = arguments.pop("settings", {})
    config = AsyncGRPOConfig(
        output_dir=str(folder),
        **{
            "use_cpu": True,
            "bf16": False,
            "dtype": "float32",
            "per_device_train_batch_size": 16 // number,
            "gradient_accumulation_steps": number,
            "num_generations": 4,
            "max_completion_length": 7,
            "token_budget": 0,
            "max_steps": 2,
            "max_grad_norm": 0.0,
            "learning_rate": 5e-3,
            "max_staleness": 9,
            "logging_steps": 1,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        | settings,
    )
    return AsyncP3OTrainer(
        str(model),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=AutoTokenizer.from_pretrained(model),
        rollout_worker=Worker(sequences),
        weight_transfer=NoTransfer(),
        **arguments,
    )


@pytest.mark.parametrize(("objective", "number"), [("p3o", 1), ("p3o", 4), ("grpo", 2)])
def test_gradients_are_ours_for_any_accumulation(
    objective: str, number: int, tiny_folder: Path, tmp_path: Path, sequences: list[TrainSequence]
) -> None:
    trainer = make_trainer(tiny_folder, tmp_path, sequences, number=number, objective=objective)
    steps = train(trainer)
    assert len(steps) == 2
    for taken, own in zip(steps, (sequences[:16], sequences[16:32]), strict=True):
        expected = own_gradient(taken, as_objective(objective), tiny_folder, sequences=own)
        assert difference(taken.gradient, expected) < 2e-5
    log = trainer.state.log_history[0]
    num_tokens = sum(len(each.completion.token_ids) for each in sequences[:16])
    assert log["tokens/count"] == log["batch/trained_tokens_per_step"] == num_tokens
    assert log["one_minus_ess"] > 0.01
    assert log["ratio/mean"] == pytest.approx(log["ratio"], rel=0.2)  # TRL's own, per micro-batch
    assert log["perf/fwd_s"] > 0


@pytest.mark.parametrize(
    ("settings", "objective", "words"),
    [
        ({"epsilon": 0.1}, "p3o", "epsilon = 0.1 is a setting of TRL's own losses"),
        ({}, {"name": "p3o", "entropy_coef": 0.1}, "remove it"),
    ],
)
def test_what_would_have_no_effect_is_refused(
    settings: dict[str, Any],
    objective: Any,
    words: str,
    tiny_folder: Path,
    tmp_path: Path,
    sequences: list[TrainSequence],
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_trainer(tiny_folder, tmp_path, sequences, objective=objective, settings=settings)
