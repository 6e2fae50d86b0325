"""Every value of the golden file, made by an independent implementation of specification §4 and §5, to 1e-9."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from writer_rl.configs.schema import RewardConfig
from writer_rl.rewards.compose import segment_returns
from writer_rl.rewards.similarity import similarity
from writer_rl.rewards.update_chain import memory_reward
from writer_rl.trainer.advantages import position_advantages
from writer_rl.trainer.score import parse_cases, score_cases

TOLERANCE = 1e-9
RULES = ("paper", "fixed")


@pytest.fixture(scope="module")
def golden(shared_dir: Path) -> dict[str, Any]:
    path = shared_dir / "golden" / "rewards.json"
    if not path.is_file():
        pytest.skip("golden/rewards.json is not in ../shared")
    return json.loads(path.read_text(encoding="utf-8"))


def close(value: Any) -> Any:
    return pytest.approx(value, abs=TOLERANCE, rel=0)


@pytest.mark.parametrize("rules", RULES)
def test_similarity(golden, rules):
    assert len(golden["similarity"]) == 240
    values = [similarity(pair["a"], pair["b"], rules) for pair in golden["similarity"]]
    assert values == close([pair[rules] for pair in golden["similarity"]])


@pytest.mark.parametrize("rules", RULES)
def test_memory(golden, rules):
    assert len(golden["memory"]) == 60
    for number, case in enumerate(golden["memory"]):
        predicted, reference = (
            [SimpleNamespace(**record) for record in case[side]] for side in ("predicted", "reference")
        )
        reward, expected = memory_reward(predicted, reference, rules), case[rules]
        for name in ("memory", "phi", "macro", "worst"):
            assert getattr(reward, name) == close(expected[name]), (number, name)
        assert dict(reward.buckets) == close(expected["buckets"]), number
        if expected["chain"] is None:
            assert reward.chain is None, number
        else:
            assert reward.chain == close(expected["chain"]), number


@pytest.mark.parametrize("rules", RULES)
def test_score_command_agrees(golden, rules):
    scores = score_cases(parse_cases(json.dumps(golden), "golden"), rules)
    for score, case in zip(scores, golden["memory"], strict=True):
        assert set(score) == {"phi", "macro", "worst", "chain", "memory"}
        for name, value in score.items():
            assert value == (None if case[rules][name] is None else close(case[rules][name]))


def test_advantages(golden):
    assert len(golden["advantages"]) == 30
    for group in golden["advantages"]:
        result = position_advantages([[reward] for reward in group["rewards"]])
        assert [row[0] for row in result.advantages] == close(group["advantages"])


def test_returns(golden):
    assert len(golden["returns"]) == 30
    for case in golden["returns"]:
        settings = RewardConfig(gamma=case["gamma"])
        returns = segment_returns(case["valid"], case["memory"], case["penalty"], case["qa_gain"], settings)
        assert returns == close(case["returns"])
