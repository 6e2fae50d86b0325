from __future__ import annotations

import math

import pytest

from writer_rl.configs.schema import RewardConfig
from writer_rl.rewards.compose import PRESETS, ReturnWeights, StepReward, score_trajectory, segment_returns
from writer_rl.rewards.update_chain import MemoryReward
from writer_rl.rewards.validity import ValidityReward


def test_presets_give_the_weights_of_the_configuration():
    assert set(PRESETS) == {"speakermem"}
    assert PRESETS["speakermem"](RewardConfig(), True) == ReturnWeights(0.20, 0.45, 0.35)
    assert PRESETS["speakermem"](RewardConfig(qa_weight=0.5), False) == ReturnWeights(0.25, 0.75, 0.0)


@pytest.mark.parametrize(("gain", "share"), [(0.4, 0.14), (1.7, 0.35), (-9.0, -0.35), (0.0, 0.0)])
def test_the_gain_is_clipped(gain, share):
    assert segment_returns([0.0], [0.0], [0.0], gain, RewardConfig()) == pytest.approx([share])


def test_a_gain_of_zero_is_not_a_missing_gain():
    assert segment_returns([1.0], [1.0], [0.0], 0.0, RewardConfig()) == pytest.approx([0.65])
    assert segment_returns([1.0], [1.0], [0.0], None, RewardConfig()) == pytest.approx([1.0])


def test_the_potential_form_telescopes():
    settings = RewardConfig(memory_return="potential", gamma=0.9)
    memory = [0.2, 0.5, 0.4]
    returns = segment_returns([0.0] * 3, memory, [0.0] * 3, None, settings)
    assert returns == pytest.approx([0.75 * 0.2, 0.75 * (0.5 - 0.18), 0.75 * (0.4 - 0.45)])
    # weighted by gamma^(T-1-t) they add up to the last memory reward alone
    assert sum(0.9 ** (2 - t) * value for t, value in enumerate(returns)) == pytest.approx(0.75 * 0.4)


def test_no_segments_no_returns():
    for form in ("state", "potential"):
        assert segment_returns([], [], [], 0.3, RewardConfig(memory_return=form)) == []


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="2, 1 and 1 segments"):
        segment_returns([1.0, 1.0], [1.0], [0.0], None, RewardConfig())
    with pytest.raises(ValueError, match="not finite"):
        segment_returns([1.0], [1.0], [0.0], math.nan, RewardConfig())


def test_a_scored_trajectory_joins_its_steps():
    step = StepReward(ValidityReward(1, 1, 1, 1, 1.0, -0.1), MemoryReward(0.5, 0.5, 0.5, 0.5, {}, None))
    scored = score_trajectory("d1", 3, [step, step], 0.4, RewardConfig())
    assert (scored.dialogue_id, scored.index, scored.steps, scored.qa_gain) == ("d1", 3, (step, step), 0.4)
    assert scored.returns == pytest.approx((0.2 + 0.225 - 0.1 + 0.133, 0.2 + 0.225 - 0.1 + 0.14))
