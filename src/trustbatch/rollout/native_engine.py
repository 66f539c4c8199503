"""The native engine: batched sampling with a KV cache on the trainer's own parameters."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from trustbatch.padding import pad_left, positions_of
from trustbatch.policy import Policy
from trustbatch.rollout.sampling import Draw, draw, sample_key
from trustbatch.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Provenance,
    SamplingParams,
)

COMPACT_BELOW = 0.75
"""finished rows leave the batch once less than this share of it is still running"""


@dataclass(frozen=True, slots=True)
class _Row:
    """One sample to be drawn: where its result belongs and what it continues."""

    slot: int
    request: GenerationRequest
    sample: int


class NativeEngine:
    """Samples in this process, from the very parameters that are trained: nothing is copied."""

    def __init__(
        self, policy: Policy, *, seed: int, version: int = 0, max_sequences: int = 512
    ) -> None:
        self.policy = policy
        self.seed = seed
        self.max_sequences = max_sequences
        self._version = version

    @property
    def version(self) -> int:
        """Version of the weights that the next completions are drawn from."""
        return self._version

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over parameters; those that already are the trainer's own need no copy."""
        own = dict(self.policy.named_weights())
        for name, tensor in weights:
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)
        self._version = version

    def sleep(self) -> None:
        """Nothing is kept between two calls of `generate`."""

    def wake(self) -> None:
        """Nothing was given back."""

    def close(self) -> None:
        """Nothing to end."""

    @torch.no_grad()
    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Draw all samples, as many sequences at a time as `max_sequences` allows."""
        slots = (
            (request, request.first_sample + offset)
            for request in requests
            for offset in range(request.num_samples)
        )
        by_sampling: dict[SamplingParams, list[_Row]] = {}
        for slot, (request, sample) in enumerate(slots):
            by_sampling.setdefault(request.sampling, []).append(_Row(slot, request, sample))
        completions: dict[int, Completion] = {}
        for sampling, rows in by_sampling.items():
            rows.sort(key=lambda row: (len(row.request.token_ids), row.slot))
            for start in range(0, len(rows), self.max_sequences):
                chunk = rows[start : start + self.max_sequences]
                drawn = _Recorder(len(chunk), sampling)
                self._decode(chunk, sampling, drawn)
                for row, completion in zip(
                    chunk, self._completions(chunk, sampling, drawn), strict=True
                ):
                    completions[row.slot] = completion
        return [completions[slot] for slot in range(len(completions))]

    def _decode(self, rows: list[_Row], sampling: SamplingParams, drawn: "_Recorder") -> None:
        """Draw tokens for all rows until each has stopped or has max_tokens."""
        device = self.policy.device
        keys = [
            sample_key(self.seed, self._version, row.request.prompt_id, row.sample) for row in rows
        ]
        key = torch.tensor(keys, device=device)
        stops = torch.tensor(sampling.stop_token_ids, device=device)
        batch = self._prefill(rows)
        index = torch.arange(len(rows), device=device)
        running = torch.ones(len(rows), dtype=torch.bool, device=device)
        for position in range(sampling.max_tokens):
            token = draw(batch.logits, key[index], position, sampling)
            drawn.record(index, running, token)
            running = running & ~torch.isin(token.token_ids, stops)
            num_running = int(running.sum())
            if num_running == 0 or position + 1 == sampling.max_tokens:
                return
            next_ids = token.token_ids
            if num_running < COMPACT_BELOW * len(running):
                kept = running.nonzero().squeeze(-1)
                batch.keep(kept)
                index, next_ids, running = index[kept], next_ids[kept], running[kept]
            batch.advance(self.policy, next_ids)

    def _prefill(self, rows: list[_Row]) -> "_RunningBatch":
        """Compute each distinct prompt of the chunk once, then give every row its copy."""
        prompts = list(dict.fromkeys(row.request.token_ids for row in rows))
        device = self.policy.device
        ids, mask = (part.to(device) for part in pad_left(prompts, self.policy.pad_token_id))
        batch = _RunningBatch(DynamicCache(config=self.policy.model.config), mask)
        batch.forward(self.policy, ids, positions_of(mask))
        number_of = {prompt: number for number, prompt in enumerate(prompts)}
        spread = [number_of[row.request.token_ids] for row in rows]
        batch.keep(torch.tensor(spread, device=device))
        return batch

    def _completions(
        self, rows: list[_Row], sampling: SamplingParams, drawn: "_Recorder"
    ) -> list[Completion]:
        provenance = Provenance(
            policy=self.policy.name,
            version=self._version,
            engine="native",
            precision=self.policy.precision,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            logprob_mode=sampling.logprob_mode,
        )
        results = drawn.by_row()
        ends = torch.stack([result.token_ids[-1] for result in results])
        stopped = torch.isin(ends, torch.tensor(sampling.stop_token_ids)).tolist()
        texts = self.policy.decode([result.token_ids.tolist() for result in results])
        return [
            Completion(
                prompt_id=row.request.prompt_id,
                sample=row.sample,
                token_ids=result.token_ids,
                behaviour_logp=result.logp,
                top_token_ids=result.top_token_ids,
                behaviour_top_logp=result.top_logp,
                finish_reason=FinishReason.STOP if stop else FinishReason.LENGTH,
                provenance=provenance,
                text=text,
            )
            for row, result, stop, text in zip(rows, results, stopped, texts, strict=True)
        ]


class _RunningBatch:
    """Rows being decoded: their KV cache, attention mask and last logits [B, V]."""

    def __init__(self, cache: DynamicCache, mask: Tensor) -> None:
        self.cache = cache
        self.mask = mask
        self.has_padding = not bool(mask.all())
        self.lengths = mask.sum(-1)
        self.logits = torch.empty(0)

    def forward(self, policy: Policy, input_ids: Tensor, positions: Tensor) -> None:
        with policy.autocast():
            output = policy.model(
                input_ids=input_ids,
                # without padding the plain causal mask is enough, and much cheaper to make
                attention_mask=self.mask if self.has_padding else None,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        self.logits = output.logits[:, -1]

    def keep(self, index: Tensor) -> None:
        """Replace the rows by those at `index`, in that order and as often as named."""
        self.cache.batch_select_indices(index)
        self.mask, self.lengths = self.mask[index], self.lengths[index]
        self.logits = self.logits[index]

    def advance(self, policy: Policy, token_ids: Tensor) -> None:
        """Feed one token a row and compute the next logits."""
        if self.has_padding:
            self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], dim=-1)
        self.forward(policy, token_ids[:, None], self.lengths[:, None])
        self.lengths = self.lengths + 1


class _Recorder:
    """Collects what is drawn, position by position, and sorts it by row at the end."""

    def __init__(self, num_rows: int, sampling: SamplingParams) -> None:
        self.num_rows = num_rows
        self.with_top = sampling.top_logprobs > 0
        self.rows: list[Tensor] = []
        self.draws: list[Draw] = []

    def record(self, index: Tensor, running: Tensor, drawn: Draw) -> None:
        """Keep the draws of rows that are still running."""
        if not bool(running.all()):
            index = index[running]
            drawn = Draw(
                drawn.token_ids[running],
                drawn.logp[running],
                drawn.top_token_ids[running] if drawn.top_token_ids is not None else None,
                drawn.top_logp[running] if drawn.top_logp is not None else None,
            )
        self.rows.append(index)
        self.draws.append(drawn)

    def by_row(self) -> list[Draw]:
        """Return one Draw a row, whose tensors run over its positions, in host memory."""
        rows = torch.cat(self.rows)
        # stable: the positions of a row stay in the order in which they were drawn
        order = rows.argsort(stable=True)
        lengths = torch.bincount(rows, minlength=self.num_rows).tolist()

        def split(tensors: list[Tensor]) -> tuple[Tensor, ...]:
            return torch.cat(tensors)[order].cpu().split(lengths)

        nothing: list[None] = [None] * self.num_rows
        top_ids = [d.top_token_ids for d in self.draws if d.top_token_ids is not None]
        top_logp = [d.top_logp for d in self.draws if d.top_logp is not None]
        columns = zip(
            split([d.token_ids for d in self.draws]),
            split([d.logp for d in self.draws]),
            split(top_ids) if self.with_top else nothing,
            split(top_logp) if self.with_top else nothing,
            strict=True,
        )
        return [Draw(*column) for column in columns]
