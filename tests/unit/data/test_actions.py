"""Strict parsing and validation of what a Writer emits (specification §3)."""

from __future__ import annotations

import json

import pytest

from writer_rl.data.actions import (
    GROUP,
    GROUP_LAYERS,
    KINDS,
    LAYERS,
    Action,
    ActionReport,
    action_key,
    actions_schema,
    normalise_content,
    parse_completion,
    render_actions,
    shape_errors,
    validate,
)
from writer_rl.data.memory import MemoryState, Record, Roster

ADD = {
    "action": "ADD",
    "owner": "Ana",
    "source": "Ana",
    "layer": "per_speaker_core",
    "kind": "fact",
    "content": "plays chess",
}


def memory() -> MemoryState:
    records = (
        Record("m1", "Ana lives in Leeds", "Ana", "Ana", "per_speaker_core", superseded_by="m2"),
        Record("m2", "Ana lives in York", "Ana", "Ana", "per_speaker_core", links=("m1",)),
        Record("m3", "They meet on Mondays", GROUP, "Ben", "group_insight"),
    )
    return MemoryState(records=records, roster=Roster(("Ana", "Ben"), {"Benny": "Ben"}))


def check(*items: object, rules: str = "fixed") -> ActionReport:
    return validate(parse_completion(json.dumps({"actions": list(items)})), memory(), rules)  # type: ignore[arg-type]


def codes(report: ActionReport) -> list[tuple[int | None, str]]:
    return [(error.index, error.code) for error in report.errors]


@pytest.mark.parametrize(
    "text",
    [
        '{"actions":[{"action":"NOOP"}]}',
        ' \n{"actions" : [ {"action":"NOOP"} ]}\t\n',
        '{"note":"x","actions":[{"action":"NOOP"}]}',
    ],
)
def test_one_object_with_a_list_is_valid_json(text: str) -> None:
    parsed = parse_completion(text)
    assert parsed.json_valid
    assert parsed.items == ({"action": "NOOP"},)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "NOOP",
        '```json\n{"actions":[{"action":"NOOP"}]}\n```',
        '{"actions":[{"action":"NOOP"}]} Done.',
        'Sure: {"actions":[{"action":"NOOP"}]}',
        '{"actions":[{"action":"NOOP"}',
        '[{"action":"NOOP"}]',
        '{"actions":{"action":"NOOP"}}',
        '{"action":"NOOP"}',
        '{"actions":null}',
        '{"actions":[NaN]}',
        '{"actions":[Infinity]}',
        "{'actions':[]}",
        '{"actions":[],}',
        '{"actions":[]}{"actions":[]}',
        '{"actions":' + "[" * 100_000,
        '{"actions":[' + "9" * 5000 + "]}",
        "\ufeff" + '{"actions":[]}',
        "\u00a0" + '{"actions":[]}',
    ],
)
def test_anything_else_is_invalid_json_and_never_raises(text: str) -> None:
    parsed = parse_completion(text)
    assert not parsed.json_valid
    assert parsed.error
    report = validate(parsed, memory())
    assert codes(report) == [(None, "invalid_json")]
    assert report.num_attempted == 0
    assert not report.valid


@pytest.mark.parametrize(
    ("item", "code"),
    [
        ("ADD", "not_an_object"),
        (None, "not_an_object"),
        ([], "not_an_object"),
        ({}, "unknown_action"),
        ({"action": "DELETE"}, "unknown_action"),
        ({"action": "add"}, "unknown_action"),
        ({"action": ["ADD"]}, "unknown_action"),
        ({"action": "NOOP", "reason": "quiet"}, "extra_key"),
        ({"action": "UPDATE", "entry_id": "m2"}, "keys"),
        ({"action": "UPDATE", "entry_id": "m2", "content": "x", "owner": "Ana"}, "keys"),
        ({"action": "UPDATE", "entry_id": 2, "content": "x"}, "blank"),
        ({"action": "UPDATE", "entry_id": "m2", "content": " \n"}, "blank"),
        ({**ADD, "owner": ""}, "blank"),
        ({**ADD, "source": "  "}, "blank"),
        ({**ADD, "content": None}, "blank"),
        ({**ADD, "content": "\ud800"}, "blank"),
        ({key: value for key, value in ADD.items() if key != "kind"}, "blank"),
        ({**ADD, "layer": "core"}, "unknown_layer"),
        ({**ADD, "kind": "opinion"}, "unknown_kind"),
        ({**ADD, "owner": GROUP}, "scope"),
        ({**ADD, "layer": "group_interaction"}, "scope"),
        ({**ADD, "owner": "group", "layer": "group_insight"}, "scope"),
    ],
)
def test_each_shape_fault_has_its_code(item: object, code: str) -> None:
    assert [error.code for error in shape_errors(item, 0)] == [code]
    assert codes(check(item)) == [(0, code)]


def test_utype_is_read_as_kind() -> None:
    item = {key: value for key, value in ADD.items() if key != "kind"} | {"utype": "stance"}
    assert check(item).actions == (Action("ADD", "Ana", "Ana", "per_speaker_core", "stance", "plays chess"),)


def test_every_layer_and_kind_is_accepted_in_its_scope() -> None:
    for layer in LAYERS:
        for kind in KINDS:
            owner = GROUP if layer in GROUP_LAYERS else "Ana"
            assert check({**ADD, "owner": owner, "layer": layer, "kind": kind}).valid


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([], [(None, "empty")]),
        ([ADD, {"action": "NOOP"}], [(1, "noop_in_company")]),
        ([{"action": "NOOP"}, {"action": "NOOP"}], [(0, "noop_in_company"), (1, "noop_in_company")]),
        ([ADD, {**ADD, "content": " Plays  CHESS. "}], [(1, "duplicate")]),
        ([ADD, {**ADD, "owner": "ana@2026-08-10"}], [(1, "duplicate")]),
        ([{"action": "UPDATE", "entry_id": "m9", "content": "x"}], [(0, "unknown_entry")]),
        ([{"action": "UPDATE", "entry_id": "m1", "content": "x"}], [(0, "not_a_head")]),
        ([{"action": "UPDATE", "entry_id": "m2", "content": "ana lives in york!"}], [(0, "no_change")]),
        (
            [{"action": "UPDATE", "entry_id": "m2", "content": "x"}, {"action": "UPDATE", "entry_id": "m2", "content": "y"}],
            [(1, "updated_twice")],
        ),
        ([{**ADD, "owner": "Eve"}], [(0, "unknown_owner")]),
        ([{**ADD, "source": "Eve"}], [(0, "unknown_source")]),
        ([{**ADD, "source": GROUP}], [(0, "unknown_source")]),
        ([{**ADD, "owner": "Eve"}, {"action": "UPDATE", "entry_id": "m9", "content": "x"}, 7],
         [(0, "unknown_owner"), (1, "unknown_entry"), (2, "not_an_object")]),
    ],
)  # fmt: skip
def test_list_faults_are_located_and_refuse_the_whole_list(
    items: list[object], expected: list[tuple[int, str]]
) -> None:
    report = check(*items)
    assert codes(report) == expected
    assert report.actions == ()
    assert report.num_attempted == len(items)


def test_one_error_takes_the_valid_actions_with_it() -> None:
    assert check(ADD).valid
    assert check(ADD, {"action": "UPDATE", "entry_id": "m9", "content": "x"}).actions == ()


def test_fixed_resolves_names_and_paper_leaves_them() -> None:
    item = {**ADD, "owner": " ANA @2026-08-10", "source": "benny", "layer": "per_speaker_profile"}
    fixed, paper = check(item).actions[0], check(item, rules="paper").actions[0]
    assert (fixed.owner, fixed.source) == ("Ana", "Ben")
    assert (paper.owner, paper.source) == ("ANA @2026-08-10", "benny")
    assert check({**ADD, "owner": "Eve"}, rules="paper").valid


def test_same_words_of_two_people_are_not_a_duplicate() -> None:
    assert check(ADD, {**ADD, "owner": "Ben", "source": "Ben"}).valid


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("Lives in Leeds.", "lives  in\nleeds", True),
        ("Straße", "STRASSE", True),
        ("ﬁne", "fine", True),
        ("住在利兹。", "住在利兹", True),
        ("at 9.5", "at 95", False),
        ("is she here?", "is she here", False),
    ],
)
def test_normalised_contents(left: str, right: str, same: bool) -> None:
    assert (normalise_content(left) == normalise_content(right)) is same


def test_rendering_is_compact_keeps_every_script_and_parses_back() -> None:
    actions = (
        Action("ADD", "Ana", "Ben", "per_speaker_profile", "observation", 'says "no" — 不 🙂'),
        Action("UPDATE", content="moved", entry_id="m2"),
    )
    text = render_actions(actions)
    assert text.startswith('{"actions":[{"action":"ADD","owner":"Ana","source":"Ben","layer":"per_speaker_profile",')
    assert "不 🙂" in text
    assert validate(parse_completion(text), memory()).actions == actions
    assert render_actions([]) == '{"actions":[{"action":"NOOP"}]}'


def test_action_keys_separate_owner_source_and_layer() -> None:
    base = Action("ADD", "Ana", "Ana", "per_speaker_core", "fact", "x")
    others = [
        Action("ADD", "Ben", "Ana", "per_speaker_core", "fact", "x"),
        Action("ADD", "Ana", "Ben", "per_speaker_core", "fact", "x"),
        Action("ADD", "Ana", "Ana", "per_speaker_profile", "fact", "x"),
        Action("UPDATE", content="x", entry_id="m2"),
        Action("NOOP"),
    ]
    assert len({action_key(action) for action in [base, *others]}) == 6
    assert action_key(base) == action_key(Action("ADD", "Ana", "Ana", "per_speaker_core", "stance", "X."))


def test_the_json_schema_accepts_what_validation_accepts() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    validator = jsonschema.Draft202012Validator(actions_schema(2))
    update = {"action": "UPDATE", "entry_id": "m2", "content": "x"}
    good: list[list[object]] = [[ADD], [ADD, update], [{"action": "NOOP"}]]
    bad: list[list[object]] = [
        [], [ADD, {"action": "NOOP"}], [{"action": "NOOP"}] * 2, [ADD, update, ADD], [{**ADD, "layer": "group_insight"}],
        [{**update, "owner": "Ana"}],
    ]  # fmt: skip
    assert all(validator.is_valid({"actions": items}) for items in good)
    assert not any(validator.is_valid({"actions": items}) for items in bad)
    assert not validator.is_valid({"actions": [ADD], "why": "x"})
