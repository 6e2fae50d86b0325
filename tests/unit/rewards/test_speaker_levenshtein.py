from __future__ import annotations

import itertools
import random

import pytest

from writer_rl.data.memory import Record
from writer_rl.rewards.speaker_levenshtein import matched_weight, speaker_levenshtein

RULES = ["paper", "fixed"]


def record(entry_id, content="likes tea", owner="Ana", source="Ana", layer="per_speaker_core", newer=""):
    return Record(entry_id, content, owner, source, layer, superseded_by=newer)


@pytest.mark.parametrize("rules", RULES)
def test_two_empty_memories_agree(rules):
    score = speaker_levenshtein([], [], rules)
    assert (score.phi, score.macro, score.worst, dict(score.buckets)) == (1.0, 1.0, 1.0, {})


@pytest.mark.parametrize("rules", RULES)
def test_an_owner_on_one_side_only_scores_zero(rules):
    for predicted, reference in (([record("1")], []), ([], [record("1")])):
        score = speaker_levenshtein(predicted, reference, rules)
        assert (score.phi, dict(score.buckets)) == (0.0, {"Ana": 0.0})


@pytest.mark.parametrize("change", [{"owner": "Ben"}, {"source": "Ben"}, {"layer": "per_speaker_profile"}])
def test_owner_source_and_layer_must_be_equal(change):
    assert speaker_levenshtein([record("1", **change)], [record("1")], "fixed").macro == 0.0


def test_superseded_records_count():
    reference = [record("1", newer="2"), record("2", "prefers coffee now")]
    assert speaker_levenshtein(reference[1:], reference, "fixed").macro == pytest.approx(2 / 3)


def test_ids_play_no_part_and_group_is_one_owner():
    predicted = [
        record("x", owner="GROUP", layer="group_insight"),
        record("y", "meets on Monday", "GROUP", "Ben", "group_interaction"),
    ]
    reference = [
        record("1", "meets on Monday", "GROUP", "Ben", "group_interaction"),
        record("2", owner="GROUP", layer="group_insight"),
    ]
    assert dict(speaker_levenshtein(predicted, reference, "fixed").buckets) == {"GROUP": 1.0}


def test_copies_of_one_record_match_once():
    assert speaker_levenshtein([record(str(i)) for i in range(9)], [record("1")], "fixed").macro == pytest.approx(0.2)


def test_matching_against_every_permutation():
    rng = random.Random(5)
    for _ in range(300):
        rows, columns = rng.randint(1, 4), rng.randint(1, 4)
        weights = [[rng.choice([0.0, 0.0, 0.5, 0.9, rng.random()]) for _ in range(columns)] for _ in range(rows)]
        padded = [row + [0.0] * 4 for row in weights] + [[0.0] * (columns + 4)] * (4 - rows)
        best = max(
            sum(padded[i][pick] for i, pick in enumerate(picks))
            for picks in itertools.permutations(range(columns + 4), 4)
        )
        assert matched_weight(weights) == pytest.approx(best, abs=1e-12)


def test_small_and_large_matchings_agree_with_scipy():
    optimize = pytest.importorskip("scipy.optimize")
    rng = random.Random(6)
    for _ in range(300):
        weights = [
            [rng.choice([0.0, 0.7, rng.random()]) for _ in range(rng.choice([3, 8]))]
            for _ in range(rng.choice([2, 6, 9]))
        ]
        width = min(map(len, weights))
        weights = [row[:width] for row in weights]
        picked = optimize.linear_sum_assignment(weights, maximize=True)
        assert matched_weight(weights) == pytest.approx(
            sum(weights[i][j] for i, j in zip(*picked, strict=True)), abs=1e-12
        )


def test_nothing_to_match():
    assert matched_weight([]) == 0.0
    assert matched_weight([[]]) == 0.0
    assert matched_weight([[0.0, 0.0]]) == 0.0
