"""Group-relative advantages, one baseline per segment position.

Source: specification §5, position-wise advantage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

UNBIASED_EPSILON = 1e-4

Normalisation = Literal["population", "unbiased"]


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Advantages of one group.

    Args:
        advantages: Trajectories × positions, shaped like the returns; 0 where nothing is learned.
        num_groups: Positions with at least one scorable return.
        num_zero_variance: Positions of those dropped because their returns hardly differ (a single return included).
    """

    advantages: list[list[float]]
    num_groups: int
    num_zero_variance: int


def normalise_group(
    returns: Sequence[float], min_std: float = 0.02, clip: float = 3.0, normalisation: Normalisation = "population"
) -> list[float] | None:
    """Advantages of the scorable returns at one position, or None if the position is dropped.

    Mean and spread come from two passes with exact sums, so that a large common offset costs no digits.

    Args:
        returns: Finite numbers.
        min_std: A smaller spread drops the position.
        clip: Largest absolute advantage.
        normalisation: `population` divides by the population standard deviation and adds no epsilon (the
            specification); `unbiased` divides by the sample standard deviation + 1e-4 (as other trainers do, for
            comparison).

    Source: specification §5.

    Example:
        [1, 0, 0, 0, 0, 0, 0, 0]: mean 1/8, population variance 7/64, so 2.6457513 once and -0.3779645 seven times.
    """
    if len(returns) < 2 or max(returns) == min(returns):
        return None
    mean = math.fsum(returns) / len(returns)
    divisor = len(returns) if normalisation == "population" else len(returns) - 1
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in returns) / divisor)
    if std < min_std:
        return None
    scale = std if normalisation == "population" else std + UNBIASED_EPSILON
    return [min(clip, max(-clip, (value - mean) / scale)) for value in returns]


def position_advantages(
    returns_by_trajectory: Sequence[Sequence[float | None]],
    min_std: float = 0.02,
    clip: float = 3.0,
    normalisation: Normalisation = "population",
) -> GroupAdvantages:
    """Compare the trajectories of a group segment by segment.

    Args:
        returns_by_trajectory: G lists of returns by position; None marks an unscorable one, which leaves the baseline
            and gets 0. A trajectory that ended early may be shorter.
        min_std: Positions with a smaller standard deviation get 0 throughout.
        clip: Largest absolute advantage.
        normalisation: See `normalise_group`.

    Returns:
        Advantages of the same shape, and how many positions were compared and dropped.

    Raises:
        ValueError: A return is NaN or infinite.

    Source: specification §5.

    Example:
        >>> position_advantages([[1.0, 0.0], [0.0, 1.0], [None, 0.5]]).advantages
        [[1.0, -1.224744871391589], [-1.0, 1.224744871391589], [0.0, 0.0]]
    """
    advantages = [[0.0] * len(returns) for returns in returns_by_trajectory]
    num_groups = num_zero_variance = 0
    for position in range(max(map(len, returns_by_trajectory), default=0)):
        scorable: list[tuple[int, float]] = []
        for trajectory, returns in enumerate(returns_by_trajectory):
            value = returns[position] if position < len(returns) else None
            if value is None:
                continue
            if not math.isfinite(value):
                raise ValueError(
                    f"the return of trajectory {trajectory} at position {position} is {value}; "
                    "pass None for an unscorable one"
                )
            scorable.append((trajectory, value))
        if not scorable:
            continue
        num_groups += 1
        normalised = normalise_group([value for _, value in scorable], min_std, clip, normalisation)
        if normalised is None:
            num_zero_variance += 1
            continue
        for (trajectory, _), advantage in zip(scorable, normalised, strict=True):
            advantages[trajectory][position] = advantage
    return GroupAdvantages(advantages, num_groups, num_zero_variance)
