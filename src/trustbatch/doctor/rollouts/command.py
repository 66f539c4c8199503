"""`trustbatch doctor --rollouts FILE --model M`: its options, and what they ask for."""

import argparse
from typing import TYPE_CHECKING

from trustbatch.errors import ConfigError

if TYPE_CHECKING:
    from trustbatch.doctor.diagnose import Diagnosis

PRECISIONS = ("float32", "bfloat16", "fp8")


def add_rollouts_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for rollouts that another engine recorded."""
    group = parser.add_argument_group("rollouts of another engine, in the place of a configuration")
    group.add_argument("--rollouts", metavar="FILE", help="JSON Lines of vLLM, of an API, or plain")
    group.add_argument("--model", help="that should have sampled them: folder, .gguf or hub name")
    group.add_argument(
        "--candidates",
        nargs="+",
        default=[],
        metavar="MODEL",
        help="that may have, e.g. older ones",
    )
    group.add_argument("--temperature", type=float, help="where the file does not state it")
    group.add_argument("--top-p", type=float, help="likewise")
    group.add_argument("--top-k", type=int, help="likewise; 0 is no limit")
    group.add_argument("--engine-precision", choices=PRECISIONS, help="likewise")
    group.add_argument(
        "--policy-temperature", type=float, help="at which it is trained; default: the rollouts'"
    )
    group.add_argument(
        "--device", default="auto", help="cpu or cuda; default: a GPU if there is one"
    )
    group.add_argument(
        "--precision",
        default="auto",
        choices=("auto", *PRECISIONS[:2]),
        help="of the trainer; default: bfloat16 on a GPU, else float32",
    )


def diagnosed_rollouts(options: argparse.Namespace) -> "Diagnosis":
    """Diagnose the file that the options name."""
    # torch takes seconds to import: a typing error must not wait for it
    from trustbatch.doctor.rollouts.diagnose import diagnose_rollouts
    from trustbatch.utils.terminal import LiveLine

    if options.overrides:
        raise ConfigError(
            f"Unknown with --rollouts: {' '.join(options.overrides)}; keys of a configuration are "
            "for doctor CONFIG."
        )
    if options.config is not None:
        raise ConfigError("The doctor takes a configuration or --rollouts, not both: drop one.")
    if options.model is None:
        raise ConfigError("--rollouts needs --model: the model that should have sampled them.")
    line = LiveLine()
    diagnosis = diagnose_rollouts(
        options.rollouts,
        options.model,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        engine_precision=options.engine_precision,
        policy_temperature=options.policy_temperature,
        candidates=options.candidates,
        tokens=options.tokens,
        device=options.device,
        precision=options.precision,
        say=line.show,
    )
    line.show("examined", last=True)
    return diagnosis
