"""The batch being decoded: rows enter, sample tokens without host synchronization, and leave."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trustbatch.rollout.native.cache import CacheFullError
from trustbatch.rollout.native.decoder import Decoder
from trustbatch.rollout.sampling import SampledTokens, sample_tokens
from trustbatch.types import GenerationRequest, SamplingParams

STEPS_ON_GPU = 16
"""tokens per row between host synchronizations; those after a stop token are discarded"""


@dataclass(frozen=True, slots=True)
class Row:
    """One completion to be sampled."""

    slot: int
    """index of its result"""
    request: GenerationRequest
    sample: int
    prefix: tuple[int, ...] = ()
    """tokens of it that are sampled already: by older versions, or before it had to leave"""

    @property
    def context(self) -> tuple[int, ...]:
        """The tokens that it continues."""
        return self.request.token_ids + self.prefix

    @property
    def max_tokens(self) -> int:
        """Tokens that it may still sample."""
        return self.request.sampling.max_tokens - len(self.prefix)


class RunningBatch:
    """State of up to `max_rows` rows, in tensors that never move, as CUDA graphs need."""

    def __init__(self, decoder: Decoder, *, max_rows: int, device: torch.device) -> None:
        self.decoder = decoder
        self.device = device
        self.max_rows = max_rows
        self.rows: list[Row] = []
        self.num_steps = STEPS_ON_GPU if device.type == "cuda" else 1
        zeros = torch.zeros(4, max_rows, dtype=torch.long, device=device)
        self.token, self.position, self.key, self.num_sampled = zeros
        self.column = torch.zeros(1, dtype=torch.long, device=device)
        self.buffer = _TokenBuffer(_no_tokens(device), self.num_steps, max_rows)
        self._graphs: dict[tuple[int, bool, SamplingParams], torch.cuda.CUDAGraph] = {}
        self._graph_address = decoder.address
        if decoder.uses_cuda_graphs:
            # one for all captures: cuBLAS keeps a workspace for every stream
            self._warm_up_stream = torch.cuda.Stream(device)

    def add(
        self, groups: Sequence[list[Row]], row_keys: list[int], sampling: SamplingParams
    ) -> SampledTokens:
        """Prefill each group's context once; return the next token [1, n] of all its rows.

        `row_keys` [n] are the keys of the rows' random number streams.
        """
        prompts = [group[0].context for group in groups]
        copies = [len(group) for group in groups]
        logits = self.decoder.prefill(prompts, copies)
        prompt_of_row = [number for number, group in enumerate(groups) for _ in group]
        new = [row for group in groups for row in group]
        keys = self._to_device(row_keys)
        num_before = self._to_device([len(row.prefix) for row in new])
        tokens = sample_tokens(logits[self._to_device(prompt_of_row)], keys, num_before, sampling)
        self._fit_buffer(tokens)
        first, last = len(self.rows), len(self.rows) + len(new)
        self.token[first:last] = tokens.token_ids
        self.key[first:last] = keys
        self.position[first:last] = self._to_device([len(row.context) for row in new])
        self.num_sampled[first:last] = num_before + 1
        self.rows += new
        return tokens.map(lambda part: part[None].cpu())

    def advance(
        self, num_steps: int, sampling: SamplingParams, *, meanwhile: Callable[[], None]
    ) -> SampledTokens:
        """Return the next tokens [t, n] of all rows, at most `num_steps`, in host memory.

        `meanwhile` is called while a GPU computes them; the tokens are valid until it is called
        again.
        """
        most_steps, num_steps = num_steps, min(self.num_steps, num_steps)
        self.decoder.reserve(num_steps, most_steps)
        self.column.zero_()
        if self.decoder.uses_cuda_graphs:
            try:
                graph = self._graph(sampling)
            except torch.OutOfMemoryError as error:
                raise CacheFullError from error  # fewer rows need less
            for _ in range(num_steps):
                graph.replay()
        else:
            for _ in range(num_steps):
                self._step(len(self.rows), sampling)
        self.decoder.advance(num_steps)
        meanwhile()
        return self.buffer.read(num_steps, len(self.rows))

    def keep(self, index: list[int]) -> None:
        """Keep these rows, in this order."""
        self.decoder.keep(index)
        rows = self._to_device(index)
        for state in (self.token, self.position, self.key, self.num_sampled):
            state[: len(index)] = state[rows]
        self.rows = [self.rows[number] for number in index]

    def clear(self) -> None:
        """Drop all rows, CUDA graphs and the cache, and free their memory."""
        self.rows = []
        self._graphs.clear()
        self.decoder.clear()

    def _step(self, num_rows: int, sampling: SamplingParams) -> None:
        """Feed each row's last token and sample its next one, without synchronization."""
        token, position = self.token[:num_rows], self.position[:num_rows]
        logits = self.decoder.step(token, position)
        tokens = sample_tokens(logits, self.key[:num_rows], self.num_sampled[:num_rows], sampling)
        token.copy_(tokens.token_ids)
        position += 1
        self.num_sampled[:num_rows] += 1
        self.buffer.write(self.column, tokens)
        self.column += 1

    def _graph(self, sampling: SamplingParams) -> torch.cuda.CUDAGraph:
        """Return the CUDA graph of a step, for the number of rows padded to a common size."""
        if self._graph_address != self.decoder.address:
            self._graphs.clear()
            self._graph_address = self.decoder.address
        num_rows = len(self.rows)
        padded = min(padded_rows(num_rows), self.max_rows)
        # padding rows are at position 0 of the scratch page
        self.position[num_rows:padded] = 0
        key = (padded, self.decoder.shares_pages, sampling)
        if key not in self._graphs:
            self._graphs[key] = self._capture_graph(padded, sampling)
        return self._graphs[key]

    def _capture_graph(self, num_rows: int, sampling: SamplingParams) -> torch.cuda.CUDAGraph:
        state = (self.token, self.position, self.num_sampled, self.column)
        before = [part.clone() for part in state]
        stream = self._warm_up_stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(stream):
                self._step(num_rows, sampling)  # compiles kernels, which a capture can't
            torch.cuda.current_stream(self.device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool()):
                self._step(num_rows, sampling)
        finally:
            # if memory has run out, rows that stay must go on from the same token
            torch.cuda.current_stream(self.device).wait_stream(stream)
            for part, value in zip(state, before, strict=True):
                part.copy_(value)
        return graph

    def _pool(self) -> Any:
        """Return the memory pool of all graphs, which never run at the same time."""
        return next((graph.pool() for graph in self._graphs.values()), None)

    def _fit_buffer(self, tokens: SampledTokens) -> None:
        """Replace the buffer if the sampling parameters need other tensors per token."""
        if not self.buffer.fits(tokens):
            self.buffer = _TokenBuffer(tokens, self.num_steps, self.max_rows)
            self._graphs.clear()

    def _to_device(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self.device)


_SIZES = ((1, 2), (2, 4), (4, 8), (8, 64), (32, 256), (64, 2**31))
"""multiples of the first number up to the second"""


def padded_rows(num_rows: int) -> int:
    """Return the graph size for `num_rows`: few sizes, and at most a third is padding."""
    step = next(step for step, largest in _SIZES if num_rows <= largest)
    return -(-num_rows // step) * step


class _TokenBuffer:
    """The tokens [steps, rows] sampled between two host synchronizations."""

    def __init__(self, like: SampledTokens, num_steps: int, num_rows: int) -> None:
        self.tokens = like.map(lambda part: part.new_zeros(num_steps, num_rows, *part.shape[1:]))
        # a GPU copies into pinned memory several times faster than into other
        self.on_host = self.tokens.map(
            lambda part: torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
        )

    def fits(self, tokens: SampledTokens) -> bool:
        """Whether it has the same tensors, with as many most likely tokens."""
        mine, other = self.tokens.tensors(), tokens.tensors()
        return mine.keys() == other.keys() and all(
            mine[name].shape[2:] == other[name].shape[1:] for name in mine
        )

    def write(self, column: Tensor, tokens: SampledTokens) -> None:
        """Store one token per row, as the column-th."""
        targets = self.tokens.tensors()
        for name, part in tokens.tensors().items():
            targets[name][:, : len(part)].index_copy_(0, column, part[None])

    def read(self, num_steps: int, num_rows: int) -> SampledTokens:
        """Return the first tokens [num_steps, num_rows] in host memory, until they are read again.

        Waits for the GPU.
        """
        on_device = self.tokens.tensors()
        for name, part in self.on_host.tensors().items():
            part[:num_steps].copy_(on_device[name][:num_steps], non_blocking=True)
        if self.tokens.logp.is_cuda:
            torch.cuda.current_stream(self.tokens.logp.device).synchronize()
        return self.on_host.map(lambda part: part[:num_steps, :num_rows])


def _no_tokens(device: torch.device) -> SampledTokens:
    return SampledTokens(
        torch.zeros(0, dtype=torch.long, device=device), torch.zeros(0, device=device), None, None
    )
