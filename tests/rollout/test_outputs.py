"""What rows have sampled: chunks of tokens go to their rows, up to each row's end."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trustbatch.errors import DivergedError
from trustbatch.rollout.native.batch import Row
from trustbatch.rollout.native.outputs import Outputs
from trustbatch.rollout.sampling import SampledTokens
from trustbatch.types import GenerationRequest, SamplingParams

STOP = 0


def make_row(slot: int, max_tokens: int, prefix: tuple[int, ...] = ()) -> Row:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP,))
    request = GenerationRequest(
        prompt_id=str(slot), token_ids=(5,), num_samples=1, sampling=sampling
    )
    return Row(slot, request, 0, prefix)


def make_tokens(ids: list[list[int]], generator: torch.Generator | None = None) -> SampledTokens:
    token_ids = torch.tensor(ids)
    return SampledTokens(
        token_ids,
        -torch.rand(token_ids.shape, generator=generator),
        torch.randint(9, (*token_ids.shape, 2), generator=generator),
        -torch.rand(*token_ids.shape, 2, generator=generator),
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_each_row_gets_its_tokens_up_to_its_end(data: st.DataObject) -> None:
    """Against a list per row; rows join late, leave with their tokens and come back."""
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    rows = [make_row(10 * number, length) for number, length in enumerate(lengths)]
    waiting, running = list(rows), []
    outputs = Outputs(rows)
    expected: dict[int, list[tuple[int, float, list[int]]]] = {row.slot: [] for row in rows}
    ended: set[int] = set()
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    while waiting or running:
        if waiting and (not running or data.draw(st.booleans())):
            running.append(waiting.pop(0))
        num_steps = data.draw(st.integers(1, 4))
        ids = [
            [data.draw(st.sampled_from([STOP, 1, 2, 3])) for _ in running] for _ in range(num_steps)
        ]
        tokens = make_tokens(ids, generator)
        outputs.add(running, tokens)
        assert tokens.top_token_ids is not None
        for number, row in enumerate(running):
            own = expected[row.slot]
            for step in range(num_steps):
                if row.slot not in ended:
                    own.append(
                        (
                            ids[step][number],
                            float(tokens.logp[step, number]),
                            tokens.top_token_ids[step, number].tolist(),
                        )
                    )
                    if ids[step][number] == STOP or len(own) == row.request.sampling.max_tokens:
                        ended.add(row.slot)
        left = [row.max_tokens for row in running if row.slot not in ended]
        if left:
            limits = {row.slot: row.request.sampling.max_tokens for row in running}
            wanted = [
                limits[row.slot] - len(expected[row.slot])
                for row in running
                if row.slot not in ended
            ]
            assert outputs.num_left(running) == max(wanted)
        else:
            assert outputs.num_left(running) == 0
        still = [number for number, row in enumerate(running) if row.slot not in ended]
        assert outputs.running(running) == still
        if data.draw(st.booleans()):
            outputs.settle()
        running = [running[number] for number in still]
        if len(running) > 1 and data.draw(st.booleans()):
            gone = outputs.leave(running[1:])
            assert [row.slot for row in gone] == [row.slot for row in running[1:]]
            for row in gone:
                assert row.prefix == tuple(token for token, _, _ in expected[row.slot])
            waiting, running = gone + waiting, running[:1]
    found = outputs.by_slot()
    assert found.keys() == expected.keys()
    for slot, tokens in found.items():
        assert tokens.top_token_ids is not None
        columns = (tokens.token_ids.tolist(), tokens.logp.tolist(), tokens.top_token_ids.tolist())
        assert list(zip(*columns, strict=True)) == expected[slot]


def test_rows_with_a_prefix_may_sample_the_rest() -> None:
    rows = [make_row(0, 4, prefix=(7, 8)), make_row(1, 4)]
    outputs = Outputs(rows)
    outputs.add(rows, make_tokens([[1, 1]] * 4))
    assert outputs.running(rows) == []
    assert {slot: len(tokens.token_ids) for slot, tokens in outputs.by_slot().items()} == {
        0: 2,
        1: 4,
    }


def test_a_row_that_never_joined_has_no_tokens() -> None:
    rows = [make_row(0, 4), make_row(1, 4)]
    outputs = Outputs(rows)
    outputs.add(rows[:1], make_tokens([[1]]))
    assert outputs.by_slot().keys() == {0}
    (gone,) = outputs.leave(rows[:1])
    assert gone.prefix == (1,)


def test_tokens_without_a_finite_log_prob_are_refused_if_they_are_kept() -> None:
    rows = [make_row(0, 4)]
    tokens = make_tokens([[1], [STOP], [1]])
    tokens.logp[2] = torch.nan  # after the end
    outputs = Outputs(rows)
    outputs.add(rows, tokens)
    outputs.settle()
    tokens.logp[1] = torch.nan
    outputs = Outputs(rows)
    outputs.add(rows, tokens)
    with pytest.raises(DivergedError):
        outputs.settle()
