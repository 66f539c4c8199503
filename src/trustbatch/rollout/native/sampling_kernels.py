"""The Triton kernel that samples from block statistics, as `sampling.sample_in_torch` does.

Two programs for each row, side by side: one samples the token, the other finds the most likely
ones. The numbers are those of `sampling.uniforms` and `token_blocks.VocabularyBlocks`.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportMissingImports=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# (Triton comes with torch on machines with a GPU; it types kernels as plain functions)

import torch
import triton
import triton.language as tl
from torch import Tensor

from trustbatch.rollout import sampling as in_torch
from trustbatch.rollout.native.kernels import block_statistics, reciprocal
from trustbatch.rollout.sampling import SampledTokens
from trustbatch.rollout.token_blocks import BLOCK, in_blocks
from trustbatch.types import SamplingParams

_GOLDEN, _MIX_1, _MIX_2 = (
    tl.constexpr(constant % 2**64) for constant in (in_torch.GOLDEN, in_torch.MIX_1, in_torch.MIX_2)
)


@triton.jit
def _uniform(key, position):
    # unsigned: shifts do not copy the sign bit
    z = key.to(tl.uint64) + (position + 1).to(tl.uint64) * _GOLDEN
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    z = z ^ (z >> 31)
    return (z >> 12).to(tl.float64) * 2.0**-52


@triton.jit
def _distribution(maxima, sums, number, row, num_blocks, BLOCKS: tl.constexpr):
    # maxima, masses and largest logit of the number-th distribution, and its normalizer
    block = tl.arange(0, BLOCKS)
    inside = block < num_blocks
    offsets = (number * tl.num_programs(0) + row) * num_blocks + block
    maximum = tl.load(maxima + offsets, mask=inside, other=-float("inf"))
    total = tl.load(sums + offsets, mask=inside, other=0.0).to(tl.float64)
    largest = tl.max(maximum, 0)
    masses = total * tl.exp((maximum - largest).to(tl.float64))
    normalizer = largest + tl.log(tl.sum(masses, 0)).to(tl.float32)
    return maximum, masses, largest, normalizer


@triton.jit
def _first_above(masses, cumulative, target, COUNT: tl.constexpr):
    # a parallel sum may round an entry of mass 0 up, so entries without mass are left out
    index = tl.arange(0, COUNT)
    possible = masses > 0
    last = tl.max(tl.where(possible, index, 0), 0)
    return tl.min(tl.where(possible & (cumulative > target), index, last), 0)


@triton.jit
def _invert(uniform, logits, factor, masses, largest, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    cumulative = tl.cumsum(masses, 0)
    target = uniform * tl.max(cumulative, 0)
    block = _first_above(masses, cumulative, target, BLOCKS)
    before = tl.sum(tl.where(tl.arange(0, BLOCKS) == block, cumulative - masses, 0.0), 0)
    inside = tl.load(logits + block * BLOCK + tl.arange(0, BLOCK)).to(tl.float32) * factor
    masses_inside = tl.exp((inside - largest).to(tl.float64))
    within = tl.cumsum(masses_inside, 0)
    # the block's own sum is rounded differently, but must not end before the target
    rest = tl.minimum(target - before, tl.max(within, 0) * (1 - 2.0**-50))
    return block * BLOCK + _first_above(masses_inside, within, rest, BLOCK)


@triton.jit
def _sort_keys(values, ids):
    # integers in the order of the values, and where they are equal, the lowest id is the largest
    values = tl.where(values == 0, 0.0, values)  # -0.0 equals 0.0
    values = tl.where(values != values, float("inf"), values)
    bits = values.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (ids ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def _ids(sort_keys):
    return (sort_keys & 0x7FFFFFFF).to(tl.int32) ^ 0x7FFFFFFF


@triton.jit
def _most_likely(logits, factor, maximum, normalizer, num_blocks, CHOSEN: tl.constexpr,
                 TOP: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    # K tokens are in the K blocks with the largest maxima
    blocks = _ids(tl.topk(_sort_keys(maximum, tl.arange(0, BLOCKS)), CHOSEN))
    ids = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = ids < num_blocks * BLOCK
    x = tl.load(logits + ids, mask=inside, other=-float("inf")).to(tl.float32)
    # in order of the rounded log-probs, so that ties are those of the recorded numbers
    candidates = _sort_keys(x * factor - normalizer, ids)
    return _ids(tl.topk(tl.reshape(candidates, [CHOSEN * BLOCK]), TOP))


@triton.jit
def _sample_rows(
    logits,
    row_stride,
    num_blocks,
    maxima,
    sums,
    factor,
    recorded_factor,
    anchor_factor,
    keys,
    key_stride,
    positions,
    position_stride,
    token_ids,
    logp,
    anchor_logp,
    top_token_ids,
    top_logp,
    anchor_top_logp,
    num_top,
    RECORDED: tl.constexpr,
    ANCHOR: tl.constexpr,
    CHOSEN: tl.constexpr,
    TOP: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    maximum, masses, largest, normalizer = _distribution(maxima, sums, 0, row, num_blocks, BLOCKS)
    if RECORDED != 0:
        maximum, _, _, normalizer = _distribution(maxima, sums, RECORDED, row, num_blocks, BLOCKS)
    anchor_normalizer = normalizer
    if ANCHOR != RECORDED:
        maximum, _, _, anchor_normalizer = _distribution(
            maxima, sums, ANCHOR, row, num_blocks, BLOCKS
        )
    if tl.program_id(1) == 0:
        key, position = tl.load(keys + row * key_stride), tl.load(positions + row * position_stride)
        token = _invert(_uniform(key, position), logits, factor, masses, largest, BLOCKS, BLOCK)
        taken = tl.load(logits + token).to(tl.float32)
        tl.store(token_ids + row, token.to(tl.int64))
        tl.store(logp + row, taken * recorded_factor - normalizer)
        if ANCHOR != RECORDED:
            tl.store(anchor_logp + row, taken * anchor_factor - anchor_normalizer)
    elif top_token_ids is not None:
        ids = _most_likely(logits, anchor_factor, maximum, anchor_normalizer, num_blocks,
                           CHOSEN, TOP, BLOCKS, BLOCK)  # fmt: skip
        top = tl.load(logits + ids).to(tl.float32)
        offsets = row * num_top + tl.arange(0, TOP)
        asked_for = tl.arange(0, TOP) < num_top
        tl.store(top_token_ids + offsets, ids.to(tl.int64), mask=asked_for)
        tl.store(top_logp + offsets, top * recorded_factor - normalizer, mask=asked_for)
        if ANCHOR != RECORDED:
            top_anchor = top * anchor_factor - anchor_normalizer
            tl.store(anchor_top_logp + offsets, top_anchor, mask=asked_for)


def sample_rows(
    logits: Tensor, keys: Tensor, position: int | Tensor, sampling: SamplingParams
) -> SampledTokens:
    """Sample one token per row of logits [B, V], without top-k or top-p, at temperatures above 0.

    As `sampling.sample_in_torch` does, up to the rounding of sums.
    """
    blocks = in_blocks(logits)
    recorded = 1.0 if sampling.logprob_mode == "raw" else sampling.temperature
    anchor = sampling.anchor_temperature if sampling.records_anchor else None
    # the most likely tokens are ordered by the anchor, if there is one
    wanted = (sampling.temperature, recorded, recorded if anchor is None else anchor)
    distinct = list(dict.fromkeys(wanted))
    maxima, sums = block_statistics(blocks, *distinct)
    result = _new_tokens(logits, sampling.top_logprobs, has_anchor=anchor is not None)
    num_top = 0 if result.top_token_ids is None else result.top_token_ids.shape[-1]
    positions = torch.as_tensor(position, device=keys.device).expand(len(keys))
    num_blocks = blocks.shape[1]
    padded_blocks = max(triton.next_power_of_2(num_blocks), 2)
    padded_top = max(triton.next_power_of_2(num_top), 2)  # a sort needs two
    _sample_rows[(len(logits), 2 if num_top else 1)](
        blocks,
        blocks.stride(0),
        num_blocks,
        maxima,
        sums,
        *(reciprocal(temperature) for temperature in wanted),
        keys,
        keys.stride(0),
        positions,
        positions.stride(0),
        result.token_ids,
        result.logp,
        result.anchor_logp,
        result.top_token_ids,
        result.top_logp,
        result.anchor_top_logp,
        num_top,
        RECORDED=distinct.index(wanted[1]),
        ANCHOR=distinct.index(wanted[2]),
        CHOSEN=min(padded_top, padded_blocks),
        TOP=padded_top,
        BLOCKS=padded_blocks,
        BLOCK=BLOCK,
        num_warps=8,
        enable_fp_fusion=False,  # rounds as torch does
    )
    return result


def _new_tokens(logits: Tensor, num_top: int, *, has_anchor: bool) -> SampledTokens:
    num_rows, num_tokens = logits.shape
    shapes = {"token_ids": (num_rows,), "logp": (num_rows,)}
    if has_anchor:
        shapes["anchor_logp"] = (num_rows,)
    if num_top:
        top = (num_rows, min(num_top, num_tokens))
        shapes |= {"top_token_ids": top, "top_logp": top}
        if has_anchor:
            shapes["anchor_top_logp"] = top
    return SampledTokens.of(
        {
            name: torch.empty(
                shape, dtype=torch.long if "ids" in name else torch.float32, device=logits.device
            )
            for name, shape in shapes.items()
        }
    )
