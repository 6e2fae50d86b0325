"""Canonical dialogue files: round trip, segments, and broken files refused with file, position, reason and fix."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from writer_rl.configs.errors import InputError
from writer_rl.data.dialogues import DIALOGUES_SCHEMA, read_dialogues, write_dialogues
from writer_rl.data.files import write_json
from writer_rl.data.records import Dialogue, Message, Question, Session

GOOD: dict[str, Any] = {
    "schema": DIALOGUES_SCHEMA,
    "dialogues": [
        {
            "dialogue_id": "d1",
            "members": ["Ana", "Ben"],
            "aliases": {"Benny": "Ben"},
            "sessions": [
                {
                    "session_id": "s1",
                    "started_at": "2026-08-10",
                    "messages": [
                        {"message_id": "a", "speaker": "Ana", "text": "hi"},
                        {"message_id": "b", "speaker": "Ben", "text": "", "reply_to": "a"},
                    ],
                }
            ],
            "questions": [
                {"question_id": "q1", "text": "Who?", "answer": "Ana", "options": [["A", "Ana"]], "evidence_ids": ["a"]}
            ],
        }
    ],
}

Change = Callable[[dict[str, Any]], object]


def first(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = value["dialogues"][0]
    return found


def messages(value: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = first(value)["sessions"][0]["messages"]
    return found


def question(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = first(value)["questions"][0]
    return found


BROKEN: list[tuple[str, Change, str, str]] = [
    ("no schema", lambda v: v.pop("schema"), "schema", "None"),
    ("other schema", lambda v: v.update(schema="x/1"), "schema", "'x/1'"),
    ("no dialogues", lambda v: v.pop("dialogues"), "dialogues", "missing"),
    ("dialogues an object", lambda v: v.update(dialogues={}), "dialogues", "dict, not a list"),
    ("dialogue a string", lambda v: v.update(dialogues=["d1"]), "dialogues[0]", "str, not an object"),
    ("id twice", lambda v: v["dialogues"].append(copy.deepcopy(first(v))), "dialogues[1].dialogue_id", "'d1'"),
    ("id a number", lambda v: first(v).update(dialogue_id=1), "dialogues[0].dialogue_id", "int, not text"),
    ("id blank", lambda v: first(v).update(dialogue_id=" "), "dialogues[0].dialogue_id", "blank"),
    ("no members", lambda v: first(v).update(members=[]), "dialogues[0].members", "empty"),
    ("member a number", lambda v: first(v).update(members=["Ana", 3]), "dialogues[0].members[1]", "int, not text"),
    ("member twice", lambda v: first(v).update(members=["Ana", "ana "]), "dialogues[0].members[1]", "twice"),
    ("member GROUP", lambda v: first(v).update(members=["GROUP"]), "dialogues[0].members[0]", "GROUP"),
    ("member blank", lambda v: first(v).update(members=["Ana", ""]), "dialogues[0].members[1]", "''"),
    ("member surrogate", lambda v: first(v).update(members=["\ud800"]), "dialogues[0].members[0]", "surrogate"),
    ("alias to nobody", lambda v: first(v)["aliases"].update(Al="Alan"), "dialogues[0].aliases.Al", "'Alan'"),
    ("sessions missing", lambda v: first(v).pop("sessions"), "dialogues[0].sessions", "missing"),
    ("no message at all", lambda v: first(v).update(sessions=[], questions=[]), "dialogues[0].sessions", "no message"),
    ("session without id", lambda v: first(v)["sessions"][0].pop("session_id"), "dialogues[0].sessions[0].session_id", "missing"),
    ("message id twice", lambda v: messages(v)[1].update(message_id="a"), "dialogues[0].sessions[0].messages[1].message_id", "'a'"),
    ("no speaker", lambda v: messages(v)[0].pop("speaker"), "dialogues[0].sessions[0].messages[0].speaker", "missing"),
    ("speaker GROUP", lambda v: messages(v)[0].update(speaker="GROUP"), "dialogues[0].sessions[0].messages[0].speaker", "GROUP"),
    ("text null", lambda v: messages(v)[0].update(text=None), "dialogues[0].sessions[0].messages[0].text", "NoneType"),
    ("text surrogate", lambda v: messages(v)[0].update(text="a\udfff"), "dialogues[0].sessions[0].messages[0].text", "surrogate"),
    ("time a number", lambda v: messages(v)[0].update(sent_at=5), "dialogues[0].sessions[0].messages[0].sent_at", "int"),
    ("question id twice", lambda v: first(v)["questions"].append(dict(question(v))), "dialogues[0].questions", "'q1'"),
    ("question blank", lambda v: question(v).update(text=""), "dialogues[0].questions[0].text", "blank"),
    ("answer a number", lambda v: question(v).update(answer=7), "dialogues[0].questions[0].answer", "int, not text"),
    ("option no pair", lambda v: question(v).update(options=["A"]), "dialogues[0].questions[0].options[0]", "pair"),
    ("evidence nowhere", lambda v: question(v).update(evidence_ids=["z"]), "dialogues[0].questions[0].evidence_ids[0]", "'z'"),
    ("unknown mode", lambda v: question(v).update(mode="tail"), "dialogues[0].questions[0].mode", "'tail'"),
]  # fmt: skip


def save(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def test_the_unbroken_file_is_read(tmp_path: Path) -> None:
    (dialogue,) = read_dialogues(save(tmp_path / "d.json", GOOD))
    assert dialogue.members == ("Ana", "Ben")
    assert dialogue.sessions[0].messages[1] == Message("b", "Ben", "", "", "s1", "", 1, "a")
    assert dialogue.questions[0].options == (("A", "Ana"),)


@pytest.mark.parametrize(("change", "position", "reason"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_broken_files_name_file_position_reason_and_fix(
    tmp_path: Path, change: Change, position: str, reason: str
) -> None:
    value = copy.deepcopy(GOOD)
    change(value)
    file = save(tmp_path / "d.json", value)
    with pytest.raises(InputError) as raised:
        read_dialogues(file)
    assert raised.value.where == f"{file}: {position}"
    assert reason in raised.value.what
    assert len(raised.value.fix) > 5


@pytest.mark.parametrize(
    ("content", "where", "reason"),
    [
        (b"", "", "empty"),
        (b" \n", "", "empty"),
        (b"{", ": line 1 column 2", "not valid JSON"),
        (b'{"schema":1,\n"schema":2}', "", "'schema' stands twice"),
        (b'{"a": NaN}', "", "NaN"),
        (b'{"a": "\xff"}', ": byte 7", "not UTF-8"),
        (b"[" * 100_000, "", "not valid JSON"),
        (b"[]", "", "list, not an object"),
    ],
)
def test_unreadable_files(tmp_path: Path, content: bytes, where: str, reason: str) -> None:
    file = tmp_path / "d.json"
    file.write_bytes(content)
    with pytest.raises(InputError) as raised:
        read_dialogues(file)
    assert raised.value.where == f"{file}{where}"
    assert reason in raised.value.what


def test_missing_path_and_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read_dialogues(tmp_path / "nothing.json")
    with pytest.raises(InputError, match=r"holds no \.json file"):
        read_dialogues(tmp_path)
    with pytest.raises(InputError, match="holds no dialogue"):
        read_dialogues(save(tmp_path / "d.json", {"schema": DIALOGUES_SCHEMA, "dialogues": []}))


def test_a_folder_is_read_in_name_order_and_ids_are_unique_over_it(tmp_path: Path) -> None:
    for name in ("b", "a"):
        value = copy.deepcopy(GOOD)
        first(value)["dialogue_id"] = name
        save(tmp_path / f"{name}.json", value)
    assert [d.dialogue_id for d in read_dialogues(tmp_path)] == ["a", "b"]
    save(tmp_path / "c.json", GOOD | {"dialogues": [first(GOOD) | {"dialogue_id": "a"}]})
    with pytest.raises(InputError) as raised:
        read_dialogues(tmp_path)
    assert str(tmp_path / "a.json") in raised.value.what
    assert str(tmp_path / "c.json") in raised.value.where


def test_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "d.json"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert len(read_dialogues(file)) == 1


def test_writing_and_reading_gives_the_same_dialogue(tmp_path: Path) -> None:
    said = (
        Message("a", "Zoë", " x\n👩‍👧 <|im_end|>\u2028", "2026-08-10T09:00", "s1", "general", 0),
        Message("b", "Ben", "", "", "s1", "", 1, "a"),
    )
    asked = Question("q", "Who?", "Zoë", "Q1", (("A", "Zoë"), ("B", "Ben")), "A", ("a",), ("Zoë", "GROUP"), "full")
    dialogue = Dialogue(
        "d", ("Zoë", "Ben"), (Session("s1", "2026-08-10", said),), (asked,), "en", {"Z": "Zoë"}, {"origin": "x"}
    )
    write_dialogues(tmp_path / "deep" / "d.json", [dialogue])
    assert read_dialogues(tmp_path / "deep" / "d.json") == [dialogue]


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    file = tmp_path / "d.json"
    write_json(file, {"old": 1})
    with pytest.raises(UnicodeEncodeError):
        write_json(file, {"new": "\ud800"})
    assert json.loads(file.read_text()) == {"old": 1}
    assert os.listdir(tmp_path) == ["d.json"]


def test_an_unwritable_place_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="choose a writable output folder"):
        write_json(tmp_path / "file" / "d.json", {})


@pytest.mark.parametrize(
    ("sizes", "window", "expected"),
    [((60,), 25, [25, 25, 10]), ((25, 26), 25, [25, 25, 1]), ((3, 0, 2), 2, [2, 1, 2]), ((2,), 1, [1, 1])],
)
def test_segments_never_span_sessions(sizes: tuple[int, ...], window: int, expected: list[int]) -> None:
    sessions = tuple(
        Session(
            f"s{k}", f"2026-08-1{k}", tuple(Message(f"{k}-{i}", "Ana", "x", "", f"s{k}", "", i) for i in range(size))
        )
        for k, size in enumerate(sizes)
    )
    segments = Dialogue("d", ("Ana",), sessions).segments(window)
    assert [len(segment.messages) for segment in segments] == expected
    assert [segment.index for segment in segments] == list(range(len(expected)))
    assert all({m.session_id for m in segment.messages} == {segment.session_id} for segment in segments)
    assert [m for segment in segments for m in segment.messages] == [
        m for session in sessions for m in session.messages
    ]
    assert segments[0].started_at == "2026-08-10"


def test_a_window_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="window is 0"):
        Dialogue("d", ("Ana",), ()).segments(0)
