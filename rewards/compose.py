"""From the rewards of a trajectory to one return per segment.

Source: specification §4, Return; §8 for the potential-based memory term.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from writer_rl.configs.schema import RewardConfig
from writer_rl.rewards.update_chain import MemoryReward
from writer_rl.rewards.validity import ValidityReward


@dataclass(frozen=True, slots=True)
class StepReward:
    """Rewards of one Writer call: of its completion and of the memory it left behind."""

    valid: ValidityReward
    memory: MemoryReward


@dataclass(frozen=True, slots=True)
class ScoredTrajectory:
    """A trajectory with everything the advantages need.

    Args:
        dialogue_id: Dialogue written about.
        index: 0-based place in its group.
        steps: One entry per segment, in order.
        qa_gain: R_QA of the finished trajectory before clipping; None where the group is scored without QA.
        returns: One return per step.
    """

    dialogue_id: str
    index: int
    steps: tuple[StepReward, ...]
    qa_gain: float | None
    returns: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ReturnWeights:
    """Factors of validity, memory and QA gain in a return; the penalty always counts in full."""

    valid: float
    memory: float
    qa: float


def speakermem_weights(settings: RewardConfig, with_qa: bool) -> ReturnWeights:
    """Weights of SpeakerMem-R1: 0.20 / 0.45 / 0.35, or 0.25 / 0.75 without QA, unless the configuration says otherwise.

    Source: specification §4, Return.
    """
    if with_qa:
        return ReturnWeights(settings.valid_weight, settings.memory_weight, settings.qa_weight)
    return ReturnWeights(settings.valid_weight_without_qa, settings.memory_weight_without_qa, 0.0)


PRESETS: Mapping[str, Callable[[RewardConfig, bool], ReturnWeights]] = MappingProxyType(
    {
        "speakermem": speakermem_weights,
    }
)


def segment_returns(
    valid: Sequence[float],
    memory: Sequence[float],
    penalty: Sequence[float],
    qa_gain: float | None,
    settings: RewardConfig,
) -> list[float]:
    """Return of every segment of one trajectory.

    Args:
        valid: R_valid per segment, 0 to 1.
        memory: R_mem per segment, 0 to 1.
        penalty: P per segment, -0.60 to 0.
        qa_gain: R_QA of the trajectory, clipped to [-1, 1] here; None scores it without QA.
        settings: Preset, weights, gamma, and the form of the memory term: `state` takes R_mem(t), `potential`
            R_mem(t) - gamma · R_mem(t-1) with R_mem(-1) = 0.

    Returns:
        r(t) = w_valid · R_valid(t) + w_memory · R_mem(t) + P(t) + w_qa · gamma^(T-1-t) · R_QA.

    Raises:
        ValueError: The lists differ in length, or a number is not finite.

    Source: specification §4, Return; §8, potential-based memory reward.

    Example:
        Two segments, valid 1, memory 0.5, no penalty, QA gain 0.4: the last return is 0.20 + 0.225 + 0.14 = 0.565, the
        first has 0.95 · 0.14 = 0.133 in place of 0.14: 0.558.
    """
    if not len(valid) == len(memory) == len(penalty):
        raise ValueError(
            f"valid, memory and penalty have {len(valid)}, {len(memory)} and {len(penalty)} segments; "
            "give one number each per segment"
        )
    if not all(map(math.isfinite, (*valid, *memory, *penalty, qa_gain or 0.0))):
        raise ValueError("a reward is not finite; leave the trajectory out of its group instead of scoring it")
    weights = PRESETS[settings.preset](settings, qa_gain is not None)
    gain = 0.0 if qa_gain is None else min(1.0, max(-1.0, qa_gain))
    num_segments = len(valid)
    before = [0.0, *memory[:-1]] if settings.memory_return == "potential" else [0.0] * num_segments
    return [
        weights.valid * valid[t]
        + weights.memory * (memory[t] - settings.gamma * before[t])
        + penalty[t]
        + weights.qa * settings.gamma ** (num_segments - 1 - t) * gain
        for t in range(num_segments)
    ]


def score_trajectory(
    dialogue_id: str, index: int, steps: Sequence[StepReward], qa_gain: float | None, settings: RewardConfig
) -> ScoredTrajectory:
    """Join the step rewards and the QA gain of one trajectory into its returns.

    Args:
        dialogue_id: Dialogue written about.
        index: 0-based place in its group.
        steps: Rewards per segment, in order.
        qa_gain: R_QA of the trajectory or None.
        settings: Weights and form of the return.
    """
    returns = segment_returns(
        [step.valid.total for step in steps],
        [step.memory.memory for step in steps],
        [step.valid.penalty for step in steps],
        qa_gain,
        settings,
    )
    return ScoredTrajectory(dialogue_id, index, tuple(steps), qa_gain, tuple(returns))
