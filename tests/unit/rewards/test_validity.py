from __future__ import annotations

import json

import pytest

from writer_rl.data.actions import parse_completion, validate
from writer_rl.data.memory import MemoryState, Record, Roster
from writer_rl.rewards.validity import action_key, validity_reward

NOOP = {"action": "NOOP"}
MEMORY = MemoryState(
    records=(
        Record("m1", "Lives in Oslo", "Ana", "Ana", "per_speaker_core", superseded_by="m2"),
        Record("m2", "Lives in Rome", "Ana", "Ana", "per_speaker_core"),
    ),
    roster=Roster(("Ana", "Ben"), {"Annie": "Ana"}),
)


def add(content="runs", owner="Ana", source="Ana", layer="per_speaker_core", kind="fact"):
    return {"action": "ADD", "owner": owner, "source": source, "layer": layer, "kind": kind, "content": content}


def update(entry_id="m2", content="Lives in Bari"):
    return {"action": "UPDATE", "entry_id": entry_id, "content": content}


def score(actions, budget=8, hit_limit=False, rules="fixed"):
    text = actions if isinstance(actions, str) else json.dumps({"actions": actions})
    return validity_reward(validate(parse_completion(text), MEMORY, rules), MEMORY, budget, hit_limit, rules)


def parts(reward):
    return (reward.json, reward.schema, reward.dup, reward.stop)


@pytest.mark.parametrize("actions", [[NOOP], [add()], [update()], [update(), add(), add("sings")]])
def test_a_clean_list_earns_everything(actions):
    reward = score(actions)
    assert parts(reward) == (1, 1, 1, 1)
    assert reward.total == pytest.approx(1.0)
    assert reward.penalty == 0.0


@pytest.mark.parametrize(
    "text", ["", "```json\n{}\n```", '{"actions":[{"action":"NOOP"}', '{"actions":[{"action":"NOOP"}]} done']
)
def test_invalid_json_earns_nothing_and_costs_both_penalties(text):
    reward = score(text)
    assert (parts(reward), reward.total, reward.penalty) == ((0, 0, 0, 0), 0.0, pytest.approx(-0.40))
    assert score(text, hit_limit=True).penalty == pytest.approx(-0.50)


def test_an_empty_list_earns_nothing_but_is_json():
    reward = score([])
    assert (reward.total, reward.penalty) == (0.0, pytest.approx(-0.15))


def test_schema_is_blind_to_ids_duplicates_and_company():
    reward = score([update("m99"), add(), add(), NOOP])
    assert reward.schema == 1.0
    assert reward.penalty == pytest.approx(-0.15)


@pytest.mark.parametrize(
    "broken",
    ["text", 3, None, [], {"action": "DELETE"}, add(layer="core"), add(content=" "), {**update(), "owner": "x"}],
)
def test_schema_counts_broken_shapes(broken):
    assert score([add("sings"), broken]).schema == 0.5


def test_dup_counts_normalised_keys():
    assert score([add("runs"), add(" Runs. ")]).dup == 0.5
    assert score([update(), update("m2", "lives  in bari")]).dup == 0.5
    assert score([NOOP, NOOP, NOOP]).dup == pytest.approx(1 / 3)
    assert score([add(), add(kind="stance")]).dup == 0.5
    assert score(["a", "a", "b", {}]).dup == 0.75
    assert score([add(), add(source="Ben")]).dup == 1.0


def test_fixed_resolves_names_before_comparing():
    twins = [add(), add(owner="annie", source=" ANA ")]
    assert score(twins, rules="fixed").dup == 0.5
    assert score(twins, rules="paper").dup == 1.0


@pytest.mark.parametrize(
    ("actions", "stop"),
    [
        ([add(), add()], 0),
        ([add(), add("sings")], 1),
        ([add("lives in ROME")], 0),  # in memory already
        ([add("Lives in Oslo")], 0),  # history counts as memory
        ([add("Lives in Oslo", source="Ben")], 1),
        ([update("m1")], 0),  # not a head
        ([update("m2", "lives in rome.")], 0),  # changes nothing
        ([update("m9")], 0),
        ([add(), update()], 1),
        ([update(), update()], 0),
        ([NOOP, NOOP], 0),
        ([add(), NOOP], 0),
        ([NOOP, add()], 1),
        ([add(), "text"], 0),
        ([{"action": "NOOP", "why": "quiet"}], 1),
    ],
)
def test_stop(actions, stop):
    assert score(actions).stop == stop


def test_penalties_add_up():
    assert score([add(), add("sings")], budget=2).penalty == 0.0
    assert score([add(), add("sings")], budget=1).penalty == pytest.approx(-0.10)
    assert score([add()], hit_limit=True).penalty == pytest.approx(-0.10)
    assert score([add(), add()], budget=1, hit_limit=True).penalty == pytest.approx(-0.35)


def test_odd_values_have_keys_too():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    odd = [
        deep,
        {"action": ["ADD"]},
        {"action": "ADD", "owner": 3, "content": deep},
        {"action": "UPDATE"},
        "\ud800",
        float("inf"),
    ]
    assert all(isinstance(action_key(item, MEMORY, "fixed"), tuple) for item in odd)
