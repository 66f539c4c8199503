"""Which of the tokens that lie end to end may see which.

Tokens come in *units*. A unit is one sequence, or a prompt with several responses behind it: then
each response sees the prompt and itself, and its positions go on from the prompt's. Attention
alone needs to know: it looks at the tokens as rows of *tables*, padded inside the attention kernel
and nowhere else, or, where every unit is one sequence, at the places where sequences begin.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

LONG_SEQUENCE = 2048
"""sequences at least this long are attended to one at a time on a GPU"""
WORTH_A_TABLE = 2**18
"""attention scores of padding that must be saved before rows get a table of their own"""


@dataclass(frozen=True)
class Segment:
    """The input tokens of one sequence, or of a prompt and the responses that share it."""

    prompt: int
    responses: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """How many input tokens it has."""
        return self.prompt + sum(self.responses)


class _OnDevice:
    """A frozen dataclass whose tensors move together."""

    def to(self, device: torch.device) -> Any:
        """Move every tensor."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return replace(self, **{name: _moved(value, device) for name, value in values.items()})  # type: ignore[type-var]


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor | _OnDevice):
        return value.to(device)
    if isinstance(value, tuple) and value and isinstance(value[0], _OnDevice):
        return tuple(part.to(device) for part in value)
    return value


@dataclass(frozen=True, kw_only=True)
class Continuation(_OnDevice):
    """The prompts before the rows of a table."""

    table: int
    """number of the table that holds them, one a row"""
    of_row: Tensor
    """[B] which of its rows each row continues"""
    lengths: Tensor
    """[B] tokens of that prompt; what is beyond is padding"""
    width: int
    """of the table that holds them"""


@dataclass(frozen=True, kw_only=True)
class Table(_OnDevice):
    """B rows of up to L tokens, padded on the right, each seen by the later ones of its row."""

    rows: int
    width: int
    before: Continuation | None = None
    mask: Tensor | None = None
    """[B or 1, 1, L, prompts + L] what may be seen; None is plain causal attention"""

    @property
    def longest(self) -> int:
        """No token is further than this from the first that it may see."""
        return self.width + (self.before.width if self.before else 0)

    def mask_within(self, window: int | None, device: torch.device) -> Tensor | None:
        """Return the mask of a layer in which tokens see the last `window` tokens only."""
        if window is None or window >= self.longest:
            return self.mask
        place = torch.arange(self.width, device=device)
        if self.before is None:
            distance = place[:, None] - place  # [L, L]
            return ((distance >= 0) & (distance < window))[None, None]
        assert self.mask is not None
        prompt = torch.arange(self.before.width, device=device)
        lengths = self.before.lengths[:, None]
        keys = torch.cat([prompt.expand(self.rows, -1), lengths + place], dim=1)
        distance = (lengths + place)[:, :, None] - keys[:, None]  # [B, L, prompts + L]
        return self.mask & (distance < window)[:, None]


# not frozen: torch's compiler looks into frozen dataclasses, and would compile for each layout
@dataclass(kw_only=True)
class PackedLayout(_OnDevice):
    """How N tokens that lie end to end are divided, for the attention of every layer."""

    position_ids: Tensor
    """[N]"""
    starts: Tensor | None
    """[S + 1] int32, where each sequence begins, and N; None where prompts are shared"""
    longest: int
    """tokens of the longest unit"""
    separate: tuple[int, ...] | None
    """lengths of the sequences, where they are worth a kernel each"""
    tables: tuple[Table, ...]
    padded: Tensor | None
    """[M] which token is at each place of all tables; None where tables are a mere view"""
    place: Tensor | None
    """[N] at which place each token is"""

    @classmethod
    def of(cls, units: Sequence[Segment]) -> "PackedLayout":
        """Lay units out in the given order."""
        begins = [0]
        for unit in units:
            begins.append(begins[-1] + unit.num_tokens)
        is_shared = any(unit.responses for unit in units)
        lengths = tuple(unit.num_tokens for unit in units)
        tables, index, place = _tables(units, begins)
        is_view = len(tables) == 1 and torch.equal(index, torch.arange(begins[-1]))
        return cls(
            position_ids=_positions(units),
            starts=None if is_shared else torch.tensor(begins, dtype=torch.int32),
            longest=max(lengths),
            separate=lengths if not is_shared and _worth_a_kernel_each(lengths) else None,
            tables=tables,
            padded=None if is_view else index,
            place=None if is_view else place,
        )


def _worth_a_kernel_each(lengths: Sequence[int]) -> bool:
    return min(lengths) >= LONG_SEQUENCE


def ranges(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Return start, start + 1, ... of every length, end to end."""
    counts = torch.tensor(lengths, dtype=torch.int64)
    shifts = torch.tensor(starts, dtype=torch.int64) - (counts.cumsum(0) - counts)
    return torch.arange(int(counts.sum())) + shifts.repeat_interleave(counts)


def _positions(units: Sequence[Segment]) -> Tensor:
    starts = [start for unit in units for start in (0, *[unit.prompt] * len(unit.responses))]
    lengths = [length for unit in units for length in (unit.prompt, *unit.responses)]
    return ranges(starts, lengths)


class _Row(NamedTuple):
    """A run of tokens that becomes a row of a table."""

    start: int
    length: int
    unit: int


def _tables(
    units: Sequence[Segment], begins: Sequence[int]
) -> tuple[tuple[Table, ...], Tensor, Tensor]:
    """Return all tables, the token at each of their places [M], the place of each token [N]."""
    tables: list[Table] = []
    rows: list[list[_Row]] = []
    heads = [_Row(begins[number], unit.prompt, number) for number, unit in enumerate(units)]
    for prompts in _by_length(heads):
        number_of_table = len(tables)
        tables.append(Table(rows=len(prompts), width=_width(prompts)))
        rows.append(prompts)
        for responses in _by_length(_responses(prompts, units)):
            tables.append(_continuing(responses, prompts, number_of_table))
            rows.append(responses)
    return tuple(tables), *_places(tables, rows, begins[-1])


def _responses(prompts: Sequence[_Row], units: Sequence[Segment]) -> list[_Row]:
    found = []
    for prompt in prompts:
        start = prompt.start + prompt.length
        for length in units[prompt.unit].responses:
            if length:  # a response of one token has no input beside its prompt
                found.append(_Row(start, length, prompt.unit))
            start += length
    return found


def _width(rows: Sequence[_Row]) -> int:
    return max(row.length for row in rows)


def _by_length(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Divide rows into parts of similar length, where that saves much padding."""
    tables: list[list[_Row]] = []
    # stable, and equal lengths stay in their order: a mere view remains one
    ordered = sorted(rows, key=lambda row: -row.length)
    for number, row in enumerate(ordered):
        width = tables[-1][0].length if tables else 0
        remaining = len(ordered) - number
        saved = remaining * (width**2 - row.length**2)
        if not tables or (2 * row.length <= width and saved >= WORTH_A_TABLE):
            tables.append([])
        tables[-1].append(row)
    return tables


def _continuing(responses: Sequence[_Row], prompts: Sequence[_Row], table: int) -> Table:
    row_of_unit = {prompt.unit: row for row, prompt in enumerate(prompts)}
    of_row = torch.tensor([row_of_unit[response.unit] for response in responses])
    lengths = torch.tensor([prompt.length for prompt in prompts])[of_row]
    before = Continuation(table=table, of_row=of_row, lengths=lengths, width=_width(prompts))
    width = _width(responses)
    sees_prompt = torch.arange(before.width) < lengths.unique()[:, None]  # [1, prompts] if equal
    if len(sees_prompt) > 1:
        sees_prompt = torch.arange(before.width) < lengths[:, None]
    sees_own = torch.ones(width, width, dtype=torch.bool).tril()
    mask = torch.cat(
        [
            sees_prompt[:, None, :].expand(-1, width, -1),
            sees_own.expand(len(sees_prompt), -1, -1),
        ],
        dim=2,
    )
    return Table(rows=len(responses), width=width, before=before, mask=mask[:, None])


def _places(
    tables: Sequence[Table], rows: Sequence[Sequence[_Row]], num_tokens: int
) -> tuple[Tensor, Tensor]:
    indices: list[Tensor] = []
    place = torch.empty(num_tokens, dtype=torch.int64)
    first = 0
    for table, members in zip(tables, rows, strict=True):
        starts = torch.tensor([row.start for row in members])[:, None]
        lengths = torch.tensor([row.length for row in members])[:, None]
        column = torch.arange(table.width)
        is_token = column < lengths  # [B, L]
        index = starts + column.where(is_token, 0)  # padding repeats the first token of its row
        own = first + torch.arange(is_token.numel()).view_as(is_token)
        place[index[is_token]] = own[is_token]
        indices.append(index.flatten())
        first += is_token.numel()
    return torch.cat(indices), place
