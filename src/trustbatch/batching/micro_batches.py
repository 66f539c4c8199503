"""From train sequences to micro-batches: what one forward pass computes.

A micro-batch is packed: its segments follow each other without padding, and only attention knows
where they end. A model that can't compute packed tokens gets padded rows instead, one per sequence.
Both give the same log-probs.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from trustbatch.batching.bins import Bin, bins_of_rank, packed_bins, padded_bins
from trustbatch.batching.sequences import SharedPromptGroup, group_by_prompt
from trustbatch.models.packing.layout import PackedLayout, Segment, ranges
from trustbatch.types import Completion, TrainSequence
from trustbatch.utils.cuda_memory import send
from trustbatch.utils.lazy import LazySequence


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The input tokens of B sequences, and the positions that predict their T response tokens.

    Response tokens are those that the policy sampled; an environment's tokens between them are
    input only. The last token of a response predicts nothing and is no input. Example: prompt
    [5, 6] with response [7, 8] is the input [5, 6, 7], whose positions 1 and 2 predict 7 and 8.
    Where a second response [9, 7] shares the prompt, the input is [5, 6, 7, 9]; positions 1 and 3
    predict 9 and 7.
    """

    input_ids: Tensor
    """[N] packed, or [B, L] padded on the right"""
    packed: PackedLayout | None
    """None for padded rows"""
    index: Tensor
    """[T] position in the flattened input whose output predicts each response token"""
    sequence: Tensor
    """[T] number within the batch of the sequence that each response token belongs to"""
    order: Tensor
    """[B] index of each sequence among those given to `micro_batches`"""
    target: Tensor
    """[T] the response tokens"""
    behavior_logp: Tensor
    """[T]"""
    advantage: Tensor
    """[T]"""
    top_token_ids: Tensor | None
    """[T, K]"""
    behavior_top_logp: Tensor | None
    """[T, K]"""
    anchor_logp: Tensor | None
    """[T]; None where it is the same as `behavior_logp`"""
    anchor_top_logp: Tensor | None
    """[T, K]"""
    completions: tuple[Completion, ...]
    """[B] what each sequence was made from, in host memory"""
    version: Tensor
    """[T] version of that policy's weights when it sampled each token"""
    source: Tensor
    """[T] id of that pair of policy and version, unique within the optimizer step"""
    proximal_logp: Tensor | None = None
    """[T] of the policy at the start of the pass; filled in by the trainer if it is needed"""
    proximal_top_logp: Tensor | None = None
    """[T, K] likewise"""
    reference_logp: Tensor | None = None
    """[T] of the reference policy; filled in by the trainer if there is one"""

    @property
    def policies(self) -> tuple[str, ...]:
        """[B] name of the policy that sampled each sequence."""
        return tuple(completion.provenance.policy for completion in self.completions)

    def by_completion(self, values: Tensor) -> dict[tuple[str, int], Tensor]:
        """Return the part of values [T, ...] that belongs to each completion, by its key."""
        parts = values.split([completion.num_sampled for completion in self.completions])
        return {each.key: part for each, part in zip(self.completions, parts, strict=True)}

    def to(self, device: torch.device) -> "MicroBatch":
        """Move every tensor to a device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {name: send(v, device) for name, v in values.items() if isinstance(v, Tensor)}
        packed = None if self.packed is None else self.packed.to(device)
        return replace(self, **moved, packed=packed)


def micro_batches(
    sequences: Sequence[TrainSequence],
    *,
    max_tokens: int,
    pad_token_id: int,
    packs: bool,
    may_share_prompts: bool = False,
    copies_prompts: bool = False,
    rank: int = 0,
    num_ranks: int = 1,
) -> LazySequence[MicroBatch]:
    """Divide the sequences of an optimizer step over the ranks; returns the batches of one rank.

    They are built when they are asked for: a GPU can compute one meanwhile. A batch computes at
    most `max_tokens` tokens, or one longer sequence. All ranks get the same number of batches; a
    batch without a sequence has one input token, which predicts nothing. Where prompts are shared,
    attention sees copies of them, or tables (see `PackedLayout`).
    """
    num_tokens = sum(sequence.num_tokens for sequence in sequences)
    # no group or padded bin may be so large that a rank is left without any
    share = max(min(max_tokens, -(-num_tokens // num_ranks)), 1)
    groups = group_by_prompt(
        sequences,
        may_share_prompts=packs and may_share_prompts,
        copies_prompts=copies_prompts,
        max_tokens=share,
    )
    if packs:
        bins = packed_bins(groups, max_tokens=max_tokens, num_ranks=num_ranks)
    else:
        bins = padded_bins(groups, max_tokens=share)
    own = bins_of_rank(bins, rank=rank, num_ranks=num_ranks)
    tops = {_top_width(sequence) for sequence in sequences}
    (top,) = tops if len(tops) == 1 else (None,)
    sources = {source: number for number, source in enumerate(_sources(sequences))}
    has_anchor = any(sequence.completion.anchor_logp is not None for sequence in sequences)
    pad = pad_token_id if not packs else None
    build = functools.partial(
        _build,
        pad_token_id=pad,
        sources=sources,
        top=top,
        has_anchor=has_anchor,
        copies_prompts=copies_prompts,
    )
    return LazySequence([functools.partial(build, each) for each in own])


def _top_width(sequence: TrainSequence) -> int | None:
    top = sequence.completion.top_token_ids
    return None if top is None else top.shape[1]


def _build(
    groups: Bin,
    *,
    pad_token_id: int | None,
    sources: Mapping[tuple[str, int], int],
    top: int | None,
    has_anchor: bool,
    copies_prompts: bool,
) -> MicroBatch:
    """Build the micro-batch of a bin; rows are padded where there is a `pad_token_id`.

    `top` is the number K of recorded most likely tokens, or None.
    """
    sequences = [sequence for group in groups for sequence in group.sequences]
    completions = [sequence.completion for sequence in sequences]
    packed = None
    if pad_token_id is None:
        inputs = [part for group in groups for part in _inputs(group)]
        input_ids = torch.cat(inputs) if inputs else torch.zeros(1, dtype=torch.int64)
        segments = [group.segment for group in groups] or [Segment(1)]
        packed = PackedLayout.of(segments, copies_prompts=copies_prompts)
        starts = _starts([group.num_tokens for group in groups])
    else:
        rows = [torch.cat(_inputs(group)) for group in groups] or [torch.tensor([pad_token_id])]
        input_ids = torch.nn.utils.rnn.pad_sequence(
            rows, batch_first=True, padding_value=pad_token_id
        )
        starts = [row * input_ids.shape[1] for row in range(len(groups))]
    lengths = torch.tensor(
        [completion.num_sampled for completion in completions], dtype=torch.int64
    )
    advantage = torch.tensor([sequence.advantage for sequence in sequences], dtype=torch.float32)
    none = torch.zeros(0)
    return MicroBatch(
        input_ids=input_ids,
        packed=packed,
        index=_index(groups, starts),
        sequence=torch.arange(len(sequences)).repeat_interleave(lengths),
        order=torch.tensor([i for group in groups for i in group.indices], dtype=torch.int64),
        target=torch.cat([none.long(), *(each.of_policy(each.token_ids) for each in completions)]),
        behavior_logp=torch.cat(
            [none, *(each.of_policy(each.behavior_logp) for each in completions)]
        ),
        advantage=advantage.repeat_interleave(lengths),
        top_token_ids=_cat(completions, "top_token_ids", torch.int64, top),
        behavior_top_logp=_cat(completions, "behavior_top_logp", torch.float32, top),
        anchor_logp=_anchors(completions, "logp") if has_anchor else None,
        anchor_top_logp=_anchors(completions, "top_logp", top) if has_anchor and top else None,
        completions=tuple(completions),
        version=torch.cat([none.long(), *(each.version_of_token for each in completions)]),
        source=torch.cat([none.long(), *(_source(each, sources) for each in completions)]),
    )


def _sources(sequences: Sequence[TrainSequence]) -> list[tuple[str, int]]:
    """Return the distinct pairs of policy and version that sampled the tokens, sorted."""
    completions = [sequence.completion for sequence in sequences]
    return sorted({(c.provenance.policy, v) for c in completions for v in c.all_versions})


def _source(completion: Completion, sources: Mapping[tuple[str, int], int]) -> Tensor:
    """Return the id of each token's pair of policy and version [num_sampled]."""
    policy = completion.provenance.policy
    if completion.versions is None:
        number = sources[policy, completion.provenance.version]
        return torch.full((completion.num_sampled,), number)
    versions = completion.version_of_token
    return torch.tensor([sources[policy, version] for version in versions.tolist()])


def _starts(lengths: Sequence[int]) -> list[int]:
    """Return the start of each of several packed parts."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts[:-1]


def _inputs(group: SharedPromptGroup) -> list[Tensor]:
    prompt = torch.tensor(group.sequences[0].prompt_token_ids)
    return [prompt, *(sequence.completion.token_ids[:-1] for sequence in group.sequences)]


def _index(groups: Sequence[SharedPromptGroup], starts: Sequence[int]) -> Tensor:
    """Return the positions that predict the response tokens; the first is the prompt's last."""
    completions: list[Completion] = []
    begins: list[int] = []
    lengths: list[int] = []
    for group, start in zip(groups, starts, strict=True):
        response = start + len(group.sequences[0].prompt_token_ids)
        last_of_prompt = response - 1
        for sequence in group.sequences:
            length = len(sequence.completion.token_ids) - 1
            begins += [last_of_prompt, response]
            lengths += [1, length]
            response += length
            completions.append(sequence.completion)
    positions = ranges(begins, lengths)
    if all(completion.sampled is None for completion in completions):
        return positions
    own = positions.split([len(completion.token_ids) for completion in completions])
    return torch.cat([each.of_policy(part) for each, part in zip(completions, own, strict=True)])


def _cat(
    completions: Sequence[Completion], name: str, dtype: torch.dtype, width: int | None
) -> Tensor | None:
    """Concatenate [n, width] of all completions; None unless the whole step has recorded them."""
    if width is None:
        return None
    present = [each.of_policy(getattr(each, name)) for each in completions]
    return torch.cat([torch.zeros(0, width, dtype=dtype), *present])


def _anchors(completions: Sequence[Completion], what: str, *width: int) -> Tensor:
    """Concatenate the anchor's [n, *width]; without one, the behavior policy is the anchor."""
    parts = [torch.zeros(0, *width)]
    for each in completions:
        anchor = getattr(each, f"anchor_{what}")
        parts.append(
            each.of_policy(getattr(each, f"behavior_{what}") if anchor is None else anchor)
        )
    return torch.cat(parts)
