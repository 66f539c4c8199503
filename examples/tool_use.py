"""Tool use in one file: a tiny model learns to call a function instead of guessing.

    python examples/tool_use.py [FOLDER]

The prompt asks for the value of a key. The values are different in every episode, so guessing is
right once in ten times; the tool `lookup` always knows. The model is made on the spot and taught
two habits: mostly it guesses, and now and then it calls the tool and repeats what it hears. Which
habit pays, it learns from the reward alone. Less than a minute on two cores.
"""

import json
import random
import string
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

import trustbatch
from trustbatch.models.tiny import build_model, save_model
from trustbatch.tasks.tools import answer_tool_calls, tool_schemas
from trustbatch.types import Prompt, Turn

BEGIN, END = '<tool_call>{"name": "lookup", "arguments": {"key": ', "}}</tool_call>"
"""one token each, so that a call is short; a large model writes them in many"""
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALLS = 0.25
"""share of the taught episodes that call the tool"""
IGNORED = -100


class Lookup:
    """Anything with a prompt, a grader and a reply is an environment; this one has a tool."""

    name = "lookup"
    grades_in_process = True  # comparing two digits needs no other process

    def prompt(self, index: int) -> Prompt:
        """Return the index-th problem; its tools travel to the chat template."""
        rng = random.Random(index)
        values, key = rng.choices(range(10), k=10), rng.randrange(10)
        tools = tool_schemas([tool_of(values)])
        return Prompt(
            id=str(index),
            text=str(key),
            answer=str(values[key]),
            details={"values": values},
            chat={"tools": tools},
        )

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> list[dict[str, str]] | None:
        """Answer the calls of the last turn; without one, the episode is over."""
        return answer_tool_calls(turns[-1].text, [tool_of(prompt.details["values"])])

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 for the right value in the last turn."""
        return float(completion == prompt.answer)


def tool_of(values: Sequence[int]) -> Callable[[int], int]:
    """Return the tool of one episode."""

    def lookup(key: int) -> int:
        """Return the value of a key."""
        return values[key]

    return lookup


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of characters, and of a few longer tokens."""
    special = ["<pad>", "</s>", "<user>", "<assistant>", "<tool>"]
    tokens = [*special, BEGIN, END, *string.printable]
    characters = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    characters.add_tokens([BEGIN, END])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        eos_token="</s>",
        additional_special_tokens=special[2:],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def example(rng: random.Random, index: int) -> list[tuple[str, bool]]:
    """Return the texts of an episode, and whether they are the model's own."""
    problem = Lookup().prompt(index)
    said = [(f"[lookup]<user>{problem.text}</s><assistant>", False)]
    if rng.random() < CALLS:
        call = f"{BEGIN}{problem.text}{END}"
        (answer,) = answer_tool_calls(call, [tool_of(problem.details["values"])]) or []
        said += [(f"{call}</s>", True), (f"<tool>{answer['content']}</s><assistant>", False)]
        return [*said, (f"{answer['content']}</s>", True)]
    return [*said, (f"{rng.randrange(10)}</s>", True)]


def make_model(folder: Path, *, steps: int = 120, seed: int = 0) -> Path:
    """Teach a tiny model both habits; what the tool says is not learned."""
    if folder.exists():  # the same command continues a run
        return folder
    tokenizer = make_tokenizer()
    model = build_model(tokenizer, seed)
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        inputs, targets = [], []
        for number in range(64):
            said = example(rng, -1 - 64 * step - number)  # training has the other indices
            parts = [(tokenizer.encode(text), is_own) for text, is_own in said]
            inputs.append(torch.tensor([token for ids, _ in parts for token in ids]))
            targets.append(torch.tensor([t if own else IGNORED for ids, own in parts for t in ids]))
        logits = model(input_ids=pad_sequence(inputs, batch_first=True)[:, :-1]).logits
        target = pad_sequence(targets, batch_first=True, padding_value=IGNORED)[:, 1:]
        loss = cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save_model(model, tokenizer, folder)
    return folder


def main(folder: Path, *, steps: int = 15) -> None:
    """Make the model, train it, and say how often it calls the tool."""
    result = trustbatch.train(
        model={"name": str(make_model(folder / "model")), "device": "cpu"},
        task=Lookup(),
        rollout={"prompts_per_step": 32, "samples_per_prompt": 8, "max_tokens": 64},
        training={"steps": steps, "learning_rate": 1e-3},
        run={"name": "tool-use", "folder": str(folder)},
    )
    for line in (result.metrics[0], result.metrics[-1]):
        shown = {key: round(line[key], 2) for key in ("reward/mean", "episode/turns_mean")}
        print(f"step {line['step']}: {json.dumps(shown)}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/tool-use"))
