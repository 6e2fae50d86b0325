"""Numbers worked out by hand; each derivation stands beside its test."""

from __future__ import annotations

import json

import pytest

from writer_rl.configs.schema import RewardConfig
from writer_rl.data.actions import parse_completion, validate
from writer_rl.data.memory import MemoryState, Record, Roster
from writer_rl.rewards.compose import segment_returns
from writer_rl.rewards.similarity import similarity
from writer_rl.rewards.speaker_levenshtein import speaker_levenshtein
from writer_rl.rewards.update_chain import memory_reward, update_chain
from writer_rl.rewards.validity import validity_reward
from writer_rl.trainer.advantages import position_advantages


def record(entry_id: str, content: str, owner: str = "Ana", source: str = "Ana", newer: str = "") -> Record:
    return Record(entry_id, content, owner, source, "per_speaker_core", superseded_by=newer)


def exactly(value):
    return pytest.approx(value, abs=1e-12, rel=0)


def test_similarity_of_a_shortened_sentence():
    # tokens {likes, tea} and {likes, green, tea}: F1 = 2*2 / (2+3) = 4/5
    # "likes tea" has 9 characters, "likes green tea" 15; blocks "likes " (6) and "tea" (3): 2*9 / 24 = 3/4
    # 0.60 * 4/5 + 0.40 * 3/4 = 0.48 + 0.30
    for rules in ("paper", "fixed"):
        assert similarity("likes tea", "Likes green tea!", rules) == exactly(0.78)


def test_similarity_counts_token_sets_but_joined_repeats():
    # sets {a} and {a}: F1 = 1; strings "a a" and "a": 2*1 / 4 = 1/2; 0.60 + 0.20
    assert similarity("a a", "a", "fixed") == exactly(0.80)


def test_similarity_of_mixed_scripts_loses_the_order_in_paper_only():
    # paper: both sides have the tokens x, 中 in this order (Latin first): 1
    # fixed: "x 中" against "中 x": F1 = 1; one common block of one character, then nothing left on both sides: 2*1 / 6
    # = 1/3 (the longest blocks have one character each; whichever is taken, the others lie crosswise)
    assert similarity("x中", "中x", "paper") == exactly(1.0)
    assert similarity("x中", "中x", "fixed") == exactly(0.60 + 0.40 / 3)


def test_similarity_of_long_twins_under_the_junk_heuristic():
    # "ab" 120 times, joined: 120*2 + 119 = 359 characters, so from 200 on every character above 1 % counts as popular:
    # all of them. Without any usable character the ratio is 0 as soon as the strings differ: 0.60 * F1 alone.
    # a: "c" in front. Sets {c, ab} and {ab}: F1 = 2*1/3. fixed: "c " + 359 characters against 359: 2*359 / 720.
    long = " ".join(["ab"] * 120)
    assert similarity("c " + long, long, "paper") == exactly(0.60 * 2 / 3)
    assert similarity("c " + long, long, "fixed") == exactly(0.60 * 2 / 3 + 0.40 * 718 / 720)


def test_worst_owner_weighs_a_fifth():
    # Ana: equal, F = 1. Ben: reference only, F = 0. Cleo: 1 of 2 predicted records matches 1 of 1: 2*1 / 3 = 2/3.
    # macro (1 + 0 + 2/3) / 3 = 5/9, worst 0, phi 0.80 * 5/9 = 4/9
    predicted = [record("1", "runs daily"), record("2", "plays chess", "Cleo"), record("3", "owns two cats", "Cleo")]
    reference = [record("1", "runs daily"), record("2", "sings", "Ben"), record("3", "plays chess", "Cleo")]
    score = speaker_levenshtein(predicted, reference, "fixed")
    assert score.buckets == {"Ana": 1.0, "Ben": 0.0, "Cleo": exactly(2 / 3)}
    assert (score.macro, score.worst, score.phi) == (exactly(5 / 9), 0.0, exactly(4 / 9))


def test_matching_is_global_not_greedy():
    # a1 = "p q r s", a2 = "p q r s u"; b1 = "p q r s t", b2 = "p q r".
    # sets: a1-b1 F1 = 8/9, a1-b2 6/7, a2-b1 8/10, a2-b2 6/8. Strings (7, 9, 9, 5 characters): a1-b1 14/16; a1-b2 10/12;
    # a2-b1: "p q r s " (8 characters) 16/18; a2-b2 10/14.
    # k: a1-b1 .6*8/9+.4*7/8 = .883333; a1-b2 .6*6/7+.4*5/6 = .847619; a2-b1 .48+.4*8/9 = .835556; a2-b2 .45+.4*5/7 =
    # .735714 greedy: .883333 + .735714 = 1.619048; crosswise: .847619 + .835556 = 1.683175. F = 2*1.683175 / 4
    predicted = [record("1", "p q r s"), record("2", "p q r s u")]
    reference = [record("1", "p q r s t"), record("2", "p q r")]
    crosswise = (0.6 * 6 / 7 + 0.4 * 5 / 6) + (0.48 + 0.4 * 8 / 9)
    assert crosswise == pytest.approx(1.683175, abs=1e-6)
    assert speaker_levenshtein(predicted, reference, "fixed").macro == exactly(crosswise / 2)


def test_chain_and_its_share_of_the_memory_reward():
    # one predicted edge equals one of two reference edges: 2*1 / (1+2) = 2/3
    # state: 2 of 2 predicted match 2 of 4: F = 2*2 / 6 = 2/3 = phi (one owner). memory 0.80 * 2/3 + 0.20 * 2/3 = 2/3
    first = [record("1", "lives in Oslo", newer="2"), record("2", "lives in Rome")]
    second = [record("3", "owns a dog", newer="4"), record("4", "gave up every pet")]
    reward = memory_reward(first, first + second, "fixed")
    assert (reward.chain, reward.phi, reward.memory) == (exactly(2 / 3), exactly(2 / 3), exactly(2 / 3))


def test_an_edge_is_kept_at_exactly_half():
    # equal old contents (1), new contents without a common character (0): 0.5 * 1 + 0.5 * 0 = 0.50, kept: 2*0.5 / 2
    mine = [record("1", "lives in Oslo", newer="2"), record("2", "bbb")]
    theirs = [record("8", "lives in Oslo", newer="9"), record("9", "ccc")]
    assert update_chain(mine, theirs, "fixed") == exactly(0.5)


def test_a_correct_update_where_the_teacher_made_none():
    # paper: predicted edge, no reference edge: chain 0. phi: 1 of 2 predicted records matches 1 of 1: 2/3; memory 0.80
    # * 2/3 fixed: term dropped, memory 2/3
    mine = [record("1", "lives in Oslo", newer="2"), record("2", "moved away")]
    theirs = [record("1", "lives in Oslo")]
    assert memory_reward(mine, theirs, "paper").memory == exactly(0.8 * 2 / 3)
    assert memory_reward(mine, theirs, "fixed").memory == exactly(2 / 3)


def test_validity_of_a_list_that_runs_on():
    # four actions: ADD a, ADD with an unknown layer, ADD a again, UPDATE of an unknown id.
    # json 1; schema 3/4; dup 3/4; stop 0 (the last action is not novel): 0.25 + 0.2625 + 0.1875 = 0.70
    # penalty: validation errors -0.15, 4 > budget 3 -0.10
    def add(layer: str, content: str) -> dict[str, str]:
        return {"action": "ADD", "owner": "Ana", "source": "Ana", "layer": layer, "kind": "fact", "content": content}

    actions = [add("per_speaker_core", "rides"), add("core", "sings"), add("per_speaker_core", "Rides. ")]
    text = json.dumps({"actions": [*actions, {"action": "UPDATE", "entry_id": "m9", "content": "x"}]})
    memory = MemoryState(roster=Roster(("Ana",)))
    reward = validity_reward(validate(parse_completion(text), memory, "fixed"), memory, 3, hit_limit=False)
    assert (reward.json, reward.schema, reward.dup, reward.stop) == (1.0, 0.75, 0.75, 0.0)
    assert (reward.total, reward.penalty) == (exactly(0.70), exactly(-0.25))


def test_returns_discount_the_gain_backwards():
    # T = 3, R_QA = 2 clipped to 1: shares 0.35 * (0.9025, 0.95, 1); rest 0.20 * 1 + 0.45 * 0.4 - 0.15 = 0.23
    returns = segment_returns([1.0] * 3, [0.4] * 3, [-0.15] * 3, 2.0, RewardConfig())
    assert returns == exactly([0.23 + 0.315875, 0.23 + 0.3325, 0.23 + 0.35])
    # without QA: 0.25 + 0.75 * 0.4 - 0.15
    assert segment_returns([1.0], [0.4], [-0.15], None, RewardConfig()) == exactly([0.40])


def test_advantage_of_one_success_among_eight():
    # mean 1/8; population variance 1/8 * 7/8 = 7/64, sigma = sqrt(7)/8: (7/8) / (sqrt(7)/8) = sqrt(7),
    # -(1/8)/(sqrt(7)/8) = -1/sqrt(7)
    result = position_advantages([[1.0]] + [[0.0]] * 7)
    assert [row[0] for row in result.advantages] == exactly([7**0.5] + [-(7**-0.5)] * 7)
