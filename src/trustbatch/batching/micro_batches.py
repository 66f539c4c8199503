"""From sequences to batches that one forward pass can hold.

A batch is packed: units lie end to end, and attention alone knows where they end. For a model that
can't compute that, it has padded rows instead, one a sequence. Both give the same log-probs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from trustbatch.batching.division import Bin, bins_of_rank, packed_bins, padded_bins
from trustbatch.batching.units import SharedPromptGroup, units_of
from trustbatch.models.packing.layout import PackedLayout, Segment, ranges
from trustbatch.types import Completion, TrainSequence


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Input tokens, and where the outputs that predict its T response tokens are.

    Response tokens are those that the policy sampled; an environment's between them are input
    alone. The last token of a response predicts nothing and is no input. Example: prompt [5, 6]
    with response [7, 8] is the input [5, 6, 7], whose places 1 and 2 predict 7 and 8. Where a
    second response [9, 7] shares the prompt, the input is [5, 6, 7, 9]; places 1 and 3 predict 9
    and 7.
    """

    input_ids: Tensor
    """[N] packed, or [B, L] padded on the right"""
    packed: PackedLayout | None
    """None for padded rows"""
    index: Tensor
    """[T] place of the output that predicts each response token, among all input tokens in order"""
    sequence: Tensor
    """[T] number of the sequence that it belongs to"""
    target: Tensor
    """[T] the token itself"""
    behavior_logp: Tensor
    """[T]"""
    advantage: Tensor
    """[T]"""
    top_token_ids: Tensor | None
    """[T, K]"""
    behavior_top_logp: Tensor | None
    """[T, K]"""
    anchor_logp: Tensor | None
    """[T], where it differs from `behavior_logp`"""
    anchor_top_logp: Tensor | None
    """[T, K]"""
    policies: tuple[str, ...]
    """who sampled each sequence"""
    version: Tensor
    """[T] and with which version of its weights, for each token"""
    source: Tensor
    """[T] the number of that pair of policy and version among all of the optimizer step"""

    def to(self, device: torch.device) -> "MicroBatch":
        """Move every tensor."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {n: v.to(device) for n, v in values.items() if isinstance(v, Tensor | PackedLayout)}
        return replace(self, **moved)


def micro_batches(
    sequences: Sequence[TrainSequence],
    *,
    max_tokens: int,
    pad_token_id: int,
    packs: bool,
    may_share_prompts: bool = False,
    rank: int = 0,
    num_ranks: int = 1,
) -> list[MicroBatch]:
    """Divide the sequences of an optimizer step over the ranks, and return those of one rank.

    A batch computes at most `max_tokens` tokens, or one longer sequence. All ranks get equally many
    batches; a batch without a sequence has one input token, which predicts nothing.
    """
    num_tokens = sum(sequence.num_tokens for sequence in sequences)
    # no unit or padded bin so large that a rank would have to do without
    share = max(min(max_tokens, -(-num_tokens // num_ranks)), 1)
    units = units_of(sequences, may_share_prompts=packs and may_share_prompts, max_tokens=share)
    if packs:
        bins = packed_bins(units, max_tokens=max_tokens, num_ranks=num_ranks)
    else:
        bins = padded_bins(units, max_tokens=share)
    own = bins_of_rank(bins, rank=rank, num_ranks=num_ranks)
    tops = {_top_width(sequence) for sequence in sequences}
    (top,) = tops if len(tops) == 1 else (None,)
    sources = {pair: number for number, pair in enumerate(_pairs(sequences))}
    has_anchor = any(sequence.completion.anchor_logp is not None for sequence in sequences)
    pad = pad_token_id if not packs else None
    return [_lay_out(each, pad, sources, top=top, has_anchor=has_anchor) for each in own]


def _top_width(sequence: TrainSequence) -> int | None:
    top = sequence.completion.top_token_ids
    return None if top is None else top.shape[1]


def _lay_out(
    units: Bin,
    pad_token_id: int | None,
    sources: Mapping[tuple[str, int], int],
    *,
    top: int | None,
    has_anchor: bool,
) -> MicroBatch:
    """Lay units out, padded where there is a token for it; `top` tokens recorded everywhere."""
    sequences = [sequence for unit in units for sequence in unit.sequences]
    completions = [sequence.completion for sequence in sequences]
    packed = None
    if pad_token_id is None:
        inputs = [part for unit in units for part in _inputs(unit)]
        input_ids = torch.cat(inputs) if inputs else torch.zeros(1, dtype=torch.int64)
        packed = PackedLayout.of([unit.shape for unit in units] or [Segment(1)])
        begins = _begins([unit.num_tokens for unit in units])
    else:
        rows = [torch.cat(_inputs(unit)) for unit in units] or [torch.tensor([pad_token_id])]
        input_ids = torch.nn.utils.rnn.pad_sequence(
            rows, batch_first=True, padding_value=pad_token_id
        )
        begins = [row * input_ids.shape[1] for row in range(len(units))]
    lengths = torch.tensor(
        [completion.num_sampled for completion in completions], dtype=torch.int64
    )
    advantage = torch.tensor([sequence.advantage for sequence in sequences], dtype=torch.float32)
    none = torch.zeros(0)
    return MicroBatch(
        input_ids=input_ids,
        packed=packed,
        index=_index(units, begins),
        sequence=torch.arange(len(sequences)).repeat_interleave(lengths),
        target=torch.cat([none.long(), *(each.of_policy(each.token_ids) for each in completions)]),
        behavior_logp=torch.cat(
            [none, *(each.of_policy(each.behavior_logp) for each in completions)]
        ),
        advantage=advantage.repeat_interleave(lengths),
        top_token_ids=_cat(completions, "top_token_ids", torch.int64, top),
        behavior_top_logp=_cat(completions, "behavior_top_logp", torch.float32, top),
        anchor_logp=_anchors(completions, "logp") if has_anchor else None,
        anchor_top_logp=_anchors(completions, "top_logp", top) if has_anchor and top else None,
        policies=tuple(completion.provenance.policy for completion in completions),
        version=torch.cat([none.long(), *(each.version_of_token for each in completions)]),
        source=torch.cat([none.long(), *(_source(each, sources) for each in completions)]),
    )


def _pairs(sequences: Sequence[TrainSequence]) -> list[tuple[str, int]]:
    """Return who sampled tokens of the sequences, each policy and version once, in order."""
    completions = [sequence.completion for sequence in sequences]
    return sorted({(c.provenance.policy, v) for c in completions for v in c.all_versions})


def _source(completion: Completion, sources: Mapping[tuple[str, int], int]) -> Tensor:
    """Return the number of each token's policy and version [num_sampled]."""
    policy = completion.provenance.policy
    if completion.versions is None:
        number = sources[policy, completion.provenance.version]
        return torch.full((completion.num_sampled,), number)
    versions = completion.version_of_token
    return torch.tensor([sources[policy, version] for version in versions.tolist()])


def _begins(lengths: Sequence[int]) -> list[int]:
    """Return where each of the things that lie end to end begins."""
    begins = [0]
    for length in lengths:
        begins.append(begins[-1] + length)
    return begins[:-1]


def _inputs(unit: SharedPromptGroup) -> list[Tensor]:
    prompt = torch.tensor(unit.sequences[0].prompt_token_ids)
    return [prompt, *(sequence.completion.token_ids[:-1] for sequence in unit.sequences)]


def _index(units: Sequence[SharedPromptGroup], begins: Sequence[int]) -> Tensor:
    """Return the places that predict the response tokens; the first is the prompt's last."""
    completions: list[Completion] = []
    starts: list[int] = []
    lengths: list[int] = []
    for unit, begin in zip(units, begins, strict=True):
        response = begin + len(unit.sequences[0].prompt_token_ids)
        last_of_prompt = response - 1
        for sequence in unit.sequences:
            length = len(sequence.completion.token_ids) - 1
            starts += [last_of_prompt, response]
            lengths += [1, length]
            response += length
            completions.append(sequence.completion)
    places = ranges(starts, lengths)
    if all(completion.sampled is None for completion in completions):
        return places
    own = places.split([len(completion.token_ids) for completion in completions])
    return torch.cat([each.of_policy(part) for each, part in zip(completions, own, strict=True)])


def _cat(
    completions: Sequence[Completion], name: str, dtype: torch.dtype, width: int | None
) -> Tensor | None:
    """Put [n, width] side by side; None unless all sequences of the step have them."""
    if width is None:
        return None
    present = [each.of_policy(getattr(each, name)) for each in completions]
    return torch.cat([torch.zeros(0, width, dtype=dtype), *present])


def _anchors(completions: Sequence[Completion], what: str, *width: int) -> Tensor:
    """Put the anchor's [n, *width] end to end; who recorded none was sampled from it."""
    parts = [torch.zeros(0, *width)]
    for each in completions:
        anchor = getattr(each, f"anchor_{what}")
        parts.append(
            each.of_policy(getattr(each, f"behavior_{what}") if anchor is None else anchor)
        )
    return torch.cat(parts)
