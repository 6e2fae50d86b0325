"""The released SpeakerMem files: every replay agrees, teacher faults are found unaided, labels reach no prompt."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from writer_rl.configs.schema import ContractConfig
from writer_rl.data.actions import normalise_content
from writer_rl.data.contract import one_line, render_prompt
from writer_rl.data.dialogues import read_dialogues
from writer_rl.data.sources.speakermem import ImportedNetwork, ImportedTrajectory, import_network, import_trajectory
from writer_rl.data.traces import read_traces, replay
from writer_rl.trainer.import_data import main

NETWORKS = ("0d1e2f3a", "5e6f7a8b", "6f7a8b9c", "7a8b9c0d", "8b9c0d1e", "9c0d1e2f")
TRAJECTORIES = {
    "manual_noop_ack": (1, (0, 0, 1)),
    "manual_noop_greeting": (1, (0, 0, 1)),
    "manual_update_alpha": (6, (4, 6, 0)),
    "manual_update_beta": (7, (3, 5, 0)),
    "manual_update_gamma": (8, (3, 6, 0)),
    "social_grp_0d1e2f3a": (5, (31, 0, 0)),
    "social_grp_7a8b9c0d": (5, (40, 0, 0)),
    "social_grp_9c0d1e2f": (5, (34, 2, 0)),
}


@pytest.fixture
def speakermem(shared_dir: Path) -> Path:
    folder = shared_dir / "data" / "speakermem"
    if not folder.is_dir():
        pytest.skip("../shared/data/speakermem is not on this machine")
    return folder


@cache
def trajectory(folder: Path, name: str) -> ImportedTrajectory:
    return import_trajectory(folder / "trajectories" / f"{name}.json")


@cache
def network(folder: Path, name: str) -> ImportedNetwork:
    return import_network(folder / "networks" / f"social_grp_{name}.json")


def raw(folder: Path, kind: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / kind / f"{name}.json").read_text(encoding="utf-8"))
    return found


def test_all_files_are_covered(speakermem: Path) -> None:
    assert {file.stem for file in (speakermem / "trajectories").glob("*.json")} == set(TRAJECTORIES)
    assert {file.stem for file in (speakermem / "networks").glob("*.json")} == {
        f"social_grp_{name}" for name in NETWORKS
    }


@pytest.mark.parametrize("name", TRAJECTORIES)
def test_replay_reproduces_every_stored_state(speakermem: Path, name: str) -> None:
    found = trajectory(speakermem, name)
    transitions, counts = TRAJECTORIES[name]
    assert [str(difference) for difference in found.differences] == []
    assert (found.num_replayed, found.num_transitions) == (transitions, transitions)
    written = Counter(action.action for step in found.trace.steps for action in step.actions)
    assert (written["ADD"], written["UPDATE"], sum(not step.actions for step in found.trace.steps)) == counts


@pytest.mark.parametrize("name", TRAJECTORIES)
def test_final_state_agrees_independently_of_the_importer(speakermem: Path, name: str) -> None:
    """Compares with the file's `final_state`, which the importer does not look at."""
    found, final = trajectory(speakermem, name), raw(speakermem, "trajectories", name)["final_state"]
    after = list(replay(found.dialogue, found.trace, found.trace.window, rules="fixed"))[-1].after
    ours = {
        r.entry_id: (
            r.owner,
            r.source,
            r.layer,
            r.kind,
            r.content,
            list(r.links),
            r.superseded_by,
            round(r.confidence, 9),
        )
        for r in after.records
    }
    theirs = {
        e["entry_id"]: (
            e["owner"], e["source"], e["layer"], e["utype"], e["content"], e["links"], e["superseded_by"], round(e["confidence"], 9),
        )
        for e in final["entries"]
    }  # fmt: skip
    assert ours == theirs
    assert set(after.update_edges()) == {(edge["old"], edge["new"]) for edge in final["update_edges"]}
    assert sorted(after.roster.members) == sorted(final["roster"])


@pytest.mark.parametrize("name", TRAJECTORIES)
def test_messages_and_segments_are_those_of_the_file(speakermem: Path, name: str) -> None:
    found, transitions = trajectory(speakermem, name), raw(speakermem, "trajectories", name)["transitions"]
    segments = found.dialogue.segments(found.trace.window)
    assert [[(m.speaker, m.text, m.sent_at) for m in s.messages] for s in segments] == [
        [(m["speaker"], m["content"], m["ts"]) for m in t["messages"]] for t in transitions
    ]
    ids = [m.message_id for s in segments for m in s.messages]
    assert len(ids) == len(set(ids))
    assert found.repairs.get("message_id", 0) == (len(ids) if name.startswith("manual") else 0)


def test_trajectory_and_network_give_the_same_chat(speakermem: Path) -> None:
    for name in ("0d1e2f3a", "7a8b9c0d", "9c0d1e2f"):
        one, two = trajectory(speakermem, f"social_grp_{name}").dialogue, network(speakermem, name).dialogue
        assert one.dialogue_id == two.dialogue_id == f"grp_{name}"
        assert one.members == two.members
        assert one.questions == two.questions
        for left, right in zip(one.sessions, two.sessions, strict=True):
            assert [(m.message_id, m.speaker, m.text) for m in left.messages] == [
                (m.message_id, m.speaker, m.text) for m in right.messages
            ]


def test_networks_keep_turns_questions_and_evidence(speakermem: Path) -> None:
    formats: Counter[str] = Counter()
    for name in NETWORKS:
        found, source = network(speakermem, name), raw(speakermem, "networks", f"social_grp_{name}")
        turns = [turn for session in source["sessions"] for turn in session["turns"]]
        messages = [m for session in found.dialogue.sessions for m in session.messages]
        assert [(m.message_id, m.speaker, m.text, m.sent_at, m.reply_to) for m in messages] == [
            (t["turn"], t["speaker"], t["content"], t["ts"], t["reply_to"]) for t in turns
        ]
        assert found.repairs == {}
        assert found.dialogue.language == "en"
        for asked, given in zip(found.dialogue.questions, source["qa_pairs"], strict=True):
            assert (asked.question_id, asked.text, asked.answer) == (given["id"], given["question"], given["answer"])
            assert list(asked.evidence_ids) == list(dict.fromkeys(a["turn_id"] for a in given["evidence_anchors"]))
            assert len(asked.options) == (4 if given["answer_format"] == "multiple_choice" else 0)
            formats[given["answer_format"]] += 1
    assert formats == {"long_form": 22, "multiple_choice": 11, "short_answer": 5}


def test_the_anchor_without_a_turn_is_counted_not_guessed(speakermem: Path) -> None:
    found = trajectory(speakermem, "manual_update_gamma")
    assert found.repairs["anchor_unresolved"] == 1
    assert [bool(question.evidence_ids) for question in found.dialogue.questions].count(False) == 1


def codes(found: ImportedTrajectory) -> Counter[str]:
    return Counter(str(finding["code"]) for finding in found.trace.findings)


def test_the_italian_trace_is_found_and_no_other(speakermem: Path) -> None:
    foreign = {name: codes(trajectory(speakermem, name))["foreign_language"] for name in TRAJECTORIES}
    assert {name: count for name, count in foreign.items() if count} == {"social_grp_9c0d1e2f": 5}
    details = [
        f["detail"]
        for f in trajectory(speakermem, "social_grp_9c0d1e2f").trace.findings
        if f["code"] == "foreign_language"
    ]
    assert all("written in it" in detail for detail in details)


def test_other_teacher_faults_are_found(speakermem: Path) -> None:
    def texts(name: str, code: str) -> list[str]:
        return [str(f["detail"]) for f in trajectory(speakermem, name).trace.findings if f["code"] == code]

    (own_words,) = texts("manual_update_alpha", "self_report_as_profile")
    assert "Bob prefers concise checklists" in own_words
    (hearsay,) = texts("social_grp_7a8b9c0d", "hearsay_as_core")
    assert "Dad is tired but fine" in hearsay
    (invented,) = texts("social_grp_7a8b9c0d", "unsupported_number")
    assert "2025" in invented
    proposals = texts("social_grp_9c0d1e2f", "group_decision_without_cue")
    assert sum("propone" in text for text in proposals) == 2
    sound = {"manual_noop_ack", "manual_noop_greeting", "manual_update_gamma"}
    assert all(codes(trajectory(speakermem, name)) == {} for name in sound)


def test_a_repeated_add_planted_in_real_data_is_found(speakermem: Path, tmp_path: Path) -> None:
    value = raw(speakermem, "trajectories", "social_grp_0d1e2f3a")
    copied = dict(value["transitions"][0]["actions"][0])
    last = value["transitions"][-1]
    last["actions"].append(copied)
    last["report"]["created_ids"].append("planted")
    file = tmp_path / "t.json"
    file.write_text(json.dumps(value), encoding="utf-8")
    found = import_trajectory(file)
    planted = [f for f in found.trace.findings if f["code"] == "repeated_add"]
    assert [(f["segment_index"], f["entry_id"]) for f in planted] == [(4, "planted")]
    assert normalise_content(copied["content"]) in normalise_content(planted[0]["detail"])
    assert {d.transition for d in found.differences} == {4}


def labels(source: dict[str, Any]) -> set[str]:
    """Texts of a network that only labels hold: topics, questions, answers, options, notes on evidence."""
    found = {session["topic"] for session in source["sessions"]} | {source["scenario"]}
    for pair in source["qa_pairs"]:
        found |= {pair["question"], pair["answer"]}
        found |= set(pair["options"].values()) if isinstance(pair["options"], dict) else set()
        found |= {anchor["relevance"] for anchor in pair["evidence_anchors"]}
    said = " ".join(one_line(turn["content"]) for session in source["sessions"] for turn in session["turns"])
    return {one_line(text) for text in found if len(text) > 12 and one_line(text) not in said}


@pytest.mark.parametrize("name", ["0d1e2f3a", "7a8b9c0d", "9c0d1e2f"])
@pytest.mark.parametrize("form", ["compact", "full"])
def test_no_label_reaches_a_prompt(speakermem: Path, name: str, form: str) -> None:
    found = trajectory(speakermem, f"social_grp_{name}")
    forbidden = labels(raw(speakermem, "networks", f"social_grp_{name}"))
    assert len(forbidden) > 20
    prompts = [
        "\n".join(message["content"] for message in render_prompt(step.before, step.segment, ContractConfig(form=form)))  # type: ignore[arg-type]
        for step in replay(found.dialogue, found.trace, found.trace.window)
    ]
    assert len(prompts) == 5
    assert one_line(found.dialogue.sessions[-1].messages[-1].text) in prompts[-1]
    assert [text for text in forbidden for prompt in prompts if text in prompt] == []


def test_topics_are_in_no_canonical_file_and_questions_stand_there_once(speakermem: Path, tmp_path: Path) -> None:
    assert main(["speakermem-networks", str(speakermem / "networks"), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "dialogues.json").read_text(encoding="utf-8")
    for name in NETWORKS:
        source = raw(speakermem, "networks", f"social_grp_{name}")
        assert not any(json.dumps(session["topic"], ensure_ascii=False)[1:-1] in text for session in source["sessions"])
        asked = json.dumps(source["qa_pairs"][0]["question"], ensure_ascii=False)
        assert text.count(asked) == 1


def test_the_command_imports_both_folders(speakermem: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "teacher"
    assert main(["speakermem-trajectories", str(speakermem / "trajectories"), "--out", str(out), "--check"]) == 0
    assert "38 transitions of which 38 replay exactly" in capsys.readouterr().out
    dialogues, traces = read_dialogues(out / "dialogues.json"), read_traces(out / "traces.json")
    assert [d.dialogue_id for d in dialogues] == [t.dialogue_id for t in traces]
    assert traces == [trajectory(speakermem, name).trace for name in sorted(TRAJECTORIES)]
    totals = json.loads((out / "import_report.json").read_text())["totals"]
    assert (totals["replayed"], totals["actions"]) == (38, {"ADD": 115, "UPDATE": 19, "NOOP": 2})
    assert main(["speakermem-networks", str(speakermem / "networks"), "--out", str(tmp_path / "chats")]) == 0
    assert len(read_dialogues(tmp_path / "chats" / "dialogues.json")) == 6
    assert main(["speakermem-networks", str(speakermem / "trajectories"), "--out", str(tmp_path / "none")]) == 2
