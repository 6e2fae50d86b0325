"""Import of SpeakerMem files, on a small hand-made pair: what is kept, repaired, compared and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from writer_rl.configs.errors import InputError
from writer_rl.data.contract import PROMPT_VERSION
from writer_rl.data.dialogues import read_dialogues, write_dialogues
from writer_rl.data.sources.speakermem import import_network, import_trajectory
from writer_rl.data.traces import read_traces, write_traces

Change = Callable[[dict[str, Any]], object]


def question(**fields: Any) -> dict[str, Any]:
    anchor = {
        "session_index": 1,
        "turn_id": "g_s01_t001",
        "speaker_display_name": "Ben",
        "message_excerpt": "tea",
        "relevance": "r",
    }
    return {
        "id": "q1", "category": "Q1", "question": "Who likes tea?", "answer": "Ben does.", "answer_format": "long_form",
        "options": [], "correct_option": "", "evidence_anchors": [anchor],
    } | fields  # fmt: skip


def network() -> dict[str, Any]:
    def turn(session: int, number: int, speaker: str, content: str, reply_to: str = "") -> dict[str, Any]:
        return {"turn": f"g_s0{session}_t00{number}", "speaker": speaker, "speaker_id": "p", "content": content,
                "ts": f"2026-08-1{session}T23:5{9 - number}:00", "reply_to": reply_to}  # fmt: skip

    return {
        "schema": "socialmembench-real-v4-source/1",
        "speakers": ["Ana", "Ben"],
        "sessions": [
            {"session_id": "g_s01", "session_index": 1, "topic": "SECRET", "ts": "2026-08-11",
             "turns": [turn(1, 0, "Ana", "I like 👩‍👧 coffee, who is with me?"), turn(1, 1, "Ben", "I like tea", "g_s01_t000")]},
            {"session_id": "g_s02", "session_index": 2, "topic": "SECRET", "ts": "2026-08-12", "turns": [turn(2, 0, "Ana", "I like tea")]},
        ],
        "qa_pairs": [question()],
        "meta": {"network_id": "g"},
    }  # fmt: skip


def entry(
    entry_id: str, content: str, owner: str = "Ana", links: tuple[str, ...] = (), superseded_by: str = ""
) -> dict[str, Any]:
    return {"entry_id": entry_id, "content": content, "owner": owner, "source": owner, "layer": "per_speaker_core", "utype": "stance",
            "links": list(links), "superseded_by": superseded_by, "confidence": 0.7, "from_ids": []}  # fmt: skip


def state(*entries: dict[str, Any]) -> dict[str, Any]:
    edges = [{"old": e["links"][0], "new": e["entry_id"]} for e in entries if e["links"]]
    return {
        "entries": list(entries),
        "heads": [e for e in entries if not e["superseded_by"]],
        "update_edges": edges,
        "roster": ["Ana"],
    }


def trajectory() -> dict[str, Any]:
    """A fresh value that shares no parts, so that a test can break one place alone."""
    found: dict[str, Any] = json.loads(json.dumps(_trajectory()))
    return found


def _trajectory() -> dict[str, Any]:
    def add(owner: str, content: str) -> dict[str, str]:
        return {
            "action": "ADD",
            "owner": owner,
            "source": owner,
            "layer": "per_speaker_core",
            "utype": "stance",
            "content": content,
        }

    def message(session: int, number: int, speaker: str, content: str) -> dict[str, Any]:
        return {
            "speaker": speaker,
            "content": content,
            "session": f"g_s0{session}",
            "ts": "",
            "msg_id": str(number),
            "meta": {},
        }

    first = state(entry("b2", "Ben likes tea", "Ben"), entry("a1", "Ana likes coffee"))
    second = state(
        entry("b2", "Ben likes tea", "Ben"),
        entry("a1", "Ana likes coffee", superseded_by="a3"),
        entry("a3", "Ana likes tea", links=("a1",)),
    )
    return {
        "schema": "speakermem-v4-trajectories/1",
        "prompt_version": "cafe",
        "teacher": {"model": "llm-x", "temperature": 0.0},
        "window_size": 2,
        "network_id": "g",
        "transitions": [
            {"turn": 0, "session_id": "g_s01", "ts": "2026-08-11", "segment_index": 0, "source_session_index": 0,
             "messages": [message(1, 0, "Ana", "I like coffee, who is with me?"), message(1, 1, "Ben", "I like tea")],
             "actions": [add("Ana", "Ana likes coffee"), add("Ben", "Ben likes tea")],
             "report": {"created_ids": ["a1", "b2"]}, "pre_state": state(), "post_state": first},
            {"turn": 1, "session_id": "g_s02", "ts": "2026-08-12", "segment_index": 0, "source_session_index": 1,
             "messages": [message(2, 0, "Ana", "I like tea")],
             "actions": [{"action": "UPDATE", "entry_id": "a1", "content": "Ana likes tea"}],
             "report": {"created_ids": ["a3"]}, "pre_state": first, "post_state": second},
        ],
        "final_state": {"roster": ["Ana", "Ben"]},
        "qa_pairs": [question()],
    }  # fmt: skip


def save(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def test_network_keeps_ids_order_replies_and_text(tmp_path: Path) -> None:
    found = import_network(save(tmp_path / "n.json", network()))
    dialogue = found.dialogue
    messages = [m for session in dialogue.sessions for m in session.messages]
    assert dialogue.dialogue_id == "g"
    assert dialogue.members == ("Ana", "Ben")
    assert [m.message_id for m in messages] == ["g_s01_t000", "g_s01_t001", "g_s02_t000"]
    assert messages[0].text == "I like 👩‍👧 coffee, who is with me?"
    assert messages[1].reply_to == "g_s01_t000"
    assert [m.sent_at for m in messages[:2]] == [
        "2026-08-11T23:59:00",
        "2026-08-11T23:58:00",
    ]  # backwards: file order stays
    assert dialogue.questions[0].evidence_ids == ("g_s01_t001",)
    assert found.repairs == {}


def test_labels_are_left_behind(tmp_path: Path) -> None:
    dialogue = import_network(save(tmp_path / "n.json", network())).dialogue
    write_dialogues(tmp_path / "d.json", [dialogue])
    assert "SECRET" not in (tmp_path / "d.json").read_text()
    assert read_dialogues(tmp_path / "d.json") == [dialogue]


def test_multiple_choice_keeps_letters_in_order(tmp_path: Path) -> None:
    value = network()
    value["qa_pairs"] = [
        question(options={"C": "c", "A": "a", "B": "b", "D": "d"}, correct_option="B", answer="A paragraph.")
    ]
    asked = import_network(save(tmp_path / "n.json", value)).dialogue.questions[0]
    assert asked.options == (("A", "a"), ("B", "b"), ("C", "c"), ("D", "d"))
    assert (asked.correct_option, asked.answer) == ("B", "A paragraph.")


@pytest.mark.parametrize(
    ("anchor", "evidence", "repairs"),
    [
        ({"session_index": 1, "speaker_display_name": "Ben", "message_excerpt": "like tea"}, ("g_s01_t001",), {"anchor_by_excerpt": 1}),
        ({"session_index": 1, "turn_id": "gone", "speaker_display_name": "Ana", "message_excerpt": "coffee…"}, ("g_s01_t000",), {"anchor_by_excerpt": 1}),
        ({"session_index": 1, "speaker_display_name": "Ana", "message_excerpt": "like tea"}, (), {"anchor_unresolved": 1}),
        ({"session_index": 2, "speaker_display_name": "Ben", "message_excerpt": "like tea"}, (), {"anchor_unresolved": 1}),
        ({"source": "final_state", "owner": "Ana"}, (), {"anchor_unresolved": 1}),
        ({"turn_id": "g_s02_t000", "turn_index": 7}, ("g_s02_t000",), {}),
    ],
)  # fmt: skip
def test_anchors(tmp_path: Path, anchor: dict[str, Any], evidence: tuple[str, ...], repairs: dict[str, int]) -> None:
    value = network()
    value["qa_pairs"] = [question(evidence_anchors=[anchor])]
    found = import_network(save(tmp_path / "n.json", value))
    assert found.dialogue.questions[0].evidence_ids == evidence
    assert found.repairs == repairs


def test_an_excerpt_that_fits_twice_is_not_guessed(tmp_path: Path) -> None:
    value = network()
    value["sessions"][0]["turns"][0]["speaker"] = "Ben"
    anchor = {"session_index": 1, "speaker_display_name": "Ben", "message_excerpt": "I like"}
    value["qa_pairs"] = [question(evidence_anchors=[anchor])]
    assert import_network(save(tmp_path / "n.json", value)).repairs == {"anchor_unresolved": 1}


def test_odd_speakers_and_replies_are_counted(tmp_path: Path) -> None:
    value = network()
    value["sessions"][1]["turns"][0] |= {"speaker": "Cy", "reply_to": "nowhere"}
    found = import_network(save(tmp_path / "n.json", value))
    assert found.dialogue.members == ("Ana", "Ben", "Cy")
    assert found.repairs == {"reply_to_nowhere": 1, "speaker_not_listed": 1}


BROKEN_NETWORKS: list[tuple[Change, str, str]] = [
    (lambda v: v.update(schema="speakermem-v4-trajectories/1"), "schema", "network"),
    (lambda v: v.pop("speakers"), "speakers", "missing"),
    (lambda v: v.update(speakers=["Ana", "ana"]), "speakers", "'ana'"),
    (lambda v: v.update(speakers=[{"name": "Ana"}]), "speakers[0]", "dict, not text"),
    (lambda v: v.update(sessions=[]), "sessions", "no message"),
    (lambda v: v["sessions"][1].update(session_id="g_s01"), "sessions[1].session_id", "'g_s01'"),
    (lambda v: v["sessions"][0]["turns"][1].update(turn="g_s01_t000"), "sessions[0].turns[1].turn", "twice"),
    (lambda v: v["sessions"][0]["turns"][1].update(content=None), "sessions[0].turns[1].content", "NoneType"),
    (lambda v: v["sessions"][0]["turns"][1].update(speaker="GROUP"), "sessions[0].turns[1].speaker", "GROUP"),
    (lambda v: v["sessions"][0].update(turns={}), "sessions[0].turns", "dict, not a list"),
    (lambda v: v["qa_pairs"].append(question()), "qa_pairs[1].id", "'q1'"),
    (lambda v: v["qa_pairs"][0].update(options={"A": "a"}), "qa_pairs[0].options", "A to D"),
    (lambda v: v["qa_pairs"][0].update(options=["a", "b"]), "qa_pairs[0].options", "A to D"),
    (lambda v: v["qa_pairs"][0].update(options=dict.fromkeys("ABCD", "x"), correct_option="E"), "qa_pairs[0].correct_option", "'E'"),
    (lambda v: v["qa_pairs"][0].update(answer=3), "qa_pairs[0].answer", "int, not text"),
    (lambda v: v["qa_pairs"][0].update(evidence_anchors=["t"]), "qa_pairs[0].evidence_anchors[0]", "str, not an object"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "position", "reason"), BROKEN_NETWORKS)
def test_broken_networks(tmp_path: Path, change: Change, position: str, reason: str) -> None:
    value = network()
    change(value)
    file = save(tmp_path / "n.json", value)
    with pytest.raises(InputError) as raised:
        import_network(file)
    assert raised.value.where == f"{file}: {position}"
    assert reason in str(raised.value)


@pytest.mark.parametrize("schema", ["speakermem-v4-trajectories/1", "speakermem-trajectories/1"])
def test_trajectory_replays_its_states(tmp_path: Path, schema: str) -> None:
    found = import_trajectory(save(tmp_path / "t.json", trajectory() | {"schema": schema}))
    assert found.differences == ()
    assert (found.num_replayed, found.num_transitions) == (2, 2)
    assert found.trace.window == 2
    assert [step.entry_ids for step in found.trace.steps] == [("a1", "b2"), ("a3",)]
    assert found.trace.prompt_version == PROMPT_VERSION
    assert found.trace.teacher == "llm-x (speakermem prompt cafe)"
    assert found.repairs == {"message_id": 3}
    ids = [m.message_id for session in found.dialogue.sessions for m in session.messages]
    assert ids == ["g_s01_t000", "g_s01_t001", "g_s02_t000"]
    assert found.dialogue.questions[0].evidence_ids == ("g_s01_t001",)
    write_traces(tmp_path / "traces.json", [found.trace])
    assert read_traces(tmp_path / "traces.json") == [found.trace]


def post(value: dict[str, Any]) -> dict[str, Any]:
    """State after the second transition; its entries are b2, a1 (superseded), a3."""
    found: dict[str, Any] = value["transitions"][1]["post_state"]
    return found


DIFFERENCES: list[tuple[Change, str]] = [
    (lambda v: post(v)["entries"][2].update(content="Ana likes water"), "entries[a3].content"),
    (lambda v: post(v)["entries"][2].update(owner="Ben"), "entries[a3].owner"),
    (lambda v: post(v)["entries"][2].update(source="Ben"), "entries[a3].source"),
    (lambda v: post(v)["entries"][2].update(layer="per_speaker_profile"), "entries[a3].layer"),
    (lambda v: post(v)["entries"][2].update(utype="fact"), "entries[a3].kind"),
    (lambda v: post(v)["entries"][2].update(links=[]), "entries[a3].links"),
    (lambda v: post(v)["entries"][1].update(superseded_by=""), "entries[a1].superseded_by"),
    (lambda v: post(v)["entries"].pop(0), "entries"),
    (lambda v: post(v)["entries"].append(entry("zz", "more")), "entries"),
    (lambda v: post(v)["heads"].append(entry("a1", "x")), "heads"),
    (lambda v: post(v)["update_edges"].clear(), "update_edges"),
    (lambda v: post(v)["update_edges"].append({"old": "b2", "new": "a3"}), "update_edges"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "field"), DIFFERENCES)
def test_every_kind_of_difference_is_seen(tmp_path: Path, change: Change, field: str) -> None:
    value = trajectory()
    change(value)
    found = import_trajectory(save(tmp_path / "t.json", value))
    assert [(d.transition, d.field) for d in found.differences] == [(1, f"post_state.{field}")]
    assert (found.num_replayed, found.num_transitions) == (1, 2)


def test_a_different_state_before_a_transition_is_seen(tmp_path: Path) -> None:
    value = trajectory()
    value["transitions"][1]["pre_state"]["entries"].pop()
    found = import_trajectory(save(tmp_path / "t.json", value))
    assert [(d.transition, d.field) for d in found.differences] == [(1, "pre_state.entries")]


def test_spellings_are_repaired_and_counted(tmp_path: Path) -> None:
    value = trajectory()
    value["transitions"][0]["actions"][0] |= {"utype": "Stance ", "layer": "core"}
    found = import_trajectory(save(tmp_path / "t.json", value))
    assert found.repairs == {"message_id": 3, "kind_spelling": 1, "layer_spelling": 1}
    assert found.differences == ()


def test_ids_are_found_in_the_states_if_the_report_lacks_them(tmp_path: Path) -> None:
    value = trajectory()
    del value["transitions"][0]["report"]
    found = import_trajectory(save(tmp_path / "t.json", value))
    assert found.trace.steps[0].entry_ids == ("a1", "b2")
    assert found.repairs["entry_ids_from_state"] == 1


def test_parts_of_a_session_are_joined_and_the_window_fits_them(tmp_path: Path) -> None:
    value = trajectory()
    value["transitions"][1] |= {"session_id": "g_s01", "source_session_index": 0}
    value["transitions"][1]["messages"][0] |= {"session": "g_s01", "msg_id": "2"}
    found = import_trajectory(save(tmp_path / "t.json", value | {"window_size": 25}))
    assert [len(session.messages) for session in found.dialogue.sessions] == [3]
    assert found.trace.window == 2
    assert found.differences == ()


BROKEN_TRAJECTORIES: list[tuple[Change, str, str]] = [
    (lambda v: v.update(schema="socialmembench-real-v4-source/1"), "schema", "trajectory"),
    (lambda v: v.pop("network_id"), "network_id", "missing"),
    (lambda v: v.update(transitions=[]), "transitions", "empty"),
    (lambda v: v["transitions"][0].update(messages=[]), "transitions[0].messages", "empty"),
    (lambda v: v["transitions"][0]["messages"][1].update(msg_id="0"), "transitions[0].messages[1].msg_id", "twice"),
    (lambda v: v["transitions"][0]["messages"][1].update(session="other"), "transitions[0].messages[1].session", "g_s01"),
    (lambda v: v["transitions"][0]["messages"][1].pop("speaker"), "transitions[0].messages[1].speaker", "missing"),
    (lambda v: v["transitions"][0]["actions"].clear(), "transitions[0].actions", "NOOP"),
    (lambda v: v["transitions"][0]["actions"].append({"action": "NOOP"}), "transitions[0].actions", "NOOP"),
    (lambda v: v["transitions"][0]["actions"][0].update(utype="guess"), "transitions[0].actions[0]", "'guess'"),
    (lambda v: v["transitions"][0]["actions"][0].update(layer="middle"), "transitions[0].actions[0]", "'middle'"),
    (lambda v: v["transitions"][0]["report"].update(created_ids=["a1", "a1"]), "transitions[0].report.created_ids", "twice"),
    (lambda v: v["transitions"][1]["report"].update(created_ids=["x", "y"])
     or v["transitions"][1]["post_state"]["entries"].pop(), "transitions[1].report.created_ids", "2 for 1"),
    (lambda v: v["transitions"][1]["actions"][0].update(entry_id="nope"), "transitions: trace of g: steps[1]", "'nope'"),
    (lambda v: v["transitions"][1].pop("post_state"), "transitions[1].post_state", "missing"),
    (lambda v: v["transitions"].append(v["transitions"][0]), "transitions[2].session_id", "twice"),
    (lambda v: v.update(teacher={"model": 4}), "teacher.model", "int"),
    (lambda v: v["final_state"].update(roster=["Ana", " "]), "final_state.roster", "' '"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "position", "reason"), BROKEN_TRAJECTORIES)
def test_broken_trajectories(tmp_path: Path, change: Change, position: str, reason: str) -> None:
    value = trajectory()
    change(value)
    file = save(tmp_path / "t.json", value)
    with pytest.raises(InputError) as raised:
        import_trajectory(file)
    assert raised.value.where == f"{file}: {position}"
    assert reason in str(raised.value)


def test_a_window_that_cannot_fit_is_refused(tmp_path: Path) -> None:
    value = trajectory()
    second = value["transitions"][1] | {"session_id": "g_s01"}
    second["messages"] = [second["messages"][0] | {"session": "g_s01", "msg_id": str(n)} for n in (2, 3, 4)]
    value["transitions"][1] = second
    with pytest.raises(InputError, match="window_size: does not cut"):
        import_trajectory(save(tmp_path / "t.json", value))


def test_faults_are_reported_as_findings(tmp_path: Path) -> None:
    value = trajectory()
    value["transitions"][0]["actions"][1]["layer"] = "per_speaker_profile"
    for transition in value["transitions"]:
        for stored in transition["post_state"]["entries"] + transition["pre_state"]["entries"]:
            if stored["entry_id"] == "b2":
                stored["layer"] = "per_speaker_profile"
    found = import_trajectory(save(tmp_path / "t.json", value))
    assert found.differences == ()
    assert [(f["segment_index"], f["code"], f["entry_id"]) for f in found.trace.findings] == [
        (0, "self_report_as_profile", "b2")
    ]
