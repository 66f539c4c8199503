"""A tiny language model, trained in seconds, for a quickstart that runs on a laptop.

Reinforcement learning cannot teach a model this small to add, but it can sharpen one that is
sometimes right. So :func:`warm_start` first trains on two-digit sums and then on mostly wrong ones.
The result behaves like a base model: one sample at temperature 1 is seldom right, and one of
sixteen nearly always. The text is ``"12+34="`` answered by ``"46</s>"``.
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trustbatch.errors import CheckpointError
from trustbatch.models.loading import quiet_bars

PAD_TOKEN = "<pad>"
EOS_TOKEN = "</s>"
TINY_VOCABULARY: tuple[str, ...] = (PAD_TOKEN, EOS_TOKEN, *"0123456789+-*=")
"""The tokens of the tiny model, in the order of their ids."""

CONTEXT_LENGTH = 128
PROMPT_LENGTH = len("12+34=")
ROW_LENGTH = PROMPT_LENGTH + len("198") + 1
PAD_ID = TINY_VOCABULARY.index(PAD_TOKEN)
ZERO_ID = TINY_VOCABULARY.index("0")
PROGRESS_PERIOD_S = 1.0


@dataclass(frozen=True)
class _Phase:
    """One phase of the warm start."""

    name: str
    batch_size: int
    learning_rate: float
    wrong_digits: float


CLEAN = _Phase("clean sums", batch_size=256, learning_rate=7e-3, wrong_digits=0.0)
# Noise this strong can wash away what was learned: the larger batch and the lower rate prevent it.
NOISY = _Phase("noisy sums", batch_size=512, learning_rate=7e-4, wrong_digits=0.36)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the character-level tokenizer of the tiny model.

    There is no unknown token: encoding a character outside :data:`TINY_VOCABULARY` raises, so a
    prompt that the model has never seen is reported instead of silently changed.
    """
    vocabulary = {token: index for index, token in enumerate(TINY_VOCABULARY)}
    characters = Tokenizer(models.WordLevel(vocabulary))
    # A dot would not match line ends, which would then reach the model glued to their neighbors.
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, *, width: int = 128
) -> Qwen3ForCausalLM:
    """Return an untrained float32 Qwen3 for a tokenizer; 0.33 million parameters for the tiny one.

    The weights depend on ``seed`` alone, and the caller's random state is left as it was.
    """
    vocabulary = tokenizer.get_vocab()
    eos_id, pad_id = vocabulary[str(tokenizer.eos_token)], vocabulary[str(tokenizer.pad_token)]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        # The usual 0.02 is meant for wide layers; at this width it doubles the time to learn.
        initializer_range=0.08,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
    model.generation_config = GenerationConfig(eos_token_id=eos_id, pad_token_id=pad_id)
    return model


def warm_start(
    folder: Path,
    *,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    clean_steps: int = 310,
    noisy_steps: int = 60,
) -> Path:
    """Train a base-model-like checkpoint of the tiny model in ``folder`` and return the folder.

    The first ``clean_steps`` train on correct sums, the following ``noisy_steps`` on mostly wrong
    ones.
    The result depends on ``seed`` alone (on one machine with one number of threads). ``progress``
    gets a short line about once per second; an error that it raises stops the training. ``folder``
    must not exist, and appears only once it is complete.
    """
    refuse_existing(folder)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed)
    rows = _all_problems(tokenizer)
    generator = torch.Generator().manual_seed(seed)
    report = Reporter(progress, clean_steps + noisy_steps)
    _fit(model, rows, CLEAN, clean_steps, generator, report)
    _fit(model, rows, NOISY, noisy_steps, generator, report)
    save_model(model, tokenizer, folder)
    return folder


def refuse_existing(folder: Path) -> None:
    """Refuse an existing folder before time is spent on a model for it."""
    if folder.exists():
        raise CheckpointError(f"{folder} already exists: delete it or choose another folder.")


def save_model(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a checkpoint that appears only once it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as staging:
        # A folder inside the temporary one has ordinary permissions, not private ones.
        finished = Path(staging) / "model"
        with quiet_bars():
            model.save_pretrained(finished)
            tokenizer.save_pretrained(finished)
        os.rename(finished, folder)


class Reporter:
    """Passes lines to ``progress``: at most one per second, and always the last one."""

    def __init__(self, progress: Callable[[str], None] | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._step = 0
        self._last = float("-inf")

    def step(self, phase: str, loss: Tensor) -> None:
        """Count one more training step, and report it if it is time."""
        self._step += 1
        now = time.monotonic()
        due = now - self._last >= PROGRESS_PERIOD_S or self._step == self._total
        if self._progress is not None and due:
            self._last = now
            self._progress(f"{phase}: step {self._step}/{self._total}, loss {loss.item():.3f}")


def _all_problems(tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return every two-digit sum with its answer, one padded row of token ids for each."""
    texts = [f"{a}+{b}={a + b}{EOS_TOKEN}" for a in range(10, 100) for b in range(10, 100)]
    encoded = tokenizer(texts, padding="max_length", max_length=ROW_LENGTH, padding_side="right")
    return torch.tensor(encoded["input_ids"])


def _fit(
    model: Qwen3ForCausalLM,
    rows: Tensor,
    phase: _Phase,
    steps: int,
    generator: torch.Generator,
    report: Reporter,
) -> None:
    """Train on random batches of ``rows`` for the given number of steps."""
    if steps == 0:
        return
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=phase.learning_rate, betas=(0.9, 0.99), weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, phase.learning_rate, total_steps=steps, pct_start=0.15
    )
    model.train()
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (phase.batch_size,), generator=generator)]
        batch = _with_wrong_digits(batch, phase.wrong_digits, generator)
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits[:, PROMPT_LENGTH - 1 :]
        # Only the answer and its end are learned: the operands are random, hence not learnable.
        loss = cross_entropy(
            logits.flatten(0, 1), batch[:, PROMPT_LENGTH:].flatten(), ignore_index=PAD_ID
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        report.step(phase.name, loss.detach())
    model.eval()


def _with_wrong_digits(batch: Tensor, fraction: float, generator: torch.Generator) -> Tensor:
    """Return the batch with about ``fraction`` of its answer digits replaced by another digit.

    The wrong answers of a problem are many and each is rare, so that the right one stays the most
    likely of all: this is what leaves something to sharpen.
    """
    answers = batch[:, PROMPT_LENGTH:]
    shift = torch.randint(1, 10, answers.shape, generator=generator)
    is_wrong = torch.rand(answers.shape, generator=generator) < fraction
    wrong = (answers - ZERO_ID + shift) % 10 + ZERO_ID
    answers = torch.where(is_wrong & (answers >= ZERO_ID), wrong, answers)
    return torch.cat([batch[:, :PROMPT_LENGTH], answers], dim=1)
