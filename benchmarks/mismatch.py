"""How far from on-policy? 1-ESS of the usual mismatches, one at a time, on one model.

    python benchmarks/mismatch.py CONFIG --other MODEL [--tokens N] [--a.b=c ...]

Engine and trainer are the native engine and the trainer of CONFIG. FP8 is e4m3 rounding of weights
and activations of all linear layers but the output head, computed without FP8 kernels.
"""

import argparse
from collections.abc import Callable, Sequence

from trustbatch.build.policies import load_model, load_policy
from trustbatch.build.session import configured_task
from trustbatch.config import Config, load_config
from trustbatch.doctor.examine import examine
from trustbatch.doctor.recompute import in_precision
from trustbatch.doctor.verdict import judge
from trustbatch.models.policy import Policy
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.types import Completion, GenerationRequest


class RoundedEngine(NativeEngine):
    """Samples from the policy's own parameters, computed in another precision."""

    def __init__(self, policy: Policy, *, precision: str, seed: int) -> None:
        super().__init__(policy, seed=seed)
        self.precision = precision

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Sample in that precision."""
        with in_precision(self.policy, self.precision):
            return super().generate(requests)


def main() -> None:
    """Print one row for each mismatch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--other", help="a model with the same tokenizer")
    parser.add_argument("--tokens", type=int, default=4096)
    options, overrides = parser.parse_known_args()
    config = load_config(options.config, overrides)
    policy = load_policy(config)

    def rounded(precision: str) -> Callable[[Policy], NativeEngine]:
        return lambda policy: RoundedEngine(policy, precision=precision, seed=config.seed)

    def in_fp8(precision: str) -> Callable[[Policy], NativeEngine]:
        return lambda policy: NativeEngine(
            policy, seed=config.seed, precision=precision, kv_precision="fp8"
        )

    def native(policy: Policy) -> NativeEngine:
        return NativeEngine(policy, seed=config.seed)

    rows: list[tuple[str, Callable[[Policy], NativeEngine], dict[str, float]]] = [
        ("native, same precision", native, {}),
        ("native, bfloat16 throughout", rounded("bfloat16"), {}),
        ("native, FP8", rounded("fp8"), {}),
        ("native, FP8 keys and values", in_fp8("auto"), {}),
        ("native, FP8 in both", in_fp8("fp8"), {}),
        ("T = 0.6", native, {"temperature": 0.6}),
        ("T = 1.2", native, {"temperature": 1.2}),
        ("top_p = 0.9", native, {"top_p": 0.9}),
    ]
    if options.other:
        other = load_model(config, options.other)
        rows.append(("another model", lambda _: native(other), {}))
    print("| rollouts | E[r] | 1-ESS | mean abs l | max abs l | the doctor says |")
    print("|---|---|---|---|---|---|")
    for name, engine_of, rollout in rows:
        print(_row(name, config, policy, engine_of(policy), rollout, options.tokens), flush=True)


def _row(
    name: str,
    config: Config,
    policy: Policy,
    engine: NativeEngine,
    rollout: dict[str, float],
    num_tokens: int,
) -> str:
    changed = config.model_copy(update={"rollout": config.rollout.model_copy(update=rollout)})
    task = configured_task(changed)
    examination = examine(
        changed, policy, engine, task, num_tokens=num_tokens, say=lambda line: None
    )
    total = examination.sampling.total
    causes = [f.cause for f in judge(examination, changed).findings if f.cause]
    return (
        f"| {name} | {total.mean_ratio:.4f} +- {total.mean_ratio_error:.1g} | "
        f"{total.one_minus_ess:.2g} | {total.mean_abs:.2g} | {total.max_abs:.2g} | "
        f"{', '.join(causes) or 'on-policy'} |"
    )


if __name__ == "__main__":
    main()
