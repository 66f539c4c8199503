"""`trustbatch init`: a small configuration to start from."""

import argparse
import json
from pathlib import Path

from rich.console import Console

from trustbatch.commands.base import Commands, add_command
from trustbatch.errors import ConfigError

DEFAULT_FILE = "trustbatch.toml"
QUICKSTART = Path("runs/quickstart")
SUMS = "arithmetic"
TEMPLATE = """\
# A run of trustbatch. All keys with their defaults are in docs/configuration.md.
#   trustbatch train {file} --dry-run    # the resolved configuration and the plan
#   trustbatch train {file}              # run it; the same command resumes it
#   trustbatch train {file} --objective.name grpo --run.name {run}-grpo

[model]
name = {model}  # a folder, a .gguf file, or a name on the hub

[task]
{task}

[rollout]
prompts_per_step = {prompts}  # prompts in a step
samples_per_prompt = 8  # completions of each
max_tokens = {max_tokens}  # longest completion
# temperature = 1.0
# lag = 0  # train on rollouts that are this many versions old

[objective]
name = {objective}

[training]
steps = {steps}  # batches of rollouts
learning_rate = {learning_rate}
# micro_batch_tokens = 4096  # lower it if memory runs out: the result stays the same

# [evaluation]
# every = 20  # steps
# suite = ["held_out.jsonl"]  # files, or tasks by name

[run]
name = {run}
# trackers = ["tensorboard"]  # also "wandb", "mlflow", "trackio"
"""


def add_init(commands: Commands) -> None:
    """Add the command and its arguments."""
    init = add_command(
        commands,
        "init",
        _init,
        help="write a small configuration to start from",
        epilog="Without --model it is about the tiny model of the quickstart, which is made where "
        "it is missing.",
    )
    init.add_argument("file", nargs="?", default=DEFAULT_FILE, help=f"default: {DEFAULT_FILE}")
    init.add_argument("--model", help="folder, .gguf file or hub name; default: a tiny one")
    init.add_argument("--task", default=SUMS, help="name, or a .jsonl/.parquet; default: sums")
    init.add_argument("--objective", default="p3o", help="default: p3o")


def _init(options: argparse.Namespace) -> int:
    from trustbatch.config import load_config
    from trustbatch.quickstart import quickstart_model

    file = Path(options.file)
    if file.exists():
        raise ConfigError(f"{file} exists already: name another file, or delete it.")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"{file} has no folder to be written to: make it first.")
    if options.model is None and options.task != SUMS:
        raise ConfigError(
            f"--task {options.task} needs a --model: the tiny model of the quickstart knows only "
            "sums."
        )
    text = _text(options, file)
    file.write_text(text, encoding="utf-8")
    try:
        load_config(file)  # a name that is not known is refused before a model is made
    except ConfigError:
        file.unlink()
        raise
    console = Console(soft_wrap=True, highlight=False)
    if options.model is None:
        quickstart_model(QUICKSTART, say=lambda line: console.print(line, markup=False))
    console.print(f"Written  {file}", markup=False)
    console.print(f"Next     trustbatch train {file} --dry-run", markup=False)
    return 0


def _text(options: argparse.Namespace, file: Path) -> str:
    from trustbatch.tasks.data_source import is_data_path

    is_tiny = options.model is None
    if is_data_path(options.task):
        task = [
            'name = "file"',
            f"path = {json.dumps(options.task)}  # rows with a problem and an answer",
        ]
    else:
        task = [f"name = {json.dumps(options.task)}"]
    if options.task == SUMS:
        task.append("level = 2  # sums of two digits")
    return TEMPLATE.format(
        file=file,
        model=json.dumps(str(QUICKSTART / "tiny-model-0") if is_tiny else options.model),
        task="\n".join(task),
        prompts=32,
        max_tokens=6 if options.task == SUMS else 1024,
        objective=json.dumps(options.objective),
        steps=60 if is_tiny else 100,
        learning_rate="3e-4  # a tiny model needs more than 1e-5" if is_tiny else "1e-5",
        run=json.dumps(file.stem),
    ).replace(f'--run.name "{file.stem}"-grpo', f"--run.name {file.stem}-grpo")
