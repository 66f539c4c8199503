"""Sampling tokens from logits: the distribution, and the random number of each token.

The random number is a pure function of (run seed, policy version, prompt id, sample index, turn,
position), so a completion does not depend on the rest of the batch, on the number of engines, or on
whether the run was interrupted.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trustbatch.errors import DivergedError
from trustbatch.rollout.token_blocks import VocabularyBlocks
from trustbatch.types import SamplingParams

GOLDEN, MIX_1, MIX_2 = (
    constant - 2**64  # as two's complement: torch has no unsigned 64-bit multiplication
    for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
MOST_IN_KERNEL = 32
"""most likely tokens that the kernel sorts in registers"""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per row of a batch, with its recorded log-probs."""

    token_ids: Tensor
    """[B]"""
    logp: Tensor
    """[B] float32"""
    top_token_ids: Tensor | None
    """[B, K]"""
    top_logp: Tensor | None
    """[B, K] float32"""
    anchor_logp: Tensor | None = None
    """[B] float32, if the anchor is another distribution than the recorded one"""
    anchor_top_logp: Tensor | None = None
    """[B, K] float32"""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "SampledTokens":
        """Build one from tensors by field name; missing fields are None."""
        return cls(**{name: tensors.get(name) for name in cls.__slots__})  # type: ignore[arg-type]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by field name."""
        parts = {name: getattr(self, name) for name in self.__slots__}
        return {name: part for name, part in parts.items() if part is not None}

    def map(self, change: Callable[[Tensor], Tensor]) -> "SampledTokens":
        """Apply a function to every tensor."""
        return SampledTokens.of({name: change(part) for name, part in self.tensors().items()})

    @classmethod
    def concatenate(cls, parts: Sequence["SampledTokens"]) -> "SampledTokens":
        """Concatenate several along the first dimension."""
        names = parts[0].tensors()
        return cls.of({name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def policy_seed(seed: int, policy: str) -> int:
    """Return the seed of a second policy: no two policies share random numbers."""
    digest = hashlib.blake2b(f"{seed}|{policy}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little")


def sample_key(seed: int, version: int, prompt_id: str, sample: int, turn: int = 0) -> int:
    """Return the signed 64-bit key of the random number stream of one turn of one sample."""
    place = f"{sample}.{turn}" if turn else f"{sample}"
    text = f"{seed}|{version}|{place}|{prompt_id}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniforms(keys: Tensor, position: int | Tensor) -> Tensor:
    """Return the position-th number of each stream, [B] float64 in [0, 1): SplitMix64."""
    steps = torch.as_tensor(position, device=keys.device) + 1
    z = keys + steps * GOLDEN  # int64 products wrap around, as the generator needs
    z = (z ^ _shift_right(z, 30)) * MIX_1
    z = (z ^ _shift_right(z, 27)) * MIX_2
    z = z ^ _shift_right(z, 31)
    # 52 bits: u * total then stays below total in float64, and the inverse CDF inside its range
    return _shift_right(z, 12).double() * 2.0**-52


def _shift_right(z: Tensor, bits: int) -> Tensor:
    # int64 shifts copy the sign bit: mask it out
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def sampling_logprobs(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Return log-probs [B, V] in float32 of the distribution tokens are sampled from.

    Temperature first, then top-k, then top-p on what is left; excluded tokens have -inf, and the
    rest is renormalized.
    """
    return _truncate(logits, sampling)[0]


def _truncate(logits: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor | None]:
    """Return the same, and tokens [B, V] in order of probability if top-p has sorted them all."""
    logits = logits.float()
    if sampling.temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.full_like(logits, -torch.inf).scatter(-1, best, 0.0), None
    logp = torch.log_softmax(logits / sampling.temperature, dim=-1)
    has_top_k = 0 < sampling.top_k < logits.shape[-1]
    if has_top_k:
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
    return torch.log_softmax(logp, dim=-1), None if has_top_k else index


def sample_tokens(
    logits: Tensor, keys: Tensor, position: int | Tensor, sampling: SamplingParams
) -> SampledTokens:
    """Sample one token per row of logits [B, V] by inverting its cumulative distribution.

    There is no synchronization with the device. Logits that are not finite give a log-prob of NaN,
    which `refuse_divergence` finds once the log-probs are on the host.
    """
    if logits.is_cuda and not _needs_all(sampling) and sampling.top_logprobs <= MOST_IN_KERNEL:
        from trustbatch.rollout.native.sampling_kernels import sample_rows

        return sample_rows(logits, keys, position, sampling)
    return sample_in_torch(logits, keys, position, sampling)


def _needs_all(sampling: SamplingParams) -> bool:
    """Whether the distribution is known only after all tokens have been compared."""
    return sampling.temperature == 0 or sampling.top_k > 0 or sampling.top_p < 1.0


def sample_in_torch(
    logits: Tensor, keys: Tensor, position: int | Tensor, sampling: SamplingParams
) -> SampledTokens:
    """Do the same in plain torch, for any parameters: some 70 small kernels on a GPU."""
    by_probability = None
    if _needs_all(sampling):
        logp, by_probability = _truncate(logits, sampling)
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
        # all have the same order; if truncation keeps fewer than K tokens, the anchor has the rest
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
            "training.learning_rate, or check the checkpoint for broken weights."
        )
