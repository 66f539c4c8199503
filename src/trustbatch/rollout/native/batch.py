"""The batch being decoded: rows enter, sample tokens without a word to the host, and leave."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trustbatch.rollout.native.decoder import Decoder
from trustbatch.rollout.sampling import SampledTokens, sample_tokens
from trustbatch.types import GenerationRequest, SamplingParams

STEPS_ON_GPU = 16
"""tokens sampled between two looks of the host; those after a stop token are thrown away"""


@dataclass(frozen=True, slots=True)
class Row:
    """One sample to be sampled."""

    slot: int
    """where its result belongs"""
    request: GenerationRequest
    sample: int
    sampled: tuple[int, ...] = ()
    """what older versions of the policy have sampled of it"""

    @property
    def context(self) -> tuple[int, ...]:
        """What it continues."""
        return self.request.token_ids + self.sampled

    @property
    def max_tokens(self) -> int:
        """The most that it may sample."""
        return self.request.sampling.max_tokens - len(self.sampled)


class RunningBatch:
    """State of up to `max_rows` rows, in tensors that stay where they are."""

    def __init__(self, decoder: Decoder, *, max_rows: int, device: torch.device) -> None:
        self.decoder = decoder
        self.device = device
        self.max_rows = max_rows
        self.rows: list[Row] = []
        self.num_steps = STEPS_ON_GPU if device.type == "cuda" else 1
        zeros = torch.zeros(4, max_rows, dtype=torch.long, device=device)
        self.token, self.position, self.key, self.num_sampled = zeros
        self.column = torch.zeros(1, dtype=torch.long, device=device)
        self.record = _Record(_nothing(device), self.num_steps, max_rows)
        self._graphs: dict[tuple[int, SamplingParams], torch.cuda.CUDAGraph] = {}
        self._graph_address = decoder.address
        if decoder.records_graphs:
            # one for all recordings: every stream keeps a workspace of cuBLAS's for good
            self._warm_up_stream = torch.cuda.Stream(device)

    def add(
        self, groups: Sequence[list[Row]], row_keys: list[int], sampling: SamplingParams
    ) -> SampledTokens:
        """Compute each group's context once; return the next token [1, n] of all its rows.

        `row_keys` [n] are those of the rows' streams of random numbers.
        """
        prompts = [group[0].context for group in groups]
        copies = [len(group) for group in groups]
        logits = self.decoder.prefill(prompts, copies)
        of_row = [number for number, group in enumerate(groups) for _ in group]
        new = [row for group in groups for row in group]
        keys = self._to_device(row_keys)
        num_before = self._to_device([len(row.sampled) for row in new])
        sampled = sample_tokens(logits[self._to_device(of_row)], keys, num_before, sampling)
        self._use_record(sampled)
        first, last = len(self.rows), len(self.rows) + len(new)
        self.token[first:last] = sampled.token_ids
        self.key[first:last] = keys
        self.position[first:last] = self._to_device([len(row.context) for row in new])
        self.num_sampled[first:last] = num_before + 1
        self.rows += new
        return sampled.map(lambda part: part[None].cpu())

    def advance(self, num_steps: int, sampling: SamplingParams) -> SampledTokens:
        """Return the next tokens [t, n] of all rows, at most `num_steps`, in host memory."""
        num_steps = min(self.num_steps, num_steps)
        self.decoder.reserve(num_steps)
        self.column.zero_()
        if self.decoder.records_graphs:
            graph = self._graph(sampling)
            for _ in range(num_steps):
                graph.replay()
        else:
            for _ in range(num_steps):
                self._step(len(self.rows), sampling)
        self.decoder.advance(num_steps)
        return self.record.sampled.map(lambda part: part[:num_steps, : len(self.rows)].cpu())

    def keep(self, index: list[int]) -> None:
        """Keep these rows, in this order."""
        self.decoder.keep(index)
        rows = self._to_device(index)
        for state in (self.token, self.position, self.key, self.num_sampled):
            state[: len(index)] = state[rows]
        self.rows = [self.rows[number] for number in index]

    def forget(self) -> None:
        """Drop all rows, graphs and the cache, and give their memory back."""
        self.rows = []
        self._graphs.clear()
        self.decoder.forget()

    def _step(self, num_rows: int, sampling: SamplingParams) -> None:
        """Feed each row's last token and sample its next: no host in between."""
        token, position = self.token[:num_rows], self.position[:num_rows]
        logits = self.decoder.step(token, position)
        sampled = sample_tokens(logits, self.key[:num_rows], self.num_sampled[:num_rows], sampling)
        token.copy_(sampled.token_ids)
        position += 1
        self.num_sampled[:num_rows] += 1
        self.record.write(self.column, sampled)
        self.column += 1

    def _graph(self, sampling: SamplingParams) -> torch.cuda.CUDAGraph:
        """Return the recorded step for this many rows, filled up to a common size."""
        if self._graph_address != self.decoder.address:
            self._graphs.clear()
            self._graph_address = self.decoder.address
        num_rows = len(self.rows)
        padded = min(padded_rows(num_rows), self.max_rows)
        # rows that only fill up the batch stand at position 0 of the scratch page
        self.position[num_rows:padded] = 0
        name = (padded, sampling)
        if name not in self._graphs:
            self._graphs[name] = self._record_graph(padded, sampling)
        return self._graphs[name]

    def _record_graph(self, num_rows: int, sampling: SamplingParams) -> torch.cuda.CUDAGraph:
        state = (self.token, self.position, self.num_sampled, self.column)
        before = [part.clone() for part in state]
        stream = self._warm_up_stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._step(num_rows, sampling)  # compiles kernels, which a recording can't
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool()):
            self._step(num_rows, sampling)
        for part, value in zip(state, before, strict=True):
            part.copy_(value)
        return graph

    def _pool(self) -> Any:
        """Graphs never run at the same time, so all of them may use the same memory."""
        return next((graph.pool() for graph in self._graphs.values()), None)

    def _use_record(self, sampled: SampledTokens) -> None:
        """Have room for what is recorded of a token, which the sampling parameters decide."""
        if not self.record.fits(sampled):
            self.record = _Record(sampled, self.num_steps, self.max_rows)
            self._graphs.clear()

    def _to_device(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self.device)


_SIZES = ((1, 2), (2, 4), (4, 8), (8, 64), (32, 256), (64, 2**31))
"""multiples of the first number up to the second"""


def padded_rows(num_rows: int) -> int:
    """Return the size of the graph for so many rows: few sizes, and at most a third is wasted."""
    step = next(step for step, largest in _SIZES if num_rows <= largest)
    return -(-num_rows // step) * step


class _Record:
    """What the steps between two looks of the host have sampled, [steps, rows]."""

    def __init__(self, like: SampledTokens, num_steps: int, num_rows: int) -> None:
        self.sampled = like.map(lambda part: part.new_zeros(num_steps, num_rows, *part.shape[1:]))

    def fits(self, sampled: SampledTokens) -> bool:
        """Whether it holds what was sampled: the same things, and as many most likely tokens."""
        mine, other = self.sampled.tensors(), sampled.tensors()
        return mine.keys() == other.keys() and all(
            mine[name].shape[2:] == other[name].shape[1:] for name in mine
        )

    def write(self, column: Tensor, sampled: SampledTokens) -> None:
        """Note one token a row as the column-th."""
        places = self.sampled.tensors()
        for name, part in sampled.tensors().items():
            places[name][:, : len(part)].index_copy_(0, column, part[None])


def _nothing(device: torch.device) -> SampledTokens:
    return SampledTokens(
        torch.zeros(0, dtype=torch.long, device=device), torch.zeros(0, device=device), None, None
    )
