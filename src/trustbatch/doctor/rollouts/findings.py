"""The checks of recorded rollouts that a stack does not need, and those of its weights."""

from trustbatch.doctor.findings import Finding, Status
from trustbatch.doctor.rollouts.examine import RolloutsExamination
from trustbatch.doctor.rollouts.text import Lines

SAMPLED_BY_OTHER = 0.5
"""share of the way to another model from which on it is the nearer one"""
CLEARLY = 5.0
"""standard errors"""
READINGS = {
    "bos_missing": (
        "prompt",
        "The log-probs fit prompts that begin with a beginning-of-sequence token, which the "
        "recorded ones lack: the trainer would see another context than the engine did. Record the "
        "prompt_token_ids that the engine used.",
    ),
    "bos_extra": (
        "prompt",
        "The log-probs fit prompts without their first beginning-of-sequence token: it was added "
        "after sampling, or twice. Record the prompt_token_ids that the engine used.",
    ),
    "tied_head": (
        "tied_head",
        "The log-probs are those of a model whose output head is its input embeddings, and this "
        "model has a head of its own: the engine never loaded lm_head. Set tie_word_embeddings = "
        "false in the config.json that it reads, and load the weights again.",
    ),
}


def check_logprobs(e: RolloutsExamination) -> Finding:
    """Check that there is one log-prob for each token: finite, not positive, in its place."""
    found = e.preparation
    measured = (
        f"{e.num_tokens} tokens of {e.num_sequences} completions examined; not finite in "
        f"{len(found.not_finite)}, above 0 in {len(found.positive)}, another number of them in "
        f"{len(found.other_length)}"
    )

    def fault(cause: str, sentences: str) -> Finding:
        return Finding("log-probs", measured, Status.FAULT, cause, None, sentences)

    if e.shifted:
        late, first = ("next", "first") if e.shifted > 0 else ("previous", "last")
        return fault(
            "shifted",
            f"The log-probs are off by one: each is recorded with the token {_side(e.shifted)} "
            f"its own ({late} token's place fits, by a wide margin). Every ratio is then that of "
            f"two unrelated tokens: drop the {first} entry of one of the two lists when they are "
            "put together. The other checks are made with the log-probs in their right places.",
        )
    if found.not_finite:
        return fault(
            "not_finite",
            f"{len(found.not_finite)} completions have a log-prob that is missing, NaN or minus "
            f"infinity ({found.not_finite}): the engine's logits overflow, or the token was not "
            "among those that it sampled from. One such token makes a loss NaN.",
        )
    if found.positive:
        return fault(
            "positive",
            f"{len(found.positive)} completions have log-probs above 0 ({found.positive}): they "
            "are probabilities, or have the wrong sign.",
        )
    return Finding("log-probs", measured, Status.GOOD)


def _side(places: int) -> str:
    return "before" if places > 0 else "after"


def check_tokens(e: RolloutsExamination) -> Finding:
    """Check that ids, texts and log-probs belong to the same tokens."""
    texts, found = e.texts, e.preparation
    measured = (
        f"{texts.num_texts} texts: {len(texts.other_text)} are not those of their ids, "
        f"{len(texts.other_encoding)} encode to other ids; {len(e.damaged)} completions differ "
        "alone"
    )

    def fault(sentences: str) -> Finding:
        return Finding("tokens", measured, Status.FAULT, "retokenized", None, sentences)

    remedy = "Record the ids that the engine returned, and never encode text again."
    if texts.other_text:
        return fault(
            f"The token ids of {len(texts.other_text)} completions are not those of their text "
            f"({texts.other_text}; {texts.other_text.example}). {remedy}"
        )
    if found.other_length:
        return fault(
            f"{len(found.other_length)} completions have another number of log-probs than of ids "
            f"({found.other_length}; {found.other_length.example}), so ids or log-probs are not "
            f"those that were sampled. {remedy}"
        )
    if e.damaged:
        cause = (
            "All ids are those that their text encodes to, so the text was encoded again"
            if texts.always_canonical
            else "Their ids are not the sampled ones, or tokens of prompt or completion are missing"
        )
        return fault(
            f"{len(e.damaged)} of {e.num_sequences + len(e.damaged)} completions have log-probs "
            f"that do not belong to their ids ({e.damaged}), while the others fit: other weights "
            f"would change them all. {cause}. {remedy}"
        )
    return Finding("tokens", measured, Status.GOOD)


def check_prompts(e: RolloutsExamination) -> Finding:
    """Check that the engine saw the prompt that this tokenizer and its template make."""
    texts = e.texts
    measured = (
        f"{texts.num_prompts} prompts with ids and text: {len(texts.other_prompt)} encode to other "
        "ids"
    )
    if e.reading in READINGS and READINGS[e.reading][0] == "prompt":
        sentences = READINGS[e.reading][1]
        return Finding("prompt", measured, Status.FAULT, "prompt", None, sentences)
    if texts.other_prompt:
        return Finding(
            "prompt",
            measured,
            Status.FAULT,
            "prompt",
            None,
            f"The prompts of {len(texts.other_prompt)} completions have other ids than this "
            f"model's tokenizer and chat template give them ({texts.other_prompt}): "
            f"{texts.other_prompt.example}. The engine and a trainer that encodes the prompt again "
            "see different contexts: use one template, or train on prompt_token_ids.",
        )
    return Finding("prompt", measured, Status.GOOD if texts.num_prompts else Status.UNKNOWN)


def check_recorded_weights(e: RolloutsExamination) -> Finding:
    """Check that the log-probs are those of this model's weights."""
    arithmetic = e.arithmetic
    differs = arithmetic.mismatch.mean_abs
    measured = (
        f"recorded and recomputed log-probs differ by mean |l| = {differs:.2g} (noise: up to "
        f"{arithmetic.uncertainty:.1g})"
        + "".join(
            f"; {100 * each.share.value:.0f}% +- {100 * each.share.error:.0f}% of the way to {name}"
            for name, each in e.candidates.items()
        )
    )

    def fault(cause: str, sentences: str) -> Finding:
        part = e.sampling.parts["arithmetic"]
        return Finding("weights", measured, Status.FAULT, cause, part, sentences)

    nearer = [
        name
        for name, each in e.candidates.items()
        if each.share.is_above(SAMPLED_BY_OTHER, CLEARLY)
    ]
    if nearer:
        name = min(nearer, key=lambda each: e.candidates[each].mean_abs)
        found = e.candidates[name]
        return fault(
            "stale_weights",
            f"The rollouts were sampled by {name}, not by {e.policy}: their log-probs go "
            f"{found.share.value:.0%} of the way from one to the other (mean |l| = "
            f"{found.mean_abs:.2g} and {differs:.2g}). The engine has not loaded the newer "
            "weights: fix its update, or count these rollouts as that old.",
        )
    if e.reading == "tied_head":
        cause, sentences = READINGS["tied_head"]
        return fault(cause, sentences)
    if not arithmetic.is_explained:
        return fault("wrong_weights", _wrong_weights(e))
    return Finding("weights", measured, Status.GOOD)


def _wrong_weights(e: RolloutsExamination) -> str:
    """Say how far the weights are off, and why it is no matter of rounding."""
    arithmetic = e.arithmetic
    differs = arithmetic.mismatch.mean_abs
    sizes = " and ".join(
        f"{differs / effect.mean_abs:.2g} times what {name} does (likeness "
        f"{arithmetic.likeness[name]:.0%})"
        for name, effect in arithmetic.effects.items()
        if name != e.trainer_precision and effect.mean_abs > 0
    )
    fp8 = arithmetic.effects.get("fp8")
    maybe_fp8 = (
        " An FP8 engine that scales in another way than the emulated one could look like this: "
        "say so with --engine-precision fp8 if it is one."
        if fp8 is not None and differs <= 2.0 * fp8.mean_abs
        else ""
    )
    return (
        f"The log-probs are not those of {e.policy}: they differ by {differs:.2g} on average over "
        f"all completions, {sizes}; no sampling setting, shift or other context explains it. The "
        "engine samples from other weights: an earlier version, another checkpoint, or a layer "
        "that was never loaded. Give earlier checkpoints as --candidates to learn whether it is "
        f"one of them; else compare the engine's layers with the checkpoint's.{maybe_fp8}"
    )


def notes_of(e: RolloutsExamination) -> list[str]:
    """Return what was assumed, and what was left out."""
    found, texts = e.preparation, e.texts
    notes = []
    if texts.other_encoding:
        notes.append(
            f"Of {texts.num_texts} texts, {len(texts.other_encoding)} encode to other ids than "
            "those that were sampled, as happens with any tokenizer: train on the recorded ids."
        )
    if found.ids_from_strings:
        notes.append(
            f"The file has no token ids: those of {found.ids_from_strings} completions were "
            "recovered from the strings of their tokens (vLLM records ids with return_token_ids)."
        )
    if found.prompts_from_text:
        notes.append(
            f"The prompt ids of {found.prompts_from_text} completions are not recorded: they were "
            "made by this model's tokenizer and chat template, which the engine need not have used."
        )
    notes += _left_out(found.unrecovered, f"no certain ids ({found.unrecovered.example})")
    notes += _left_out(found.too_long, "an empty prompt, or one that fills the model's context")
    if e.num_other_settings:
        notes.append(
            f"{e.num_other_settings} of {e.num_completions} completions have other sampling "
            "settings than the most frequent ones and are left out: examine them in a file of "
            "their own."
        )
    if not e.settings.stated:
        notes.append(
            "The file states no sampling settings: T = 1 without truncation is assumed; give "
            "--temperature, --top-p and --top-k where they were others."
        )
    if len(e.versions) > 1:
        notes.append(
            f"The completions name {len(e.versions)} models or versions "
            f"({', '.join(e.versions[:4])}{', ...' if len(e.versions) > 4 else ''}): examine each "
            "alone, with its own checkpoint."
        )
    return notes


def _left_out(lines: Lines, reason: str) -> list[str]:
    if not lines:
        return []
    return [f"{len(lines)} completions are left out, which have {reason}: {lines}."]
