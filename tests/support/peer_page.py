"""docs/coming-from.md, from the table of names: python -m tests.support.peer_page > the page."""

import sys

from trustbatch.config.peer_names import PEER_NAMES, PEERS

START = """# Coming from another framework

What the settings of TRL, verl and prime-rl are called here. The same table is behind the error for
an unknown key: `--num_generations 8` on the command line, `num_generations = 8` in a file and
`trustbatch.train(num_generations=8)` all say that it is `rollout.samples_per_prompt`.

Three things differ by more than their names:

- **A step** is one batch of rollouts, with `training.passes` x `training.mini_batches` optimizer
  steps; see [what a step is](architecture.md#what-a-step-is).
- **Batch sizes count prompts**, over all GPUs. How a batch is split to fit the memory changes no
  result, so there is no accumulation to set.
- **Trust is measured**: P3O, the default, has no clip range. `objective.name = "grpo"` has one.

All keys with their defaults are in [configuration.md](configuration.md).
"""


def coming_from() -> str:
    """Return the whole page."""
    parts = [START]
    for peer in PEERS:
        parts.append(f"## {peer}\n\n| {peer} | here | remark |\n|---|---|---|")
        for each in PEER_NAMES:
            if each.peer == peer:
                keys = ", ".join(f"`{key}`" for key in each.keys) or "none"
                parts.append(f"| `{each.name}` | {keys} | {each.note} |".replace("|  |", "| |"))
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(coming_from())
