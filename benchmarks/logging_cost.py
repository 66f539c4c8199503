"""What token records and the ledger cost of a step.

    python benchmarks/logging_cost.py [CONFIG] [--a.b=c ...] [--rounds 5]

Builds the run of a configuration (default: configs/smollm2.toml with four optimizer steps per batch
and a lag of one, the worst case), generates one batch and trains on it again and again: plainly,
with token records, and with both. The cost at the default rates is that of a logged step every
`run.rollouts_every` and of a ledger every `run.ledger_every` steps, over the time of a plain step
with its generation. The median of all rounds counts. Prints JSON lines; works on a CPU and a GPU.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from trustbatch.batching.sequences import to_sequences
from trustbatch.build.session import build_session, build_source
from trustbatch.config import load_config
from trustbatch.loops.recorder import Recorder
from trustbatch.loops.session import Session
from trustbatch.loops.sources import with_version_logp
from trustbatch.observe.completion_log import logged_groups, readable_records
from trustbatch.observe.progress import Progress
from trustbatch.rewards import rewards_of
from trustbatch.training.observation import Observation
from trustbatch.types import RolloutBatch

WORST_CASE = ("--training.mini_batches=4", "--rollout.lag=1")


def main() -> None:
    """Time each kind of step in turns."""
    parser = argparse.ArgumentParser(description="The cost of token records and the ledger.")
    parser.add_argument("config", nargs="?", default="configs/smollm2.toml")
    parser.add_argument("--rounds", type=int, default=5)
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        own = [f"--run.folder={folder}", "--training.learning_rate=1e-9"]
        session = build_session(load_config(options.config, [*WORST_CASE, *overrides, *own]))
        try:
            measure(session, options.rounds)
        finally:
            session.close()


def measure(session: Session, rounds: int) -> None:
    """Print the seconds of each part, and the cost."""
    source = build_source(session)
    recorder = Recorder(session, source, Progress("cost", 1))
    seconds: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        if number == 1:
            seconds.clear()  # the first round warms up
        batch, took = timed(source.next_batch)
        seconds.setdefault("generate", []).append(took)
        wanted = recorder.observation(batch)
        kinds = {
            "train": Observation(),
            "train with tokens": Observation(recorded=wanted.recorded),
            "train with tokens and ledger": Observation(ledger=True, recorded=wanted.recorded),
        }
        for kind, observation in kinds.items():
            _, took = timed(partial(train, session, batch, observation))
            seconds.setdefault(kind, []).append(took)
        took = 0.0
        if session.config.rollout.lag:
            _, took = timed(partial(with_version_logp, batch, session.trainer, version=0))
        seconds.setdefault("log-probs of the sampling version", []).append(took)
    report({kind: statistics.median(each) for kind, each in seconds.items()}, session)


def train(session: Session, batch: RolloutBatch, observation: Observation) -> None:
    """Train on a batch, and write what was observed."""
    advantages = session.advantages(rewards_of(batch.groups))
    sequences = to_sequences(batch.groups, advantages)
    session.trainer.train(sequences, version=1, observation=observation)
    if observation.recorded:
        records = readable_records(
            logged_groups(batch.groups, session.config.run),
            advantages,
            step=1,
            columns=observation.tokens,
            tokenizer=session.policy.tokenizer,
        )
        session.run.write_rollouts(1, records)


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Return a result, and the seconds that it took."""
    start = time.perf_counter()
    result = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def report(seconds: dict[str, float], session: Session) -> None:
    """Print the medians, and the share of a step at the rates of the configuration."""
    run = session.config.run
    step = seconds["generate"] + seconds["train"]
    tokens = seconds["train with tokens"] - seconds["train"]
    ledger = seconds["train with tokens and ledger"] - seconds["train with tokens"]
    ledger += seconds["log-probs of the sampling version"]
    cost = tokens / run.rollouts_every + ledger / run.ledger_every
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    for kind, value in seconds.items():
        print(json.dumps({"part": kind, "seconds": round(value, 4)}))
    print(json.dumps({"cost": round(cost / step, 5), "step": round(step, 4), "device": device}))


if __name__ == "__main__":
    main()
