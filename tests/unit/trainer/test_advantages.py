from __future__ import annotations

import math

import pytest

from writer_rl.trainer.advantages import normalise_group, position_advantages


def column(returns, **options):
    return [row[0] for row in position_advantages([[value] for value in returns], **options).advantages]


def test_one_success_among_eight():
    assert column([1.0] + [0.0] * 7) == pytest.approx([2.6457513] + [-0.3779645] * 7, abs=1e-7)
    unbiased = column([1.0] + [0.0] * 7, normalisation="unbiased")
    assert unbiased == pytest.approx([2.474174] + [-0.353453] * 7, abs=1e-6)


def test_a_large_offset_costs_no_digits():
    small = [0.0, 0.001, 0.002, 0.005, 0.0, 0.003, 0.001, 0.004]
    shifted = column([1000.0 + value for value in small], min_std=0.0)
    assert shifted == pytest.approx(column(small, min_std=0.0), abs=1e-8)
    assert column([1000.0 + value for value in small]) == [0.0] * 8  # below 0.02


@pytest.mark.parametrize("normalisation", ["population", "unbiased"])
@pytest.mark.parametrize("min_std", [0.0, 0.02])
def test_a_group_of_one_and_a_constant_group_get_exactly_zero(min_std, normalisation):
    assert column([0.7], min_std=min_std, normalisation=normalisation) == [0.0]
    assert column([0.1] * 7, min_std=min_std, normalisation=normalisation) == [0.0] * 7


def test_each_position_has_its_own_baseline():
    result = position_advantages([[1.0, 0.0, 0.3], [0.0, 1.0, 0.3]])
    assert result.advantages == [[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0]]
    assert (result.num_groups, result.num_zero_variance) == (3, 1)


def test_unscorable_returns_leave_the_baseline():
    with_gap = position_advantages([[1.0], [None], [0.0], [0.4]]).advantages
    without = position_advantages([[1.0], [0.0], [0.4]]).advantages
    assert [with_gap[0], with_gap[2], with_gap[3]] == without
    assert with_gap[1] == [0.0]
    lonely = position_advantages([[1.0], [None]])
    assert (lonely.advantages, lonely.num_groups, lonely.num_zero_variance) == ([[0.0], [0.0]], 1, 1)
    empty = position_advantages([[None], [None]])
    assert (empty.advantages, empty.num_groups, empty.num_zero_variance) == ([[0.0], [0.0]], 0, 0)


def test_a_trajectory_may_end_early():
    assert position_advantages([[1.0, 5.0], [0.0]]).advantages == [[1.0, 0.0], [-1.0]]
    assert position_advantages([]).advantages == []
    assert position_advantages([[], []]).advantages == [[], []]


def test_clipping():
    returns = [0.0] * 15 + [1.0]  # unclipped sqrt(15) = 3.87
    assert column(returns)[-1] == 3.0
    assert column(returns, clip=10.0)[-1] == pytest.approx(math.sqrt(15))
    assert column([-value for value in returns])[-1] == -3.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_return_that_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match="trajectory 1 at position 0"):
        position_advantages([[0.0], [value]])


def test_the_threshold_itself_is_kept():
    assert normalise_group([0.0, 0.5], min_std=0.25) == [-1.0, 1.0]
    assert normalise_group([0.0, 0.5], min_std=0.2500001) is None
