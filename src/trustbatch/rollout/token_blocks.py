"""A distribution over the vocabulary in blocks of tokens: their sums and maxima, in one pass.

The token that inverts the cumulative distribution is in the block that inverts the cumulative
distribution of the blocks, and the K most likely tokens are in the K blocks with the largest
maxima. So one pass over the logits suffices, and the rest needs a few numbers only.
"""

import torch
from torch import Tensor

BLOCK = 128
"""tokens in a block"""


def in_blocks(logits: Tensor) -> Tensor:
    """Return logits [B, V] as [B, n, BLOCK], with -inf after the vocabulary."""
    num_tokens = logits.shape[-1]
    if num_tokens % BLOCK:
        logits = torch.nn.functional.pad(logits, (0, -num_tokens % BLOCK), value=-torch.inf)
    return logits.view(len(logits), -1, BLOCK)


class VocabularyBlocks:
    """softmax(logits / temperature) of each row of logits [B, V]."""

    def __init__(self, logits: Tensor, temperature: float) -> None:
        self.num_tokens = logits.shape[-1]
        self.temperature = temperature
        self.logits = in_blocks(logits)
        if logits.is_cuda:
            from trustbatch.rollout.native.kernels import block_statistics

            # [B, V / BLOCK] maxima of logits / temperature, and sums of exp(that - maximum)
            (self.maxima,), (sums,) = block_statistics(self.logits, temperature)
            self.largest = self.maxima.amax(-1, keepdim=True)
            self.masses = sums.double() * (self.maxima - self.largest).double().exp()
        else:
            self.maxima, self.masses = _block_masses(self.logits, temperature)
            self.largest = self.maxima.amax(-1, keepdim=True)
        self.normalizer = self.largest + self.masses.sum(-1, keepdim=True).log().float()

    def logp(self, token_ids: Tensor) -> Tensor:
        """Return the log-probs [B, n] of tokens [B, n] in float32."""
        logits = self.logits.flatten(1).gather(-1, token_ids).float() / self.temperature
        return logits - self.normalizer

    def invert(self, uniform: Tensor) -> Tensor:
        """Return the token [B] at which the cumulative distribution exceeds a number in [0, 1)."""
        cumulative = self.masses.cumsum(-1)
        target = uniform[:, None] * cumulative[:, -1:]
        block = _first_above(cumulative, target)
        inside = self._block(block)
        before = cumulative.gather(-1, block) - self.masses.gather(-1, block)
        within = (inside - self.largest).double().exp().cumsum(-1)
        # the block's own sum is rounded differently, but must not end before the target
        rest = torch.minimum(target - before, within[:, -1:] * (1 - 2.0**-50))
        token = block * BLOCK + _first_above(within, rest.clamp_min(0))
        return token.squeeze(-1).clamp_max(self.num_tokens - 1)

    def top(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the most likely tokens [B, K], most likely first, and their log-probs."""
        count = min(count, self.num_tokens)
        _, blocks = self.maxima.topk(min(count, self.maxima.shape[-1]), dim=-1)
        offsets = torch.arange(BLOCK, device=blocks.device)
        candidates = (blocks.sort(dim=-1).values[:, :, None] * BLOCK + offsets).flatten(1)
        # stable: among excluded tokens, padding at the end of the vocabulary is never chosen
        logp, index = self.logp(candidates).sort(dim=-1, descending=True, stable=True)
        return candidates.gather(-1, index[:, :count]), logp[:, :count]

    def _block(self, block: Tensor) -> Tensor:
        """Return logits / temperature [B, BLOCK] of one block [B, 1] per row, in float32."""
        index = block[:, :, None].expand(-1, 1, BLOCK)
        return self.logits.gather(1, index).squeeze(1).float() / self.temperature


def _block_masses(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return maxima of blocks [B, n, BLOCK], and sums of exp(logit - largest of the row)."""
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    maxima = scaled.amax(-1)
    # on a CPU, softmax is the only operation that reads and writes the logits once
    shares = scaled.flatten(1).softmax(-1).view(scaled.shape)
    best = maxima.argmax(-1)[:, None, None].expand(-1, 1, BLOCK)
    largest_share = shares.gather(1, best).amax(-1)
    return maxima, shares.sum(-1).double() / largest_share.double()


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    # right=True finds the first entry above the target: tokens of probability 0 are never chosen
    found = torch.searchsorted(cumulative, target, right=True)
    return found.clamp_max(cumulative.shape[-1] - 1)
