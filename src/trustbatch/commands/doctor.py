"""`trustbatch doctor`: is this stack on-policy?"""

import argparse
import json
from pathlib import Path

from rich.console import Console

from trustbatch.commands.base import Commands, add_command
from trustbatch.doctor.rollouts.command import add_rollouts_arguments, diagnosed_rollouts
from trustbatch.errors import ConfigError
from trustbatch.utils.arguments import at_least_one


def add_doctor(commands: Commands) -> None:
    """Add the command and its arguments."""
    doctor = add_command(
        commands,
        "doctor",
        _doctor,
        shows_progress=True,
        takes_keys=True,
        help="is this stack on-policy? names what is not",
        epilog="Exit status 0: on-policy, 1: off-policy. Any key can be set: "
        "--rollout.temperature=0.6",
    )
    doctor.add_argument(
        "config", nargs="?", help="TOML file, as for train; nothing is trained or written"
    )
    doctor.add_argument(
        "--tokens",
        type=at_least_one,
        default=2048,
        help="tokens to sample and recompute; default: 2048",
    )
    doctor.add_argument("--json", help="file for everything that was measured")
    add_rollouts_arguments(doctor)


def _doctor(options: argparse.Namespace) -> int:
    if options.json and not Path(options.json).absolute().parent.is_dir():
        raise ConfigError(f"--json {options.json} has no folder to be written to: make it first.")
    if options.rollouts is not None:
        diagnosis = diagnosed_rollouts(options)
    elif options.config is None:
        raise ConfigError("Give the doctor a configuration, or --rollouts FILE and --model MODEL.")
    else:
        from trustbatch.config import load_config
        from trustbatch.doctor.diagnose import diagnose

        diagnosis = diagnose(load_config(options.config, options.overrides), tokens=options.tokens)
    diagnosis.show(Console(soft_wrap=True))
    if options.json:
        record = json.dumps(diagnosis.to_record(), indent=2)
        Path(options.json).write_text(record + "\n", encoding="utf-8")
    return 0 if diagnosis.is_on_policy else 1
