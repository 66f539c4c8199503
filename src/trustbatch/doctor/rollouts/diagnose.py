"""The diagnosis of a file of rollouts: one call from file and model to a verdict."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from trustbatch.doctor.diagnose import Diagnosis
from trustbatch.doctor.examine import DEFAULT_TOKENS
from trustbatch.doctor.findings import (
    check_logprob_mode,
    check_precision,
    check_support,
    check_temperature,
)
from trustbatch.doctor.rollouts.examine import RolloutsExamination, examine_rollouts
from trustbatch.doctor.rollouts.findings import (
    check_logprobs,
    check_prompts,
    check_recorded_weights,
    check_tokens,
    notes_of,
)
from trustbatch.doctor.rollouts.read_file import read_rollouts
from trustbatch.doctor.rollouts.recorded import RecordedSettings
from trustbatch.doctor.verdict import Verdict, conclude
from trustbatch.doctor.wording import file_wording
from trustbatch.models.policy import Policy


def diagnose_rollouts(
    file: str | Path,
    model: str | Policy,
    *,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    engine_precision: str | None = None,
    policy_temperature: float | None = None,
    candidates: Sequence[str] = (),
    tokens: int = DEFAULT_TOKENS,
    device: str = "auto",
    precision: str = "auto",
    say: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """Say what is wrong with rollouts that another engine recorded.

    Args:
        file: JSON Lines, plain or .gz, in one of the formats of docs/doctor.md.
        model: the model that should have sampled them: a folder, a .gguf file, "smollm2", a name
            on the hub, or a policy.
        temperature: of sampling, where the file does not state it; likewise `top_p` and `top_k`.
        top_p: see `temperature`.
        top_k: see `temperature`; 0 is no limit.
        engine_precision: precision that the engine computes in, where the file does not state it.
        policy_temperature: at which the policy is trained; default: that of the rollouts.
        candidates: other models that may have sampled them, such as earlier checkpoints.
        tokens: about as many are recomputed, from all over the file.
        device: where they are recomputed, as `model.device`.
        precision: of the trainer's matrix products, as `model.precision`.
        say: called with a line about each longer step.
    """
    stated = RecordedSettings(temperature, top_p, top_k)
    read = read_rollouts(Path(file), num_tokens=tokens, stated=stated, say=say)
    if engine_precision is not None:
        kept = [replace(each, precision=each.precision or engine_precision) for each in read.kept]
        read = replace(read, kept=kept)

    def load(name: str) -> Policy:
        say(f"loading {name}")
        return Policy.load(name, device=device, precision=precision)

    examination = examine_rollouts(
        load(model) if isinstance(model, str) else model,
        read,
        policy_temperature=policy_temperature,
        candidates=candidates,
        load=load,
        say=say,
    )
    return Diagnosis(examination, judge_rollouts(examination))


def judge_rollouts(e: RolloutsExamination) -> Verdict:
    """Turn an examination into a verdict."""
    words = file_wording(is_stated=e.settings.stated)
    findings = [
        check_logprobs(e),
        check_tokens(e),
        check_prompts(e),
        check_recorded_weights(e),
        check_precision(e),
        check_temperature(e, words),
        check_support(e, words),
        check_logprob_mode(e),
    ]
    return conclude(
        findings,
        e,
        notes_of(e),
        fault="Off-policy, and not as recorded",
        by_intention="Off-policy as recorded",
    )
