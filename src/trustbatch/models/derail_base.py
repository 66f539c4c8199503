"""The base model of the language: a tiny Qwen3 that has read what the author writes."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from trustbatch.models.derail_corpus import Author
from trustbatch.models.tiny import (
    CONTEXT_LENGTH,
    Reporter,
    build_model,
    refuse_existing,
    save_model,
)
from trustbatch.tasks.derail import EOS, ORDINALS, PAD, derail_language

WIDTH = 96
PROMPT_LENGTH = len(ORDINALS) + 1
STEPS = 1000
BATCH_SIZE = 64
LEARNING_RATE = 4e-3


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: each word is a token, and what is no word of the language raises."""
    vocabulary = {token: index for index, token in enumerate(derail_language().vocabulary)}
    words = Tokenizer(models.WordLevel(vocabulary))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def warm_start(
    folder: Path,
    *,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    steps: int = STEPS,
) -> Path:
    """Pre-train a model on the corpus of a seed, write it to ``folder``, and return the folder.

    The result depends on ``seed`` alone (on one machine with one number of threads). ``progress``
    gets a short line about once a second; what it raises stops the training. ``folder`` must not
    exist, and appears only once it is complete.
    """
    refuse_existing(folder)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed, width=WIDTH)
    _fit(model, _batches(tokenizer, seed), steps, Reporter(progress, steps))
    save_model(model, tokenizer, folder)
    return folder


def _batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Tensor]:
    """Yield documents as rows of token ids, padded on the right."""
    ids = tokenizer.get_vocab()
    documents = Author().documents(derail_language(), seed)
    while True:
        rows = [torch.tensor([ids[word] for word in d]) for d in islice(documents, BATCH_SIZE)]
        yield pad_sequence(rows, batch_first=True, padding_value=ids[PAD])


def _fit(model: Qwen3ForCausalLM, batches: Iterator[Tensor], steps: int, report: Reporter) -> None:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.15
    )
    pad_id = model.config.pad_token_id
    model.train()
    for batch in islice(batches, steps):
        # digits of a prompt are random, hence not learnable; padding would cost half of the time
        targets = batch[:, PROMPT_LENGTH:]
        is_word = targets != pad_id
        states = model.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(states[:, PROMPT_LENGTH - 1 :][is_word])
        loss = cross_entropy(logits, targets[is_word])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        report.step("reading", loss.detach())
    model.eval()
