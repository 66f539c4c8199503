# pyright: reportMissingImports=false
# (types are checked without vLLM, which is optional and large)
"""Two log-probs per token from one pass of vLLM: of the sampling distribution and of the anchor.

vLLM reports one distribution, chosen at its start. This sampler replaces vLLM's own in every worker
and reports two, in the columns that vLLM has for the most likely tokens: those of token i are in
columns 2i and 2i + 1, where token 0 is the sampled one and 1 to K are the anchor's most likely. It
extends the sampler of vLLM's first model runner, which is the same from 0.24 to 0.32.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

LOGITS_AT_A_TIME = 2**24
"""64 MiB in float32, for any number of sequences: vLLM reserves no memory for more"""
CPU_LOGITS_AT_A_TIME = 2**21
"""fewer on a CPU, where launches cost nothing: outside of the caches it takes a third longer"""


def num_columns(top_logprobs: int) -> int:
    """Return how many columns hold both log-probs of a sampled token and of K others."""
    return 2 * (1 + top_logprobs)


class AnchoredSampler(Sampler):
    """Samples as vLLM does, and also reports the log-probs of softmax(logits / T)."""

    anchor_temperature: float
    _logits: Tensor
    """[B, V], of the step that is being sampled"""

    @classmethod
    def replace(cls, sampler: Sampler, temperature: float) -> bool:
        """Turn a sampler into one that reports both; False if it is not vLLM's usual one."""
        if type(sampler) is not Sampler:
            return False
        sampler.__class__ = cls
        sampler.anchor_temperature = temperature
        return True

    def forward(self, logits: Tensor, *arguments: Any, **options: Any) -> Any:
        """Sample, and keep the logits as the model returned them."""
        # float32 logits are scaled and truncated in place
        self._logits = logits.clone() if logits.dtype == torch.float32 else logits
        try:
            return super().forward(logits, *arguments, **options)
        finally:
            del self._logits

    def gather_logprobs(
        self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor
    ) -> LogprobsTensors:
        """Return both log-probs of the sampled tokens [B] and of the anchor's most likely ones.

        Args:
            logprobs: [B, V], of the distribution that vLLM reports.
            num_logprobs: columns after the first, the maximum over all requests.
            token_ids: [B], the sampled tokens.
        """
        num_top = (1 + num_logprobs) // 2 - 1
        assert num_columns(num_top) == 1 + num_logprobs, "every request asks for pairs"
        # both distributions have this order; vLLM's log-probs are gathered at the same tokens, so
        # that it does not matter which of several equally likely ones are chosen
        top = self._logits.topk(num_top, dim=-1).indices
        ids = torch.cat((token_ids[:, None], top), dim=-1)
        pairs = torch.stack((logprobs.gather(-1, ids), self._anchor(ids)), dim=-1)
        return LogprobsTensors(
            ids.repeat_interleave(2, dim=-1).to(torch.int32),
            pairs.flatten(1),
            torch.zeros_like(token_ids),  # ranks, which are not used
        )

    def _anchor(self, ids: Tensor) -> Tensor:
        """Return the anchor's log-probs of tokens [B, 1 + K], a few rows of logits at a time."""
        at_a_time = CPU_LOGITS_AT_A_TIME if ids.device.type == "cpu" else LOGITS_AT_A_TIME
        rows = max(at_a_time // self._logits.shape[-1], 1)
        parts = [
            (part.float() / self.anchor_temperature).log_softmax(-1).gather(-1, of_part)
            for part, of_part in zip(self._logits.split(rows), ids.split(rows), strict=True)
        ]
        return torch.cat(parts)
