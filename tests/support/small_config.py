"""The configuration of a run that takes a moment, as a file."""

from pathlib import Path

CONFIG = """
[model]
name = {model!r}
[task]
name = "arithmetic"
level = 1
[rollout]
prompts_per_step = 2
samples_per_prompt = 2
max_tokens = 4
[training]
steps = {steps}
[run]
folder = {runs!r}
"""


def write_config(folder: Path, model: Path, *, steps: int) -> str:
    """Write config.toml into a folder, whose `runs` gets the runs; returns its path."""
    file = folder / "config.toml"
    runs = str(folder / "runs")
    file.write_text(CONFIG.format(model=str(model), runs=runs, steps=steps))
    return str(file)
