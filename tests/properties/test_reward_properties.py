"""Laws that hold for every memory, every completion and every group."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from writer_rl.configs.schema import RewardConfig
from writer_rl.data.actions import LAYERS, parse_completion, validate
from writer_rl.data.memory import MemoryState, Record, Roster
from writer_rl.rewards.compose import segment_returns
from writer_rl.rewards.similarity import gated_similarity, similarity, token_f1, tokens
from writer_rl.rewards.update_chain import memory_reward
from writer_rl.rewards.validity import validity_reward
from writer_rl.trainer.advantages import position_advantages

RULES = st.sampled_from(["paper", "fixed"])
WORDS = st.sampled_from(["lives", "in", "Oslo", "Rome", "tea", "likes", "no", "北京", "住在", "🎉", "!!", "é"])
CONTENTS = st.one_of(
    st.lists(WORDS, max_size=8).map(" ".join),
    st.lists(WORDS, min_size=1, max_size=4).map(lambda words: " ".join(words * 30)),  # over 200 characters
    st.text(max_size=30),
)
UNIT = st.floats(0, 1)


@st.composite
def memories(draw) -> list[Record]:
    size = draw(st.integers(0, 7))
    records = []
    for number in range(size):
        newer = draw(st.sampled_from(["", *map(str, range(number + 1, size))]))
        owner, source = draw(st.sampled_from(["Ana", "Ben", "GROUP"])), draw(st.sampled_from(["Ana", "Ben"]))
        layer = draw(st.sampled_from(LAYERS[:2]))
        records.append(Record(str(number), draw(CONTENTS), owner, source, layer, superseded_by=newer))
    return records


def has_tokens(records: list[Record], rules: str) -> bool:
    return all(tokens(record.content, rules) for record in records)


@given(CONTENTS, CONTENTS, RULES)
def test_similarity_is_bounded_and_one_for_equal_tokens(a, b, rules):
    value = similarity(a, b, rules)
    assert 0.0 <= value <= 1.0
    assert gated_similarity(a, b, rules) == (value if value >= 0.5 else 0.0)
    assert similarity(a, a, rules) == (1.0 if tokens(a, rules) else 0.0)
    sets = frozenset(tokens(a, rules)), frozenset(tokens(b, rules))
    assert token_f1(*sets) == token_f1(*reversed(sets))


@given(CONTENTS)
def test_fixed_reads_through_case_width_and_spacing(text):
    assert tokens(f"  {text.upper().lower()} ?", "fixed") == tokens(text.upper().lower(), "fixed")


@settings(max_examples=60, deadline=None)
@given(memories(), memories(), RULES, st.randoms(use_true_random=False))
def test_memory_reward_is_bounded_and_blind_to_order(predicted, reference, rules, rng):
    reward = memory_reward(predicted, reference, rules)
    numbers = [reward.memory, reward.phi, reward.macro, reward.worst, *reward.buckets.values()]
    assert all(0.0 <= number <= 1.0 + 1e-12 for number in numbers)
    assert reward.chain is None or 0.0 <= reward.chain <= 1.0 + 1e-12
    assert reward.worst <= reward.macro + 1e-12
    assert set(reward.buckets) == {record.owner for record in predicted + reference}
    shuffled = memory_reward(rng.sample(predicted, len(predicted)), rng.sample(reference, len(reference)), rules)
    assert shuffled.memory == pytest.approx(reward.memory, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(memories(), RULES)
def test_only_a_memory_without_wordless_records_is_worth_one(records, rules):
    reward = memory_reward(records, records, rules)
    if has_tokens(records, rules):
        assert reward.memory == pytest.approx(1.0, abs=1e-12)
    elif not any(record.superseded_by for record in records):
        assert reward.memory < 1.0


@settings(max_examples=60, deadline=None)
@given(memories(), RULES)
def test_forgetting_and_padding_never_pay(records, rules):
    if not records or not has_tokens(records, rules):
        return
    whole = memory_reward(records, records, rules)
    junk = Record("junk", "zzz qqq", records[0].owner, records[0].source, records[0].layer)
    assert memory_reward(records[:-1], records, rules).phi < whole.phi
    assert memory_reward([*records, junk], records, rules).phi < whole.phi


ADDS = st.fixed_dictionaries(
    {
        "action": st.just("ADD"),
        "owner": st.sampled_from(["Ana", "ana ", "GROUP", "Zoe", ""]),
        "source": st.just("Ana"),
        "layer": st.sampled_from(LAYERS),
        "kind": st.just("fact"),
        "content": CONTENTS,
    }
)
UPDATES = st.fixed_dictionaries(
    {"action": st.just("UPDATE"), "entry_id": st.sampled_from(["m1", "m2", "m3"]), "content": CONTENTS}
)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["action", "owner", "content"]), inner, max_size=3)
    ),
    max_leaves=5,
)
ITEMS = st.one_of(st.just({"action": "NOOP"}), ADDS, UPDATES, JUNK)


@settings(max_examples=150, deadline=None)
@given(st.lists(ITEMS, max_size=6), RULES, st.booleans(), st.integers(0, 8))
def test_validity_of_anything_a_model_may_write(items, rules, hit_limit, budget):
    memory = MemoryState(
        records=(
            Record("m1", "likes tea", "Ana", "Ana", LAYERS[0], superseded_by="m2"),
            Record("m2", "likes no tea", "Ana", "Ana", LAYERS[0]),
        ),
        roster=Roster(("Ana",)),
    )
    report = validate(parse_completion(json.dumps({"actions": items})), memory, rules)
    reward = validity_reward(report, memory, budget, hit_limit, rules)
    assert 0.0 <= reward.total <= 1.0 + 1e-12
    assert -0.60 - 1e-12 <= reward.penalty <= 0.0
    assert (reward.json == 1.0) == bool(items)
    if report.valid:
        assert (reward.schema, reward.dup) == (1.0, 1.0)
        assert reward.penalty >= -0.20 - 1e-12
    if items and report.valid:  # repeating the last action never pays
        again = validate(parse_completion(json.dumps({"actions": [*items, items[-1]]})), memory, rules)
        worse = validity_reward(again, memory, budget, hit_limit, rules)
        assert worse.total + worse.penalty < reward.total + reward.penalty


@given(
    st.lists(st.tuples(UNIT, UNIT, st.floats(-0.6, 0)), max_size=6),
    st.none() | st.floats(-3, 3),
    st.sampled_from(["state", "potential"]),
)
def test_returns_stay_in_range(steps, gain, form):
    columns = list(zip(*steps, strict=True)) or [(), (), ()]
    returns = segment_returns(*columns, gain, RewardConfig(memory_return=form))
    assert len(returns) == len(steps)
    assert all(-2.0 <= value <= 1.0 + 1e-12 for value in returns)


GROUPS = st.lists(st.lists(st.none() | st.floats(-2, 2), min_size=3, max_size=3), min_size=1, max_size=8)


@given(GROUPS, st.floats(-1000, 1000))
def test_advantages_are_bounded_centred_and_blind_to_an_offset(group, offset):
    result = position_advantages(group, clip=100.0)
    moved = position_advantages(
        [[None if value is None else value + offset for value in row] for row in group], clip=100.0
    )
    for position in range(3):
        column = [row[position] for row in result.advantages]
        assert abs(sum(column)) < 1e-9
        assert all(
            row[position] == 0.0
            for row, source in zip(result.advantages, group, strict=True)
            if source[position] is None
        )
        if any(column) and any(
            row[position] for row in moved.advantages
        ):  # on the threshold itself either may be dropped
            assert [row[position] for row in moved.advantages] == pytest.approx(column, abs=1e-8)
    assert result.num_zero_variance <= result.num_groups <= 3


@given(GROUPS, st.randoms(use_true_random=False))
def test_advantages_do_not_depend_on_the_order_of_trajectories(group, rng):
    order = rng.sample(range(len(group)), len(group))
    shuffled = position_advantages([group[i] for i in order]).advantages
    assert shuffled == [position_advantages(group).advantages[i] for i in order]
