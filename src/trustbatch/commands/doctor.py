"""`trustbatch doctor`: is this stack on-policy?"""

import argparse
import json
from pathlib import Path

from rich.console import Console

from trustbatch.commands.base import Commands, add_command
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
    doctor.add_argument("config", help="TOML file, as for train; nothing is trained or written")
    doctor.add_argument(
        "--tokens",
        type=at_least_one,
        default=2048,
        help="tokens to sample and recompute; default: 2048",
    )
    doctor.add_argument("--json", help="file for everything that was measured")


def _doctor(options: argparse.Namespace) -> int:
    from trustbatch.build.data import checked_task
    from trustbatch.build.engines import build_engine, load_second_policies
    from trustbatch.build.policies import load_policy
    from trustbatch.build.session import configured_task
    from trustbatch.config import load_config
    from trustbatch.doctor.examine import examine
    from trustbatch.doctor.verdict import judge, show, to_record
    from trustbatch.utils.terminal import LiveLine

    config = load_config(options.config, options.overrides)
    if options.json and not Path(options.json).absolute().parent.is_dir():
        raise ConfigError(f"--json {options.json} has no folder to be written to: make it first.")
    task = configured_task(config)
    line = LiveLine()
    line.show(f"loading {config.model.name}")
    policy = load_policy(config)
    task = checked_task(
        config,
        task,
        [],
        count_tokens=policy.count_tokens,
        context_length=policy.context_length,
        say=line.show,
    )
    load_second_policies(config, policy)  # refuses what a run would refuse
    engine = build_engine(config, policy)
    try:
        examination = examine(
            config, policy, engine, task, num_tokens=options.tokens, say=line.show
        )
    finally:
        engine.close()
    line.show("examined", last=True)
    verdict = judge(examination, config)
    show(Console(soft_wrap=True), examination, verdict)
    if options.json:
        record = to_record(examination, verdict)
        Path(options.json).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0 if verdict.is_on_policy else 1
