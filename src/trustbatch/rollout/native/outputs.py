"""What the rows of a batch have sampled so far, and which of them are finished."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from trustbatch.rollout.native.batch import Row
from trustbatch.rollout.sampling import SampledTokens, refuse_divergence


class _Unsettled(NamedTuple):
    """Tokens [t, n] that were added, and where they belong."""

    tokens: SampledTokens
    place: Tensor
    """[n] of each row"""
    first: Tensor
    """[n] how many tokens the row had before"""
    is_kept: Tensor
    """[t, n] bool"""


class Outputs:
    """The tokens of rows that are sampled with the same parameters, in host memory.

    A row keeps its place when it leaves the batch and comes back. Its tokens are stored beside each
    other, once; memory for more than it samples is never touched.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        """`rows` are all that will be sampled, in the order of their places."""
        sampling = rows[0].request.sampling
        self._stops = torch.tensor(sampling.stop_token_ids, dtype=torch.long)
        self._place = {row.slot: place for place, row in enumerate(rows)}
        self._max_tokens = torch.tensor([row.max_tokens for row in rows])
        self._prefix = [len(row.prefix) for row in rows]
        """tokens of each row that were sampled before"""
        self._num_tokens = torch.zeros(len(rows), dtype=torch.long)
        self._is_finished = torch.zeros(len(rows), dtype=torch.bool)
        self._stored: dict[str, Tensor] = {}
        """[rows, longest, ...] by field of SampledTokens"""
        self._unsettled: list[_Unsettled] = []

    def num_left(self, rows: Sequence[Row]) -> int:
        """Return the largest number of tokens that a running row may still sample."""
        place = self._places(rows)
        left = self._max_tokens[place] - self._num_tokens[place]
        return int(left.masked_fill(self._is_finished[place], 0).max()) if rows else 0

    def running(self, rows: Sequence[Row]) -> list[int]:
        """Return the numbers of the rows that have neither a stop token nor max_tokens."""
        return (~self._is_finished[self._places(rows)]).nonzero()[:, 0].tolist()

    def leave(self, rows: Sequence[Row]) -> list[Row]:
        """Return the unfinished rows among these as rows that continue from their tokens so far."""
        self.settle()
        left = []
        for number in self.running(rows):
            row = rows[number]
            place = self._place[row.slot]
            # those before its last return are in its prefix already
            known = len(row.prefix) - self._prefix[place]
            new = self._stored["token_ids"][place, known : int(self._num_tokens[place])]
            left.append(replace(row, prefix=row.prefix + tuple(new.tolist())))
        return left

    def add(self, rows: Sequence[Row], tokens: SampledTokens) -> None:
        """Append tokens [t, n] of n rows; those after a row's end are discarded.

        Only what decides how decoding goes on is done at once: `settle` does the rest.
        """
        place = self._places(rows)
        first = self._num_tokens[place]
        number = first + torch.arange(1, 1 + len(tokens.token_ids))[:, None]
        is_end = torch.isin(tokens.token_ids, self._stops) | (number >= self._max_tokens[place])
        is_kept = (is_end.cumsum(0) - is_end.long() == 0) & ~self._is_finished[place]
        self._num_tokens[place] = first + is_kept.sum(0)
        self._is_finished[place] |= is_end.any(0)
        self._unsettled.append(_Unsettled(tokens, place, first, is_kept))

    def settle(self) -> None:
        """Store the tokens added last; raises if one of their log-probs is not finite."""
        for tokens, place, first, is_kept in self._unsettled:
            refuse_divergence(tokens.logp[is_kept])
            step, row = is_kept.nonzero(as_tuple=True)
            where = place[row], first[row] + step
            for name, part in tokens.tensors().items():
                if name not in self._stored:
                    shape = (len(self._max_tokens), int(self._max_tokens.max()), *part.shape[2:])
                    self._stored[name] = torch.empty(shape, dtype=part.dtype)
                self._stored[name].index_put_(where, part[step, row])
        self._unsettled.clear()

    def by_slot(self) -> dict[int, SampledTokens]:
        """Return the tokens of each slot that has any, as tensors over its positions."""
        self.settle()
        counts = self._num_tokens.tolist()
        # copies: pickling a view would send the tokens of all other rows too
        return {
            slot: SampledTokens.of(
                {name: part[place, : counts[place]].clone() for name, part in self._stored.items()}
            )
            for slot, place in self._place.items()
            if counts[place]
        }

    def _places(self, rows: Sequence[Row]) -> Tensor:
        return torch.tensor([self._place[row.slot] for row in rows], dtype=torch.long)
