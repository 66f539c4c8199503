import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.train_sequences import make_completion, make_sequence

from trustbatch.batching.bins import packed_bins
from trustbatch.batching.micro_batches import MicroBatch, micro_batches
from trustbatch.batching.sequences import (
    ATTENTION_PARITY_LENGTH,
    SharedPromptGroup,
    mini_batches,
    to_sequences,
)
from trustbatch.types import Prompt, RolloutGroup, TrainSequence

PAD = 999


def batches_of(
    sequences: list[TrainSequence], *, packs: bool = True, share: bool = False, **options: int
) -> list[MicroBatch]:
    settings = {"max_tokens": 100, "pad_token_id": PAD} | options
    return micro_batches(sequences, packs=packs, may_share_prompts=share, **settings)


def test_packed_layout_by_hand() -> None:
    sequences = [make_sequence([5], [7], 2.0), make_sequence([5, 6], [7, 8], -1.0)]
    (batch,) = batches_of(sequences)
    # longest first; the last token of a response is no input
    assert batch.input_ids.tolist() == [5, 6, 7, 5]
    assert batch.packed is not None
    assert batch.packed.position_ids.tolist() == [0, 1, 2, 0]
    assert batch.sequence.tolist() == [0, 0, 1]
    assert batch.index.tolist() == [1, 2, 3]
    assert batch.target.tolist() == [7, 8, 7]
    assert batch.advantage.tolist() == [-1.0, -1.0, 2.0]
    torch.testing.assert_close(batch.behavior_logp, torch.tensor([-0.7, -0.8, -0.7]))
    assert batch.top_token_ids is not None
    assert batch.behavior_top_logp is not None
    assert batch.top_token_ids.tolist() == [[7, 8], [8, 9], [7, 8]]
    assert batch.behavior_top_logp.tolist() == [[-7, -8], [-8, -9], [-7, -8]]


def test_padded_layout_by_hand() -> None:
    sequences = [make_sequence([5], [7], 2.0), make_sequence([5, 6], [7, 8], -1.0)]
    (batch,) = batches_of(sequences, packs=False, share=True)  # rows share nothing
    assert batch.input_ids.tolist() == [[5, 6, 7], [5, PAD, PAD]]
    assert batch.packed is None
    assert batch.index.tolist() == [1, 2, 3]
    assert batch.target.tolist() == [7, 8, 7]
    assert batch.sequence.tolist() == [0, 0, 1]


def test_shared_layout_by_hand() -> None:
    sequences = [
        make_sequence([5, 6, 9], [7, 8], 1.0),
        make_sequence([4], [7], 2.0),
        make_sequence([5, 6, 9], [8], 3.0),
        make_sequence([5, 6, 9], [3, 2, 1], 4.0),
    ]
    (batch,) = batches_of(sequences, share=True)
    assert batch.input_ids.tolist() == [5, 6, 9, 7, 3, 2, 4]
    assert batch.packed is not None
    assert batch.packed.position_ids.tolist() == [0, 1, 2, 3, 3, 4, 0]
    assert batch.target.tolist() == [7, 8, 8, 3, 2, 1, 7]
    assert batch.sequence.tolist() == [0, 0, 1, 2, 2, 2, 3]
    assert batch.index.tolist() == [2, 3, 2, 2, 4, 5, 6]
    assert batch.advantage.tolist() == [1.0, 1.0, 3.0, 4.0, 4.0, 4.0, 2.0]
    assert batch.order.tolist() == [0, 2, 3, 1]


def with_replies(sequence: TrainSequence, sampled: list[bool]) -> TrainSequence:
    """The same tokens, some of them said by an environment."""
    completion = replace(sequence.completion, sampled=torch.tensor(sampled))
    return replace(sequence, completion=completion)


def test_an_environments_tokens_are_input_alone() -> None:
    sequences = [
        with_replies(make_sequence([5, 6], [7, 8, 9, 4], 2.0), [True, False, False, True]),
        make_sequence([5], [7, 3], -1.0),
        with_replies(make_sequence([5, 6], [3, 2], 1.0), [True, False]),
    ]
    (batch,) = batches_of(sequences)
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9, 5, 6, 3, 5, 7]  # longest first
    assert batch.target.tolist() == [7, 4, 3, 7, 3]
    assert batch.index.tolist() == [1, 4, 6, 8, 9]
    assert batch.sequence.tolist() == [0, 0, 1, 2, 2]
    assert batch.advantage.tolist() == [2.0, 2.0, 1.0, -1.0, -1.0]
    torch.testing.assert_close(batch.behavior_logp, -batch.target / 10)
    assert batch.top_token_ids is not None
    assert batch.behavior_top_logp is not None
    assert batch.top_token_ids[:, 0].tolist() == batch.target.tolist()
    assert batch.behavior_top_logp[:, 0].tolist() == (-batch.target).tolist()
    assert len(batch.policies) == 3


@pytest.mark.parametrize(
    ("prompt", "response", "samples", "by"),
    [
        (6, 4, 8, ["tables", "copies"]),
        (9, 64, 8, ["tables", "copies"]),  # 7 x 9 of 576 tokens: 10.9%
        (8, 64, 8, []),  # 7 x 8 of 568: 9.9%
        (6, 4, 1, []),
        (500, 500, 8, ["tables", "copies"]),
        (700, 700, 8, ["copies"]),  # too long for an explicit mask
    ],
)
def test_prompts_are_shared_where_that_pays(
    prompt: int, response: int, samples: int, by: list[str]
) -> None:
    sequences = [
        make_sequence([number] * prompt, [1] * response, 0.0)
        for number in range(2)
        for _ in range(samples)
    ]
    for how in ("no", "tables", "copies"):
        (batch,) = batches_of(
            sequences, share=how != "no", copies_prompts=how == "copies", max_tokens=10**9
        )
        computed = samples * (response - 1) + prompt * (1 if how in by else samples)
        assert len(batch.input_ids) == 2 * computed


def test_groups_that_share_their_prompt_keep_to_the_budget() -> None:
    sequences = [make_sequence([n] * 9, [1, 2], 0.0) for n in range(4) for _ in range(3)]
    # a group is a prompt of 9 and three responses of one input token
    for max_tokens, sizes in ((24, [6, 6]), (12, [3] * 4), (11, [2, 1] * 4), (1, [1] * 12)):
        batches = batches_of(sequences, share=True, max_tokens=max_tokens)
        assert sorted(len(batch.policies) for batch in batches) == sorted(sizes)


def flatten(batches: list[MicroBatch]) -> list[tuple[int, list[int], list[int], list[float]]]:
    """Every sequence as its number, the tokens it is predicted from, those predicted, and logp."""
    found = []
    for batch in batches:
        inputs = batch.input_ids.flatten()
        for number in range(len(batch.policies)):
            own = batch.sequence == number
            found.append(
                (
                    int(batch.order[number]),
                    inputs[batch.index[own]].tolist(),
                    batch.target[own].tolist(),
                    batch.behavior_logp[own].tolist(),
                )
            )
    return sorted(found)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 60),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_any_division_loses_nothing_and_keeps_to_the_budget(
    sampled: list[tuple[int, int]],
    max_tokens: int,
    num_ranks: int,
    share: bool,
    packs: bool,
    is_answered: bool,
) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(50) for _ in range(length)] for length in (1, 4, 9, 2)]
    sequences = [
        make_sequence(prompts[prompt], [rng.randrange(50) for _ in range(length)], float(number))
        for number, (prompt, length) in enumerate(sampled)
    ]
    if is_answered:
        sequences = [
            with_replies(s, [True] + [rng.random() < 0.5 for _ in s.completion.token_ids[1:]])
            for s in sequences
        ]
    ranks = [
        batches_of(
            sequences,
            packs=packs,
            share=share,
            max_tokens=max_tokens,
            rank=rank,
            num_ranks=num_ranks,
        )
        for rank in range(num_ranks)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    everything = [batch for batches in ranks for batch in batches]
    # each response token is predicted by the one before it
    expected = [
        (
            index,
            s.completion.of_policy(
                torch.tensor([s.prompt_token_ids[-1], *s.completion.token_ids[:-1].tolist()])
            ).tolist(),
            s.completion.of_policy(s.completion.token_ids).tolist(),
            s.completion.of_policy(s.completion.behavior_logp).tolist(),
        )
        for index, s in enumerate(sequences)
    ]
    assert flatten(everything) == expected
    for batch in everything:
        assert batch.input_ids.numel() <= max_tokens or len(batch.policies) <= 1
        if not batch.policies:
            assert batch.input_ids.numel() == 1
            assert len(batch.target) == 0
    if len(sequences) >= num_ranks and not share:
        assert all(any(batch.policies for batch in batches) for batches in ranks) or not packs


def test_packing_fills_micro_batches_evenly_and_nearly_to_the_brim() -> None:
    rng = random.Random(1)
    sequences = [
        make_sequence([1] * 50, [2] * rng.randint(10, 900), float(number)) for number in range(300)
    ]
    batches = batches_of(sequences, max_tokens=8192)
    sizes = [len(batch.input_ids) for batch in batches]
    assert len(batches) == -(-sum(sizes) // 8192)  # the fewest that are possible
    assert max(sizes) - min(sizes) < 100


def costs_of_rounds(lengths: list[int], max_tokens: int) -> tuple[list[list[float]], list[int]]:
    """What each of four ranks has to do in each round, and its number of sequences."""
    sequences = [make_sequence([1], [2] * n, float(i)) for i, n in enumerate(lengths)]
    costs, counts = [], []
    for rank in range(4):
        own = batches_of(sequences, max_tokens=max_tokens, rank=rank, num_ranks=4)
        runs = [batch.sequence.bincount().double() for batch in own]
        costs.append([float((n + n**2 / ATTENTION_PARITY_LENGTH).sum()) for n in runs])
        counts.append(sum(len(batch.policies) for batch in own))
    return costs, counts


def test_ranks_get_equal_cost_not_equal_counts() -> None:
    rng = random.Random(2)
    lengths = [12000] * 5 + [rng.randint(100, 500) for _ in range(200)]
    costs, counts = costs_of_rounds(lengths, max_tokens=32768)
    totals = [sum(rounds) for rounds in costs]
    assert max(totals) < 1.02 * min(totals)
    assert max(counts) > 10 * min(counts)


def test_ranks_do_not_wait_for_each_other_in_any_round() -> None:
    rng = random.Random(3)
    lengths = [min(int(rng.paretovariate(0.9) * 200), 8000) for _ in range(256)]
    costs, _ = costs_of_rounds(lengths, max_tokens=8192)
    totals = [sum(rounds) for rounds in costs]
    assert max(totals) < 1.02 * min(totals)
    assert len(costs[0]) > 4
    waited = sum(max(each) for each in zip(*costs, strict=True))
    assert waited < 1.05 * sum(totals) / 4


def test_top_tokens_are_left_out_unless_all_sequences_have_them() -> None:
    with_top = make_sequence([1], [2], 0.0)
    without = TrainSequence(prompt_token_ids=(1,), completion=make_completion([2]), advantage=0.0)
    # also where they are in different micro-batches: a step uses them or does not
    for max_tokens in (100, 1):
        for batch in batches_of([with_top, without], max_tokens=max_tokens):
            assert batch.top_token_ids is None
            assert batch.behavior_top_logp is None
            assert batch.to(torch.device("cpu")).top_token_ids is None


def test_advantages_reach_their_completions() -> None:
    groups = [
        RolloutGroup(
            prompt=Prompt(id=str(number), text="", answer=""),
            prompt_token_ids=(number,),
            completions=tuple(make_completion([number, s], sample=s) for s in range(2)),
        )
        for number in range(3)
    ]
    advantages = torch.arange(6.0).reshape(3, 2)
    sequences = to_sequences(groups, advantages)
    seen = [(s.prompt_token_ids, s.completion.token_ids.tolist(), s.advantage) for s in sequences]
    assert seen == [
        ((0,), [0, 0], 0.0),
        ((0,), [0, 1], 1.0),
        ((1,), [1, 0], 2.0),
        ((1,), [1, 1], 3.0),
        ((2,), [2, 0], 4.0),
        ((2,), [2, 1], 5.0),
    ]
    advantages[1, 0] = advantages[2, 0] = torch.nan
    left = to_sequences(groups, advantages)
    assert [sequence.advantage for sequence in left] == [0.0, 1.0, 3.0, 5.0]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_mini_batches_partition_the_sequences(count: int) -> None:
    sequences = [make_sequence([1], [2], float(number)) for number in range(7)]
    parts = mini_batches(sequences, count, seed="a")
    assert len(parts) == count
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert sorted(s.advantage for part in parts for s in part) == [float(n) for n in range(7)]
    assert parts == mini_batches(sequences, count, seed="a")


def test_mini_batches_differ_between_seeds_and_are_never_empty() -> None:
    sequences = [make_sequence([1], [2], float(number)) for number in range(30)]
    first, other = (mini_batches(sequences, 3, seed=seed) for seed in "ab")
    assert [s.advantage for s in first[0]] != [s.advantage for s in other[0]]
    assert len(mini_batches(sequences[:2], 5, seed="a")) == 2


def test_few_bins_come_before_even_ones() -> None:
    """Spread by cost, 5 and 4 would meet in one bin of 10, 5 and 3 in the other, and 3 be left."""
    lengths = [5, 5, 4, 3, 3]
    groups = [
        SharedPromptGroup((make_sequence([7] * length, [8], 0.0),), (index,))
        for index, length in enumerate(lengths)
    ]
    assert [group.num_tokens for group in groups] == lengths
    bins = packed_bins(groups, max_tokens=10, num_ranks=1)
    assert [[group.num_tokens for group in each] for each in bins] == [[5, 5], [4, 3, 3]]
