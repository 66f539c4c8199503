"""From logits to a token: which distribution it is sampled from, and the number that samples it.

The random number is a pure function of (run seed, policy version, prompt id, sample index, turn,
position), so a sample does not depend on what else is in the batch, on how many engines there are,
or on whether the run was interrupted.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trustbatch.errors import DivergedError
from trustbatch.rollout.token_blocks import VocabularyBlocks
from trustbatch.types import SamplingParams

_GOLDEN, _MIX_1, _MIX_2 = (
    constant - 2**64  # as two's complement: torch has no unsigned 64-bit multiplication
    for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token for each row of a batch, with what is recorded about it."""

    token_ids: Tensor
    """[B]"""
    logp: Tensor
    """[B] float32"""
    top_token_ids: Tensor | None
    """[B, K]"""
    top_logp: Tensor | None
    """[B, K] float32"""
    anchor_logp: Tensor | None = None
    """[B] float32, where the anchor is another distribution than the recorded one"""
    anchor_top_logp: Tensor | None = None
    """[B, K] float32"""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "SampledTokens":
        """Build one from tensors by name; those that are not named are not there."""
        return cls(**{name: tensors.get(name) for name in cls.__slots__})  # type: ignore[arg-type]

    def tensors(self) -> dict[str, Tensor]:
        """Return those that are there, by name."""
        parts = {name: getattr(self, name) for name in self.__slots__}
        return {name: part for name, part in parts.items() if part is not None}

    def map(self, change: Callable[[Tensor], Tensor]) -> "SampledTokens":
        """Return the same with every tensor changed in the same way."""
        return SampledTokens.of({name: change(part) for name, part in self.tensors().items()})

    @classmethod
    def joined(cls, parts: Sequence["SampledTokens"]) -> "SampledTokens":
        """Lay several end to end."""
        names = parts[0].tensors()
        return cls.of({name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def policy_seed(seed: int, policy: str) -> int:
    """Return the seed of a second policy: two policies never share their random numbers."""
    digest = hashlib.blake2b(f"{seed}|{policy}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little")


def sample_key(seed: int, version: int, prompt_id: str, sample: int, turn: int = 0) -> int:
    """Return the signed 64-bit key of the stream of random numbers of one turn of one sample."""
    place = f"{sample}.{turn}" if turn else f"{sample}"
    text = f"{seed}|{version}|{place}|{prompt_id}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniforms(keys: Tensor, position: int | Tensor) -> Tensor:
    """Return the position-th number of each stream, [B] float64 in [0, 1): SplitMix64."""
    steps = torch.as_tensor(position, device=keys.device) + 1
    z = keys + steps * _GOLDEN  # int64 products wrap, as the generator wants
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    z = z ^ _shift_right(z, 31)
    # 52 bits: u * total then stays below total in float64, and the inverse CDF inside its range
    return _shift_right(z, 12).double() * 2.0**-52


def _shift_right(z: Tensor, bits: int) -> Tensor:
    # int64 shifts copy the sign bit: mask it away
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def sampling_logprobs(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Return log-probs [B, V] in float32 of the distribution tokens are sampled from.

    Temperature first, then top-k, then top-p on what is left; excluded tokens have -inf, and the
    rest is renormalized.
    """
    return _cut(logits, sampling)[0]


def _cut(logits: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor | None]:
    """Return the same, and all tokens [B, V] by probability where top-p alone had to sort them."""
    logits = logits.float()
    if sampling.temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.full_like(logits, -torch.inf).scatter(-1, best, 0.0), None
    logp = torch.log_softmax(logits / sampling.temperature, dim=-1)
    is_cut_by_number = 0 < sampling.top_k < logits.shape[-1]
    if is_cut_by_number:
        kept, index = logp.topk(sampling.top_k, dim=-1)
        logp = torch.full_like(logp, -torch.inf).scatter(-1, index, kept)
        logp = torch.log_softmax(logp, dim=-1)
    if sampling.top_p == 1.0:
        return logp, None
    ordered, index = logp.sort(dim=-1, descending=True, stable=True)
    probability = ordered.exp()
    mass_before = probability.cumsum(-1) - probability
    ordered = ordered.masked_fill(mass_before >= sampling.top_p, -torch.inf)
    logp = torch.full_like(logp, -torch.inf).scatter(-1, index, ordered)
    return torch.log_softmax(logp, dim=-1), None if is_cut_by_number else index


def sample_tokens(
    logits: Tensor, keys: Tensor, position: int | Tensor, sampling: SamplingParams
) -> SampledTokens:
    """Sample one token for each row of logits [B, V] by inverting its cumulative distribution.

    Nothing waits for the device. Logits that are not finite show as a log-prob of NaN, which
    `refuse_divergence` looks for where the numbers reach the host.
    """
    by_probability = None
    if sampling.temperature == 0 or sampling.top_k or sampling.top_p < 1.0:
        logp, by_probability = _cut(logits, sampling)
        blocks = VocabularyBlocks(logp, 1.0)
    else:
        blocks = VocabularyBlocks(logits, sampling.temperature)
    token_ids = blocks.invert(uniforms(keys, position))
    recorded = VocabularyBlocks(logits, 1.0) if sampling.logprob_mode == "raw" else blocks
    anchor = None
    if sampling.records_anchor:
        assert sampling.anchor_temperature is not None
        anchor = VocabularyBlocks(logits, sampling.anchor_temperature)
    top_logp, top_token_ids, anchor_top_logp = None, None, None
    if sampling.top_logprobs:
        # all have the same order; where truncation has kept fewer than K, the anchor goes on
        if by_probability is not None:
            top_token_ids = by_probability[:, : sampling.top_logprobs]
        else:
            top_token_ids, _ = (anchor or recorded).top(sampling.top_logprobs)
        top_logp = recorded.logp(top_token_ids)
        anchor_top_logp = None if anchor is None else anchor.logp(top_token_ids)
    return SampledTokens(
        token_ids=token_ids,
        logp=recorded.logp(token_ids[:, None]).squeeze(-1),
        top_token_ids=top_token_ids,
        top_logp=top_logp,
        anchor_logp=None if anchor is None else anchor.logp(token_ids[:, None]).squeeze(-1),
        anchor_top_logp=anchor_top_logp,
    )


def refuse_divergence(logp: Tensor) -> None:
    """Raise if the log-prob of a sampled token is not finite."""
    if not bool(torch.isfinite(logp).all()):
        raise DivergedError(
            "The policy's logits are not finite, so nothing can be sampled: lower "
            "training.learning_rate, or look for a broken checkpoint."
        )
