"""Canonical dialogue files: one dialogue or a list of them in JSON, validated on reading, whole on writing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from writer_rl.configs.errors import InputError
from writer_rl.data.actions import GROUP
from writer_rl.data.files import Reader, json_files, read_json, write_json
from writer_rl.data.records import Dialogue, Message, Question, Session

DIALOGUES_SCHEMA = "writer-rl/dialogues/1"


def read_dialogues(path: str | Path) -> list[Dialogue]:
    """Read a canonical dialogue file, or every such file of a folder.

    Raises:
        InputError: A file is unreadable or breaks the format; the message names file, position and fix.
    """
    found: list[Dialogue] = []
    origin: dict[str, str] = {}
    for file in json_files(Path(path)):
        top = Reader(read_json(file), str(file), "")
        check_schema(top, DIALOGUES_SCHEMA)
        for child in top.children("dialogues"):
            dialogue = _dialogue(child)
            if dialogue.dialogue_id in origin:
                raise child.fail(
                    "dialogue_id", f"{dialogue.dialogue_id!r} stands in {origin[dialogue.dialogue_id]} already",
                    "give every dialogue its own id",
                )  # fmt: skip
            origin[dialogue.dialogue_id] = str(file)
            found.append(dialogue)
    if not found:
        raise InputError(str(path), "holds no dialogue", "give at least one")
    return found


def check_schema(top: Reader, expected: str) -> None:
    """Refuse a file of another format, by its `schema` string."""
    schema = top.value.get("schema")
    if schema != expected:
        raise InputError(
            f"{top.file}: schema",
            f"is {schema!r}",
            f"use a file of schema {expected!r} (`import` makes one from other formats)",
        )


def _dialogue(reader: Reader) -> Dialogue:
    dialogue_id = reader.text("dialogue_id", blank=False)
    members = reader.texts("members")
    if not members:
        raise reader.fail("members", "is empty", "name at least one member")
    folded = [name.strip().casefold() for name in members]
    for index, name in enumerate(members):
        if not name.strip() or name.strip() == GROUP:
            raise reader.fail(f"members[{index}]", f"is {name!r}", f"give a name other than {GROUP}")
        if folded.index(folded[index]) != index:
            raise reader.fail(f"members[{index}]", f"{name!r} stands twice", "name every member once")
    aliases = reader.mapping("aliases", {})
    for alias, member in aliases.items():
        if member not in members:
            raise reader.fail(f"aliases.{alias}", f"leads to {member!r}, who is no member", "point it at a member")
    message_ids: set[str] = set()
    sessions = tuple(_session(child, message_ids) for child in reader.children("sessions"))
    if not any(session.messages for session in sessions):
        raise reader.fail("sessions", "hold no message", "give at least one message")
    questions = tuple(_question(child, message_ids) for child in reader.children("questions", []))
    repeated = {q.question_id for q in questions if sum(p.question_id == q.question_id for p in questions) > 1}
    if repeated:
        raise reader.fail(
            "questions", f"question_id {sorted(repeated)[0]!r} stands twice", "give every question its own id"
        )
    return Dialogue(
        dialogue_id, members, sessions, questions, reader.text("language", ""), aliases, reader.mapping("meta", {})
    )


def _session(reader: Reader, message_ids: set[str]) -> Session:
    session_id = reader.text("session_id", blank=False)
    messages = []
    for position, child in enumerate(reader.children("messages")):
        message_id = child.text("message_id", blank=False)
        if message_id in message_ids:
            raise child.fail("message_id", f"{message_id!r} stands twice", "give every message its own id")
        message_ids.add(message_id)
        if child.text("speaker", blank=False).strip() == GROUP:
            raise child.fail("speaker", f"is {GROUP}, which is kept for the group's records", "rename the speaker")
        message = Message(
            message_id, child.text("speaker", blank=False), child.text("text"), child.text("sent_at", ""), session_id,
            child.text("channel", ""), position, child.text("reply_to", ""),
        )  # fmt: skip
        messages.append(message)
    return Session(session_id, reader.text("started_at", ""), tuple(messages))


def _question(reader: Reader, message_ids: set[str]) -> Question:
    options = []
    for index, pair in enumerate(reader.items("options", [])):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise reader.fail(f"options[{index}]", "is not a pair", 'give ["A", "text"]')
        options.append((pair[0], pair[1]))
    evidence = reader.texts("evidence_ids", [])
    for index, message_id in enumerate(evidence):
        if message_id not in message_ids:
            raise reader.fail(
                f"evidence_ids[{index}]", f"{message_id!r} is no message", "name a message of the dialogue"
            )
    mode = reader.text("mode", "head")
    if mode not in ("head", "full"):
        raise reader.fail("mode", f"is {mode!r}", "use head or full")
    return Question(
        reader.text("question_id", blank=False), reader.text("text", blank=False), reader.text("answer"),
        reader.text("category", ""), tuple(options), reader.text("correct_option", ""), evidence,
        reader.texts("rows", []), mode,
    )  # fmt: skip


def dialogue_payload(dialogue: Dialogue) -> dict[str, Any]:
    """The dialogue as a JSON object of the canonical format."""
    return {
        "dialogue_id": dialogue.dialogue_id,
        "members": list(dialogue.members),
        "language": dialogue.language,
        "aliases": dict(dialogue.aliases),
        "sessions": [
            {
                "session_id": session.session_id,
                "started_at": session.started_at,
                "messages": [
                    {
                        "message_id": m.message_id, "speaker": m.speaker, "text": m.text, "sent_at": m.sent_at,
                        "channel": m.channel, "reply_to": m.reply_to,
                    }
                    for m in session.messages
                ],
            }
            for session in dialogue.sessions
        ],
        "questions": [
            {
                "question_id": q.question_id, "text": q.text, "answer": q.answer, "category": q.category,
                "options": [list(pair) for pair in q.options], "correct_option": q.correct_option,
                "evidence_ids": list(q.evidence_ids), "rows": list(q.rows), "mode": q.mode,
            }
            for q in dialogue.questions
        ],
        "meta": dict(dialogue.meta),
    }  # fmt: skip


def write_dialogues(path: str | Path, dialogues: Sequence[Dialogue]) -> None:
    """Write a canonical dialogue file, whole or not at all."""
    payload = {"schema": DIALOGUES_SCHEMA, "dialogues": [dialogue_payload(d) for d in dialogues]}
    write_json(Path(path), payload)
