from __future__ import annotations

import pytest

from writer_rl.data.memory import Record
from writer_rl.rewards.update_chain import memory_reward, update_chain, update_edges


def edge(old="lives in Oslo", new="lives in Rome", owner="Ana", source="Ana", layer="per_speaker_core", prefix=""):
    return [
        Record(prefix + "1", old, owner, source, layer, superseded_by=prefix + "2"),
        Record(prefix + "2", new, owner, source, layer),
    ]


def test_edges_follow_the_pointer_and_pass_over_a_missing_end():
    chain = [*edge(), Record("3", "x", "Ana", "Ana", "per_speaker_core", superseded_by="gone")]
    assert [(old.entry_id, new.entry_id) for old, new in update_edges(chain)] == [("1", "2")]


@pytest.mark.parametrize(
    ("predicted", "reference", "paper", "fixed"),
    [([], [], 1.0, None), (edge(), [], 0.0, None), ([], edge(), 0.0, 0.0), (edge(), edge(), 1.0, 1.0)],
)
def test_empty_sides(predicted, reference, paper, fixed):
    assert update_chain(predicted, reference, "paper") == paper
    assert update_chain(predicted, reference, "fixed") == fixed


def test_source_matters_in_fixed_only():
    other = edge(source="Ben")
    assert update_chain(other, edge(), "paper") == 1.0
    assert update_chain(other, edge(), "fixed") == 0.0


@pytest.mark.parametrize("change", [{"owner": "Ben"}, {"layer": "per_speaker_profile"}])
@pytest.mark.parametrize("rules", ["paper", "fixed"])
def test_owner_and_layer_matter_always(rules, change):
    assert update_chain(edge(**change), edge(), rules) == 0.0


def test_a_reversed_edge_is_not_the_same_edge():
    assert update_chain(edge("aaa", "bbb"), edge("bbb", "aaa"), "fixed") == 0.0


def test_a_dropped_chain_leaves_phi():
    reward = memory_reward(edge()[1:], edge()[1:], "fixed")
    assert (reward.chain, reward.memory, reward.phi) == (None, 1.0, 1.0)


def test_one_shot_iterables_are_enough():
    assert memory_reward(iter(edge()), iter(edge()), "fixed") == memory_reward(edge(), edge(), "fixed")


def test_a_longer_chain_is_a_list_of_edges():
    three = [
        Record("1", "lives in Oslo", "Ana", "Ana", "per_speaker_core", superseded_by="2"),
        Record("2", "lives in Rome", "Ana", "Ana", "per_speaker_core", superseded_by="3"),
        Record("3", "settled down at the coast", "Ana", "Ana", "per_speaker_core"),
    ]
    assert update_chain(edge(), three, "fixed") == pytest.approx(2 / 3)


def test_pointers_that_run_in_a_ring_end():
    ring = [
        Record("1", "x", "Ana", "Ana", "l", superseded_by="2"),
        Record("2", "y", "Ana", "Ana", "l", superseded_by="1"),
    ]
    assert memory_reward(ring, ring, "fixed").memory == 1.0
