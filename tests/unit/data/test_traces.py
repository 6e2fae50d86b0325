"""Canonical trace files: round trip, replay, and broken files refused with file, position, reason and fix."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from writer_rl.configs.errors import InputError
from writer_rl.data.actions import Action
from writer_rl.data.contract import PROMPT_VERSION
from writer_rl.data.embedding import HashedEmbedder
from writer_rl.data.records import Dialogue, Message, Session
from writer_rl.data.traces import TRACES_SCHEMA, TeacherTrace, TraceStep, read_traces, replay, write_traces

ADD = {"action": "ADD", "owner": "Ana", "source": "Ana", "layer": "per_speaker_core", "kind": "fact", "content": "x"}
GOOD: dict[str, Any] = {
    "schema": TRACES_SCHEMA,
    "traces": [
        {
            "dialogue_id": "d1",
            "teacher": "t",
            "prompt_version": PROMPT_VERSION,
            "window": 2,
            "steps": [
                {"segment_index": 0, "actions": [ADD], "entry_ids": ["e1"]},
                {
                    "segment_index": 1,
                    "actions": [{"action": "UPDATE", "entry_id": "e1", "content": "y"}],
                    "entry_ids": ["e2"],
                },
            ],
            "findings": [{"segment_index": 0, "code": "doubt", "detail": "?"}],
        }
    ],
}

Change = Callable[[dict[str, Any]], object]


def first(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = value["traces"][0]
    return found


def step(value: dict[str, Any], index: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = first(value)["steps"][index]
    return found


BROKEN: list[tuple[str, Change, str, str]] = [
    ("other schema", lambda v: v.update(schema="writer-rl/dialogues/1"), "schema", "dialogues"),
    ("no traces", lambda v: v.pop("traces"), "traces", "missing"),
    ("trace a list", lambda v: v.update(traces=[[]]), "traces[0]", "list, not an object"),
    ("no dialogue", lambda v: first(v).pop("dialogue_id"), "traces[0].dialogue_id", "missing"),
    ("trace twice", lambda v: v["traces"].append(copy.deepcopy(first(v))), "traces[1].dialogue_id", "already"),
    ("no prompt version", lambda v: first(v).pop("prompt_version"), "traces[0].prompt_version", "missing"),
    ("stale prompt", lambda v: first(v).update(prompt_version="0" * 16), "traces[0].prompt_version", PROMPT_VERSION),
    ("no window", lambda v: first(v).pop("window"), "traces[0].window", "missing"),
    ("window zero", lambda v: first(v).update(window=0), "traces[0].window", "0"),
    ("window negative", lambda v: first(v).update(window=-1), "traces[0].window", "-1"),
    ("window true", lambda v: first(v).update(window=True), "traces[0].window", "bool"),
    ("window a float", lambda v: first(v).update(window=2.0), "traces[0].window", "float"),
    ("no steps", lambda v: first(v).update(steps=[]), "traces[0].steps", "empty"),
    ("step missing", lambda v: first(v)["steps"].pop(0), "traces[0].steps[0].segment_index", "1 at place 0"),
    ("actions an object", lambda v: step(v).update(actions={}), "traces[0].steps[0].actions", "dict, not a list"),
    ("action a string", lambda v: step(v).update(actions=["NOOP"]), "traces[0].steps[0].actions[0]", "str"),
    ("action unknown", lambda v: step(v).update(actions=[{"action": "DROP"}]), "traces[0].steps[0].actions[0]", "'DROP'"),
    ("layer unknown", lambda v: step(v).update(actions=[{**ADD, "layer": "core"}]), "traces[0].steps[0].actions[0]", "'core'"),
    ("kind unknown", lambda v: step(v).update(actions=[{**ADD, "kind": "hunch"}]), "traces[0].steps[0].actions[0]", "'hunch'"),
    ("scope", lambda v: step(v).update(actions=[{**ADD, "owner": "GROUP"}]), "traces[0].steps[0].actions[0]", "GROUP"),
    ("blank content", lambda v: step(v).update(actions=[{**ADD, "content": " "}]), "traces[0].steps[0].actions[0]", "content"),
    ("update with owner", lambda v: step(v, 1)["actions"][0].update(owner="Ana"), "traces[0].steps[1].actions[0]", "exactly"),
    ("ids too few", lambda v: step(v)["actions"].append({**ADD, "content": "z"}), "traces[0].steps[0].entry_ids", "1 for 2"),
    ("ids for a NOOP", lambda v: step(v).update(actions=[{"action": "NOOP"}]), "traces[0].steps[0].entry_ids", "1 for 0"),
    ("id twice", lambda v: step(v, 1).update(entry_ids=["e1"]), "traces[0].steps[1].entry_ids[0]", "'e1'"),
    ("id blank", lambda v: step(v).update(entry_ids=[""]), "traces[0].steps[0].entry_ids[0]", "''"),
    ("id a number", lambda v: step(v).update(entry_ids=[1]), "traces[0].steps[0].entry_ids[0]", "int"),
    ("finding a string", lambda v: first(v).update(findings=["odd"]), "traces[0].findings[0]", "str"),
]  # fmt: skip


def save(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def dialogue() -> Dialogue:
    messages = tuple(Message(f"m{i}", ("Ana", "Ben")[i % 2], f"text {i}", "", "s", "", i) for i in range(4))
    return Dialogue("d1", ("Ana", "Ben"), (Session("s", "2026-08-10", messages),))


def trace(*lists: tuple[Action, ...], ids: tuple[tuple[str, ...], ...] = ((), ())) -> TeacherTrace:
    steps = tuple(TraceStep(i, actions, ids[i]) for i, actions in enumerate(lists))
    return TeacherTrace("d1", "t", PROMPT_VERSION, 2, steps)


def add(content: str, owner: str = "Ana") -> Action:
    return Action("ADD", owner, "Ana", "per_speaker_core", "fact", content)


def test_the_unbroken_file_is_read_and_replays(tmp_path: Path) -> None:
    (found,) = read_traces(save(tmp_path / "t.json", GOOD))
    after = list(replay(dialogue(), found, found.window))[-1].after
    assert [(r.entry_id, r.content) for r in after.records] == [("e1", "x"), ("e2", "y")]
    assert after.update_edges() == (("e1", "e2"),)


@pytest.mark.parametrize(("change", "position", "reason"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_broken_files_name_file_position_reason_and_fix(
    tmp_path: Path, change: Change, position: str, reason: str
) -> None:
    value = copy.deepcopy(GOOD)
    change(value)
    file = save(tmp_path / "t.json", value)
    with pytest.raises(InputError) as raised:
        read_traces(file)
    assert raised.value.where == f"{file}: {position}"
    assert reason in raised.value.what
    assert len(raised.value.fix) > 5


def test_a_stale_prompt_may_be_accepted(tmp_path: Path) -> None:
    value = copy.deepcopy(GOOD)
    first(value)["prompt_version"] = "old"
    file = save(tmp_path / "t.json", value)
    assert read_traces(file, allow_stale_prompt=True)[0].prompt_version == "old"
    with pytest.raises(InputError, match="allow"):
        read_traces(file)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no trace"):
        read_traces(save(tmp_path / "t.json", {"schema": TRACES_SCHEMA, "traces": []}))


def test_writing_and_reading_gives_the_same_trace(tmp_path: Path) -> None:
    finding = {"segment_index": 1, "code": "doubt", "detail": "é"}
    made = trace((add("x"), add("住在利兹")), (Action("UPDATE", content="y", entry_id="a"),), ids=(("a", "b"), ("c",)))
    made = replace(made, findings=(finding,))
    write_traces(tmp_path / "t.json", [made])
    assert read_traces(tmp_path / "t.json") == [made]


def test_each_step_sees_the_memory_before_its_messages() -> None:
    steps = list(replay(dialogue(), trace((add("x"),), ()), 2))
    assert [len(s.before.messages) for s in steps] == [0, 2]
    assert [len(s.after.messages) for s in steps] == [2, 4]
    assert steps[1].before is steps[0].after
    assert steps[1].actions == (Action("NOOP"),)
    assert steps[1].after.records == steps[0].after.records


def test_without_ids_records_are_numbered() -> None:
    steps = list(replay(dialogue(), trace((add("x"), add("y")), (Action("UPDATE", content="z", entry_id="m1"),)), 2))
    assert [r.entry_id for r in steps[-1].after.records] == ["m1", "m2", "m3"]


def test_provenance_needs_an_embedder() -> None:
    with_one = list(replay(dialogue(), trace((add("text 1"),), ()), 2, embedder=HashedEmbedder()))
    assert with_one[-1].after.records[0].from_ids
    assert not list(replay(dialogue(), trace((add("text 1"),), ()), 2))[-1].after.records[0].from_ids


@pytest.mark.parametrize(
    ("changed", "window", "reason"),
    [
        (replace(trace((), ()), dialogue_id="d2"), 2, "does not belong to dialogue d1"),
        (trace((), ()), 1, "are 2 for 4 segments of window 1"),
        (trace((), ()), 4, "are 2 for 1 segments of window 4"),
        (trace((Action("UPDATE", content="x", entry_id="m1"),), ()), 2, "'m1' is not in memory"),
        (trace((add("x"), add("X.")), ()), 2, "repeats"),
        (trace((add("x"),), (Action("UPDATE", content="X", entry_id="m1"),)), 2, "stays the same"),
        (trace((add("x"),), (add("y"),), ids=((), ("m1",))), 2, "'m1', which memory holds already"),
    ],
)
def test_traces_that_do_not_replay(changed: TeacherTrace, window: int, reason: str) -> None:
    with pytest.raises(InputError) as raised:
        list(replay(dialogue(), changed, window))
    assert reason in str(raised.value)
    assert "d1" in raised.value.where or "d2" in raised.value.where


def test_fixed_rules_refuse_a_stranger_that_paper_accepts() -> None:
    made = trace((add("x", owner="Eve"),), ())
    assert len(list(replay(dialogue(), made, 2, rules="paper"))) == 2
    with pytest.raises(InputError, match="'Eve'"):
        list(replay(dialogue(), made, 2, rules="fixed"))
