import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trustbatch.batching.micro_batches import MicroBatch, micro_batches
from trustbatch.batching.samples import mini_batches, to_sequences
from trustbatch.types import (
    Completion,
    FinishReason,
    Prompt,
    Provenance,
    RolloutGroup,
    TrainSequence,
)

PROVENANCE = Provenance(
    policy="p",
    version=0,
    engine="native",
    precision="float32",
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    logprob_mode="processed",
)
PAD = 999


def make_completion(token_ids: list[int], *, sample: int = 0, top: int = 0) -> Completion:
    tokens = torch.tensor(token_ids)
    return Completion(
        prompt_id="p",
        sample=sample,
        token_ids=tokens,
        behaviour_logp=-tokens.float() / 10,
        top_token_ids=tokens[:, None] + torch.arange(top) if top else None,
        behaviour_top_logp=-tokens[:, None].float() - torch.arange(top) if top else None,
        finish_reason=FinishReason.STOP,
        provenance=PROVENANCE,
        text="",
    )


def make_sequence(prompt: list[int], response: list[int], advantage: float) -> TrainSequence:
    return TrainSequence(
        prompt_token_ids=tuple(prompt),
        completion=make_completion(response, top=2),
        advantage=advantage,
    )


def test_layout_by_hand() -> None:
    sequences = [make_sequence([5], [7], 2.0), make_sequence([5, 6], [7, 8], -1.0)]
    (batch,) = micro_batches(sequences, max_tokens=100, pad_token_id=PAD)
    # longest first; the last token of a response is no input; row 1 has two places of padding
    assert batch.input_ids.tolist() == [[5, 6, 7], [5, PAD, PAD]]
    assert batch.prompts is None
    assert batch.row.tolist() == [0, 0, 1]
    assert batch.column.tolist() == [1, 2, 0]
    assert batch.target.tolist() == [7, 8, 7]
    assert batch.advantage.tolist() == [-1.0, -1.0, 2.0]
    torch.testing.assert_close(batch.behaviour_logp, torch.tensor([-0.7, -0.8, -0.7]))
    assert batch.top_token_ids is not None
    assert batch.behaviour_top_logp is not None
    assert batch.top_token_ids.tolist() == [[7, 8], [8, 9], [7, 8]]
    assert batch.behaviour_top_logp.tolist() == [[-7, -8], [-8, -9], [-7, -8]]


def test_shared_layout_by_hand() -> None:
    sequences = [
        make_sequence([5, 6, 9], [7, 8], 1.0),
        make_sequence([4], [7], 2.0),
        make_sequence([5, 6, 9], [8], 3.0),
        make_sequence([5, 6, 9], [3, 2, 1], 4.0),
    ]
    (batch,) = micro_batches(sequences, max_tokens=100, pad_token_id=PAD, may_share_prompts=True)
    assert batch.prompts is not None
    assert batch.prompts.input_ids.tolist() == [[5, 6, 9], [PAD, PAD, 4]]
    assert batch.prompts.mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    # groups stay together
    assert batch.prompts.of_row.tolist() == [0, 0, 0, 1]
    assert batch.input_ids.tolist() == [[7, PAD], [PAD, PAD], [3, 2], [PAD, PAD]]
    assert batch.target.tolist() == [7, 8, 8, 3, 2, 1, 7]
    assert batch.row.tolist() == [0, 0, 1, 2, 2, 2, 3]
    assert batch.column.tolist() == [0, 1, 0, 0, 1, 2, 0]
    assert batch.advantage.tolist() == [1.0, 1.0, 3.0, 4.0, 4.0, 4.0, 2.0]
    moved = batch.to(torch.device("cpu")).prompts
    assert moved is not None
    assert torch.equal(moved.mask, batch.prompts.mask)


@pytest.mark.parametrize(
    ("prompt", "response", "samples", "shared"),
    [
        (6, 4, 8, True),
        (6, 64, 8, False),  # nothing to save
        (6, 4, 1, False),
        (500, 500, 8, True),
        (700, 700, 8, False),  # too long for an explicit mask
    ],
)
def test_prompts_are_shared_where_that_pays(
    prompt: int, response: int, samples: int, shared: bool
) -> None:
    sequences = [
        make_sequence([number] * prompt, [1] * response, 0.0)
        for number in range(2)
        for _ in range(samples)
    ]
    options = {"max_tokens": 10**9, "pad_token_id": PAD}
    (batch,) = micro_batches(sequences, may_share_prompts=True, **options)
    assert (batch.prompts is not None) == shared
    (batch,) = micro_batches(sequences, may_share_prompts=False, **options)
    assert batch.prompts is None


def test_groups_that_share_their_prompt_keep_to_the_budget() -> None:
    sequences = [make_sequence([n] * 9, [1, 2], 0.0) for n in range(4) for _ in range(3)]
    # a group is 3 rows of 11 tokens
    for max_tokens, sizes in ((66, [6, 6]), (22, [2, 1, 2, 1, 2, 1, 2, 1]), (1, [1] * 12)):
        batches = micro_batches(
            sequences, max_tokens=max_tokens, pad_token_id=PAD, may_share_prompts=True
        )
        assert all(batch.prompts is not None for batch in batches)
        assert [len(batch.input_ids) for batch in batches] == sizes


def flatten(batches: list[MicroBatch]) -> list[tuple[tuple[int, ...], float, float]]:
    """Every sequence as (its visible tokens, first behaviour log-prob, advantage)."""
    found = []
    for batch in batches:
        for row in range(len(batch.input_ids)):
            mine = batch.row == row
            inputs = batch.input_ids[row][batch.input_ids[row] != PAD].tolist()
            visible = [*inputs, int(batch.target[mine][-1])]
            found.append(
                (
                    tuple(visible),
                    float(batch.behaviour_logp[mine][0]),
                    float(batch.advantage[mine][0]),
                )
            )
    return sorted(found)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 60),
)
def test_packing_loses_nothing_and_keeps_to_the_budget(
    lengths: list[tuple[int, int]], max_tokens: int
) -> None:
    draw = random.Random(0)
    sequences = [
        make_sequence(
            [draw.randrange(50) for _ in range(prompt)],
            [draw.randrange(50) for _ in range(response)],
            float(number),
        )
        for number, (prompt, response) in enumerate(lengths)
    ]
    batches = micro_batches(sequences, max_tokens=max_tokens, pad_token_id=PAD)
    whole = micro_batches(sequences, max_tokens=10**9, pad_token_id=PAD)
    assert len(whole) == 1
    assert flatten(batches) == flatten(whole)
    for batch in batches:
        assert batch.input_ids.numel() <= max_tokens or len(batch.input_ids) == 1
        # the logits at `column` are those that predict `target`, one place further on
        padded = torch.cat([batch.input_ids, torch.full((len(batch.input_ids), 1), PAD)], dim=1)
        following = padded[batch.row, batch.column + 1]
        is_last = torch.cat([batch.row[1:] != batch.row[:-1], torch.tensor([True])])
        assert torch.equal(following[~is_last], batch.target[~is_last])
        assert (following[is_last] == PAD).all()


def test_top_tokens_are_left_out_unless_all_sequences_have_them() -> None:
    with_top = make_sequence([1], [2], 0.0)
    without = TrainSequence(prompt_token_ids=(1,), completion=make_completion([2]), advantage=0.0)
    (batch,) = micro_batches([with_top, without], max_tokens=100, pad_token_id=PAD)
    assert batch.top_token_ids is None
    assert batch.behaviour_top_logp is None
    moved = batch.to(torch.device("cpu"))
    assert moved.top_token_ids is None
    assert torch.equal(moved.input_ids, batch.input_ids)


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
