"""The layout of packed tokens: which token may attend to which.

Tokens come in *segments*. A segment is one sequence, or a prompt followed by several responses that
share it: each response attends to the prompt and to itself, and its positions continue those of the
prompt. Only attention uses the layout: as rows of *tables*, which are padded inside attention and
nowhere else, or, where every segment is one sequence, as the starts of the sequences. GPU kernels
know no shared prompts: for them, attention makes *copies* of prompts and sees whole sequences.
"""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from trustbatch.utils.cuda_memory import send

LONG_SEQUENCE = 2048
"""on a GPU, sequences at least this long get an attention call each"""
MIN_SAVED_SCORES = 2**18
"""number of padded attention scores that a further table must save"""


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
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.init}  # type: ignore[arg-type]
        return replace(self, **{name: _moved(value, device) for name, value in values.items()})  # type: ignore[type-var]


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return send(value, device)
    if isinstance(value, _OnDevice):
        return value.to(device)
    if isinstance(value, tuple) and value and isinstance(value[0], _OnDevice):
        return tuple(part.to(device) for part in value)
    return value


@dataclass(frozen=True, kw_only=True)
class Continuation(_OnDevice):
    """The prompts that precede the rows of a table."""

    table: int
    """index of the table that holds the prompts, one per row"""
    of_row: Tensor
    """[B] the row of that table which each row continues"""
    lengths: Tensor
    """[B] length of that prompt; the rest of its row is padding"""
    width: int
    """of that table"""


@dataclass(frozen=True, kw_only=True)
class Table(_OnDevice):
    """B rows of up to L tokens, padded on the right, with causal attention within each row."""

    rows: int
    width: int
    before: Continuation | None = None
    mask: Tensor | None = None
    """[B or 1, 1, L, prompts + L] attention mask; None: plain causal attention"""

    @property
    def longest(self) -> int:
        """Upper bound of the distance between a token and the first that it attends to."""
        return self.width + (self.before.width if self.before else 0)

    def mask_within(self, window: int | None, device: torch.device) -> Tensor | None:
        """Return the mask of a layer in which tokens attend to the last `window` tokens only."""
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


@dataclass(frozen=True, kw_only=True)
class PromptCopies(_OnDevice):
    """Whole sequences, each with a copy of its prompt, made of N tokens that share prompts."""

    layout: "PackedLayout"
    """of the sequences"""
    token: Tensor
    """[M] the token in each place of the sequences"""
    own: Tensor
    """[N] the place of each token; of a prompt's, in the first of its sequences"""
    prompt_places: Tensor
    """[R] all places of prompts' tokens"""
    prompt_numbers: Tensor
    """[R] which of the P prompts' tokens it is"""
    prompt_tokens: Tensor
    """[P] those tokens"""

    def spread(self, tokens: Tensor) -> Tensor:
        """Copy tokens [N, ...] to their places [M, ...]."""
        return tokens.index_select(0, self.token)

    def add_up(self, gradient: Tensor) -> Tensor:
        """Return the gradient [N, ...] of tokens, of [M, ...] places; added in float32."""
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        of_prompts = gradient.new_zeros(
            len(self.prompt_tokens), *gradient.shape[1:], dtype=dtype
        ).index_add_(0, self.prompt_numbers, gradient.index_select(0, self.prompt_places).to(dtype))
        own = gradient.index_select(0, self.own)
        return own.index_copy_(0, self.prompt_tokens, of_prompts.to(gradient.dtype))

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> "PromptCopies":
        """Build the sequences of segments in the given order."""
        begins: list[int] = []
        lengths: list[int] = []
        is_first_copy: list[bool] = []
        sequences: list[Segment] = []
        start = 0
        for segment in segments:
            response = start + segment.prompt
            for number, length in enumerate(segment.responses or (0,)):
                begins += [start, response]
                lengths += [segment.prompt, length]
                is_first_copy += [number == 0, True]
                sequences.append(Segment(segment.prompt + length))
                response += length
            start = response
        token = ranges(begins, lengths)
        part = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        is_prompt = part % 2 == 0
        first_places = torch.tensor(is_first_copy)[part].nonzero()[:, 0]
        own = torch.empty_like(first_places)
        own[token[first_places]] = first_places
        prompt_tokens, numbers = token[is_prompt].unique(return_inverse=True)
        return cls(
            layout=PackedLayout.of(sequences),
            token=token,
            own=own,
            prompt_places=is_prompt.nonzero()[:, 0],
            prompt_numbers=numbers,
            prompt_tokens=prompt_tokens,
        )


# not frozen: torch.compile specializes on frozen dataclasses, and would recompile per layout
@dataclass(kw_only=True)
class PackedLayout(_OnDevice):
    """How N packed tokens are divided, for the attention of every layer."""

    position_ids: Tensor
    """[N]"""
    starts: Tensor | None
    """[S + 1] int32, the start of each sequence, and N; None where prompts are shared"""
    longest: int
    """tokens of the longest segment"""
    separate: tuple[int, ...] | None
    """lengths of the sequences, where each gets an attention call of its own"""
    tables: tuple[Table, ...]
    padded: Tensor | None
    """[M] the token in each slot of all tables; None where a view of the tokens is the table"""
    slot: Tensor | None
    """[N] the slot of each token"""
    copies: PromptCopies | None = None
    """instead of tables, where prompts are shared and attention copies them"""
    handle: Tensor = field(init=False, repr=False, compare=False)
    """stands for the layout where only a tensor can be given; in host memory"""

    def __post_init__(self) -> None:
        twin = copy.copy(self)  # without a handle of its own: the handle keeps it alive
        number = next(_NUMBERS)
        self.handle = torch.tensor(number)
        self.handle.packed_layout = twin  # type: ignore[attr-defined]
        _OF_HANDLE[number] = twin

    @classmethod
    def of(cls, segments: Sequence[Segment], *, copies_prompts: bool = False) -> "PackedLayout":
        """Build the layout of segments in the given order."""
        if copies_prompts and any(segment.responses for segment in segments):
            return cls._of_copies(segments)
        begins = [0]
        for segment in segments:
            begins.append(begins[-1] + segment.num_tokens)
        is_shared = any(segment.responses for segment in segments)
        lengths = tuple(segment.num_tokens for segment in segments)
        tables, index, slot = _tables(segments, begins)
        is_view = len(tables) == 1 and torch.equal(index, torch.arange(begins[-1]))
        return cls(
            position_ids=_positions(segments),
            starts=None if is_shared else torch.tensor(begins, dtype=torch.int32),
            longest=max(lengths),
            separate=lengths if not is_shared and _are_all_long(lengths) else None,
            tables=tables,
            padded=None if is_view else index,
            slot=None if is_view else slot,
        )

    @classmethod
    def _of_copies(cls, segments: Sequence[Segment]) -> "PackedLayout":
        copies = PromptCopies.of(segments)
        return cls(
            position_ids=_positions(segments),
            starts=None,
            longest=copies.layout.longest,
            separate=None,
            tables=(),
            padded=None,
            slot=None,
            copies=copies,
        )


_NUMBERS = itertools.count()
_OF_HANDLE: WeakValueDictionary[int, PackedLayout] = WeakValueDictionary()


def layout_of(handle: Tensor) -> PackedLayout:
    """Return the layout that a handle stands for."""
    return _OF_HANDLE[int(handle)]


def _are_all_long(lengths: Sequence[int]) -> bool:
    return min(lengths) >= LONG_SEQUENCE


def ranges(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Return the concatenated ranges start, start + 1, ... of the given lengths."""
    counts = torch.tensor(lengths, dtype=torch.int64)
    shifts = torch.tensor(starts, dtype=torch.int64) - (counts.cumsum(0) - counts)
    return torch.arange(int(counts.sum())) + shifts.repeat_interleave(counts)


def _positions(segments: Sequence[Segment]) -> Tensor:
    starts = [
        start for segment in segments for start in (0, *[segment.prompt] * len(segment.responses))
    ]
    lengths = [length for segment in segments for length in (segment.prompt, *segment.responses)]
    return ranges(starts, lengths)


class _Row(NamedTuple):
    """Consecutive tokens that become a row of a table."""

    start: int
    length: int
    segment: int


def _tables(
    segments: Sequence[Segment], begins: Sequence[int]
) -> tuple[tuple[Table, ...], Tensor, Tensor]:
    """Return all tables, the token in each of their slots [M], and the slot of each token [N]."""
    tables: list[Table] = []
    rows: list[list[_Row]] = []
    heads = [
        _Row(begins[number], segment.prompt, number) for number, segment in enumerate(segments)
    ]
    for prompts in _by_length(heads):
        number_of_table = len(tables)
        tables.append(Table(rows=len(prompts), width=_width(prompts)))
        rows.append(prompts)
        for responses in _by_length(_responses(prompts, segments)):
            tables.append(_continuing(responses, prompts, number_of_table))
            rows.append(responses)
    return tuple(tables), *_slots(tables, rows, begins[-1])


def _responses(prompts: Sequence[_Row], segments: Sequence[Segment]) -> list[_Row]:
    found = []
    for prompt in prompts:
        start = prompt.start + prompt.length
        for length in segments[prompt.segment].responses:
            if length:  # a response of one token has no input beside its prompt
                found.append(_Row(start, length, prompt.segment))
            start += length
    return found


def _width(rows: Sequence[_Row]) -> int:
    return max(row.length for row in rows)


def _by_length(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Split rows into tables of similar length, where that saves much padding."""
    tables: list[list[_Row]] = []
    # a stable sort keeps the order of equal lengths, so that a view remains a view
    ordered = sorted(rows, key=lambda row: -row.length)
    for number, row in enumerate(ordered):
        width = tables[-1][0].length if tables else 0
        remaining = len(ordered) - number
        saved = remaining * (width**2 - row.length**2)
        if not tables or (2 * row.length <= width and saved >= MIN_SAVED_SCORES):
            tables.append([])
        tables[-1].append(row)
    return tables


def _continuing(responses: Sequence[_Row], prompts: Sequence[_Row], table: int) -> Table:
    row_of_segment = {prompt.segment: row for row, prompt in enumerate(prompts)}
    of_row = torch.tensor([row_of_segment[response.segment] for response in responses])
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


def _slots(
    tables: Sequence[Table], rows: Sequence[Sequence[_Row]], num_tokens: int
) -> tuple[Tensor, Tensor]:
    indices: list[Tensor] = []
    slot = torch.empty(num_tokens, dtype=torch.int64)
    first = 0
    for table, members in zip(tables, rows, strict=True):
        starts = torch.tensor([row.start for row in members])[:, None]
        lengths = torch.tensor([row.length for row in members])[:, None]
        column = torch.arange(table.width)
        is_token = column < lengths  # [B, L]
        index = starts + column.where(is_token, 0)  # padding repeats the first token of its row
        own = first + torch.arange(is_token.numel()).view_as(is_token)
        slot[index[is_token]] = own[is_token]
        indices.append(index.flatten())
        first += is_token.numel()
    return torch.cat(indices), slot
