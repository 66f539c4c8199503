import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trustbatch.advantages import (
    ADVANTAGES,
    group_centered,
    group_quantile,
    group_standardized,
    leave_one_out,
)


def test_group_standardized_by_hand() -> None:
    # mean 0.25, population std sqrt((3 * 0.25^2 + 0.75^2) / 4) = sqrt(0.1875) = 0.4330127
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    deviation = math.sqrt(0.1875) + 1e-6
    expected = [[0.75 / deviation] + [-0.25 / deviation] * 3]
    torch.testing.assert_close(
        group_standardized(rewards), torch.tensor(expected, dtype=torch.float64)
    )


def test_epsilon_is_added_to_the_deviation() -> None:
    # mean 1, std 1: A = +-1 / (1 + 1)
    result = group_standardized(torch.tensor([[0.0, 2.0]]), epsilon=1.0)
    assert result.tolist() == [[-0.5, 0.5]]


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("function", [group_standardized, group_quantile])
def test_an_epsilon_that_is_not_above_0_is_refused(
    function: Callable[..., torch.Tensor], epsilon: float
) -> None:
    with pytest.raises(ValueError, match="epsilon must be a number above 0, not "):
        function(torch.tensor([[0.0, 2.0]]), epsilon=epsilon)


def test_group_centered_by_hand() -> None:
    assert group_centered(torch.tensor([[3.0, 1.0], [0.0, 1.0]])).tolist() == [
        [1.0, -1.0],
        [-0.5, 0.5],
    ]


def test_leave_one_out_by_hand() -> None:
    # others' means: (0 + 1) / 2, (1 + 1) / 2, (1 + 0) / 2
    assert leave_one_out(torch.tensor([[1.0, 0.0, 1.0]])).tolist() == [[0.5, -1.0, 0.5]]


def test_group_quantile_by_hand() -> None:
    # 0.4 of five rewards is the second lowest, 2; mean 4, std sqrt((9 + 4 + 1 + 0 + 36) / 5)
    rewards = torch.tensor([[3.0, 10.0, 1.0, 4.0, 2.0]])
    deviation = math.sqrt((1 + 36 + 9 + 0 + 4) / 5) + 1e-6
    expected = [[value / deviation for value in (1.0, 8.0, -1.0, 2.0, 0.0)]]
    torch.testing.assert_close(group_quantile(rewards), torch.tensor(expected).double())
    # 0.5 of five is the third lowest, 3
    shifted = [[value / deviation for value in (0.0, 7.0, -2.0, 1.0, -1.0)]]
    found = group_quantile(rewards, quantile=0.5)
    torch.testing.assert_close(found, torch.tensor(shifted).double())
    # mean 1, std 1; 0.4 of two is the lower one
    found = group_quantile(torch.tensor([[0.0, 2.0]]), epsilon=1.0)
    assert found.tolist() == [[0.0, 1.0]]


def test_a_quantile_teaches_the_rare_kind_alone() -> None:
    # QAE's gate: a pass rate of up to 1 - 0.4 teaches what is right, above that what is wrong
    for num_right in range(1, 10):
        rewards = torch.tensor([[1.0] * num_right + [0.0] * (10 - num_right)])
        advantages = group_quantile(rewards)[0]
        right, wrong = advantages[:num_right], advantages[num_right:]
        if num_right <= 6:
            assert (right > 0).all()
            assert (wrong == 0).all()
        else:
            assert (right == 0).all()
            assert (wrong < 0).all()


def test_a_quantile_is_taken_as_it_is_written() -> None:
    # 0.07 * 100 is 7.000000000000001: the seventh of a hundred, not the eighth
    rewards = torch.arange(100.0)[None]
    assert group_quantile(rewards, quantile=0.07)[0, 6] == 0
    for bad in (0.0, 1.0, -0.4, math.nan):
        with pytest.raises(ValueError, match="between 0 and 1"):
            group_quantile(rewards, quantile=bad)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -7.3, 1e12])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_equal_rewards_give_exactly_zero(name: str, value: float, size: int) -> None:
    # three times 0.1 divided by three is not 0.1 in floating point
    rewards = torch.full((2, size), value, dtype=torch.float64)
    assert (ADVANTAGES[name](rewards) == 0).all()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_only_the_group_matters(name: str) -> None:
    torch.manual_seed(0)
    rewards = torch.randn(4, 6)
    together = ADVANTAGES[name](rewards)
    alone = torch.cat([ADVANTAGES[name](row[None]) for row in rewards])
    assert torch.equal(together, alone)
    shifted = ADVANTAGES[name](rewards.double() + 100.0)
    torch.testing.assert_close(together, shifted, rtol=0, atol=1e-9)
    if name != "group_quantile":  # its baseline is not a mean
        torch.testing.assert_close(together.sum(dim=1), torch.zeros(4).double(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_rewards_that_are_not_numbers_are_refused(name: str) -> None:
    for bad in (math.inf, -math.inf):
        with pytest.raises(ValueError, match="finite"):
            ADVANTAGES[name](torch.tensor([[0.0, bad]]))
    with pytest.raises(ValueError, match="groups, samples"):
        ADVANTAGES[name](torch.tensor([0.0, 1.0]))


def test_a_reward_that_was_not_given_takes_no_part() -> None:
    nan = math.nan
    assert group_centered(torch.tensor([[3.0, nan, 1.0]])).tolist()[0][::2] == [1.0, -1.0]
    # others' means without the second: 1 and 3
    assert leave_one_out(torch.tensor([[3.0, nan, 1.0]])).tolist()[0][::2] == [2.0, -2.0]
    # mean 1, std 1
    rewards = torch.tensor([[nan, 0.0, 2.0]])
    assert group_standardized(rewards, epsilon=1.0).tolist()[0][1:] == [-0.5, 0.5]
    # 0.5 of the two that were given is the lower one; of all three it would be the second
    assert group_quantile(rewards, quantile=0.5, epsilon=1.0).tolist()[0][1:] == [0.0, 1.0]


REWARDS = st.lists(
    st.lists(
        st.one_of(st.just(math.nan), st.sampled_from([0.0, 1.0]), st.floats(-100, 100)),
        min_size=1,
        max_size=6,
    ),
    min_size=1,
    max_size=1,
)


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(max_examples=100, deadline=None)
@given(rows=REWARDS)
def test_left_out_is_as_if_never_sampled(name: str, rows: list[list[float]]) -> None:
    rewards = torch.tensor(rows, dtype=torch.float64)
    advantages = ADVANTAGES[name](rewards)
    given_ = ~rewards.isnan()
    assert torch.equal(advantages.isnan(), ~given_)
    if given_.any():
        alone = ADVANTAGES[name](rewards[given_][None])
        torch.testing.assert_close(advantages[given_][None], alone, rtol=1e-9, atol=1e-9)
    if given_.sum() < 2:
        assert (advantages[given_] == 0).all()
