"""SpeakerMem files: group chats with questions ("networks") and teacher traces ("trajectories").

An import keeps every id it can, counts what it had to repair, and refuses what it cannot read. Session topics, and whatever
else labels a chat, are left behind; questions go to `Dialogue.questions` alone. A trajectory keeps its actions and entry ids
only: its states are replayed by our own memory and compared with the stored ones, transition by transition.

Imported traces carry our own `PROMPT_VERSION`: their actions satisfy our contract, and the prompts around them are rendered
anew from the replayed states. The prompt version of the origin is kept in `TeacherTrace.teacher`.

Source: the released SpeakerMem-R1 data (arXiv 2609.26780); the schema string differs between its data and its own loader, and
both are accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from writer_rl.configs.errors import InputError
from writer_rl.data.actions import GROUP, KINDS, LAYERS, Action, shape_errors, to_action
from writer_rl.data.contract import PROMPT_VERSION
from writer_rl.data.files import Reader, read_json
from writer_rl.data.memory import MemoryState
from writer_rl.data.records import Dialogue, Message, Question, Session
from writer_rl.data.trace_checks import check_steps, detect_language
from writer_rl.data.traces import ReplayedStep, TeacherTrace, TraceStep, replay

NETWORK_SCHEMAS = ("socialmembench-real-v4-source/1",)
TRAJECTORY_SCHEMAS = ("speakermem-v4-trajectories/1", "speakermem-trajectories/1")
RECORD_FIELDS = ("content", "owner", "source", "layer", "kind", "links", "superseded_by")

_SHORT_LAYERS = {layer.rsplit("_", 1)[-1]: layer for layer in LAYERS}


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """A place where a replayed state and a stored state differ.

    Args:
        transition: 0-based transition of the file.
        field: What differs, for example ``post_state.entries[ab12].owner``.
        expected: Value in the file.
        found: Value of the replay.
    """

    transition: int
    field: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"transitions[{self.transition}].{self.field}: the file has {self.expected}, the replay {self.found}"


@dataclass(frozen=True, slots=True)
class ImportedNetwork:
    """A chat with its questions, and how often each repair was needed."""

    file: str
    dialogue: Dialogue
    repairs: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ImportedTrajectory:
    """A chat, its teacher trace with findings, repairs, and the outcome of the replay."""

    file: str
    dialogue: Dialogue
    trace: TeacherTrace
    repairs: Mapping[str, int]
    differences: tuple[ReplayDifference, ...]

    @property
    def num_transitions(self) -> int:
        return len(self.trace.steps)

    @property
    def num_replayed(self) -> int:
        """Transitions whose stored state the replay reproduces."""
        return self.num_transitions - len({difference.transition for difference in self.differences})


def import_network(path: str | Path) -> ImportedNetwork:
    """Read one network file.

    Raises:
        InputError: The file is unreadable, of another schema or breaks the format; file, position and fix are named.
    """
    top = _open(path, NETWORK_SCHEMAS, "a SpeakerMem network")
    repairs: Counter[str] = Counter()
    meta = Reader(top.mapping("meta", {}), top.file, "meta")
    dialogue_id = meta.text("network_id", Path(path).stem, blank=False)
    sessions: list[Session] = []
    indexes: dict[int, str] = {}
    seen: set[str] = set()
    for child in top.children("sessions"):
        session_id = _new_session_id(child, sessions)
        indexes[child.number("session_index", len(sessions) + 1)] = session_id
        messages = tuple(
            Message(
                _new_message_id(turn, "turn", turn.text("turn", blank=False), seen), _speaker(turn), turn.text("content"),
                turn.text("ts", ""), session_id, "", position, turn.text("reply_to", ""),
            )
            for position, turn in enumerate(child.children("turns"))
        )  # fmt: skip
        sessions.append(Session(session_id, child.text("ts", ""), messages))
    dialogue = _dialogue(top, dialogue_id, top.texts("speakers"), "speakers", sessions, repairs)
    unknown = [m.message_id for s in dialogue.sessions for m in s.messages if m.reply_to and m.reply_to not in seen]
    repairs["reply_to_nowhere"] += len(unknown)
    return ImportedNetwork(str(path), _with_questions(dialogue, top, indexes, repairs), _counted(repairs))


def import_trajectory(path: str | Path) -> ImportedTrajectory:
    """Read one trajectory file, replay it and check it.

    Returns:
        The import; `differences` is empty if the replay reproduces the state before and after every transition.

    Raises:
        InputError: The file is unreadable, of another schema, breaks the format, or its actions are refused by our contract.
    """
    top = _open(path, TRAJECTORY_SCHEMAS, "a SpeakerMem trajectory")
    repairs: Counter[str] = Counter()
    dialogue_id = top.text("network_id", blank=False)
    transitions = list(top.children("transitions"))
    if not transitions:
        raise top.fail("transitions", "is empty", "give at least one transition")
    sessions, indexes, sizes = _sessions_of(transitions, repairs)
    members = _members_of(top, sessions)
    dialogue = _dialogue(top, dialogue_id, members, "final_state.roster", sessions, repairs)
    dialogue = _with_questions(dialogue, top, indexes, repairs)
    window = _window_of(top, dialogue, sizes)
    steps = tuple(_step(transition, index, repairs) for index, transition in enumerate(transitions))
    trace = TeacherTrace(dialogue_id, _teacher(top), PROMPT_VERSION, window, steps)
    replayed: list[ReplayedStep] = []
    try:
        replayed.extend(replay(dialogue, trace, window, rules="paper"))
    except InputError as error:
        raise InputError(f"{top.file}: transitions: {error.where}", error.what, error.fix) from None
    differences = [
        difference
        for index, (transition, step) in enumerate(zip(transitions, replayed, strict=True))
        for difference in _state_differences(transition, index, step)
    ]
    trace = replace(trace, findings=check_steps(replayed, dialogue.language))
    return ImportedTrajectory(str(path), dialogue, trace, _counted(repairs), tuple(differences))


# --- chats ------------------------------------------------------------------------------------------------------------


def _open(path: str | Path, schemas: Sequence[str], what: str) -> Reader:
    top = Reader(read_json(Path(path)), str(path), "")
    schema = top.value.get("schema")
    if schema not in schemas:
        raise top.fail("schema", f"is {schema!r}", f"give {what}, schema {' or '.join(map(repr, schemas))}")
    return top


def _counted(repairs: Counter[str]) -> dict[str, int]:
    return {code: count for code, count in sorted(repairs.items()) if count}


def _new_session_id(reader: Reader, sessions: Sequence[Session]) -> str:
    session_id = reader.text("session_id", blank=False)
    if any(session.session_id == session_id for session in sessions):
        raise reader.fail(
            "session_id", f"{session_id!r} stands twice", "give every session its own id, its parts in a row"
        )
    return session_id


def _new_message_id(reader: Reader, key: str, message_id: str, seen: set[str]) -> str:
    if message_id in seen:
        raise reader.fail(key, f"{message_id!r} stands twice", "give every message its own id")
    seen.add(message_id)
    return message_id


def _speaker(reader: Reader) -> str:
    speaker = reader.text("speaker", blank=False)
    if speaker.strip() == GROUP:
        raise reader.fail("speaker", f"is {GROUP}, which is kept for the group's records", "rename the speaker")
    return speaker


def _dialogue(
    top: Reader,
    dialogue_id: str,
    members: Sequence[str],
    where: str,
    sessions: Sequence[Session],
    repairs: Counter[str],
) -> Dialogue:
    folded: dict[str, str] = {}
    for name in members:
        if not name.strip() or name.strip() == GROUP or name.strip().casefold() in folded:
            raise top.fail(
                where, f"holds {name!r}, blank, reserved or twice", "give every member one name of their own"
            )
        folded[name.strip().casefold()] = name
    speakers = dict.fromkeys(m.speaker for session in sessions for m in session.messages)
    missing = [name for name in speakers if name.strip().casefold() not in folded]
    repairs["speaker_not_listed"] += len(missing)
    if not speakers:
        raise top.fail("sessions", "hold no message", "give at least one message")
    language = detect_language(m.text for session in sessions for m in session.messages)
    meta = {"origin": "speakermem", "file": Path(top.file).name}
    return Dialogue(dialogue_id, (*members, *missing), tuple(sessions), (), language, {}, meta)


def _with_questions(dialogue: Dialogue, top: Reader, indexes: Mapping[int, str], repairs: Counter[str]) -> Dialogue:
    """The dialogue with the file's questions; `indexes` leads from 1-based session numbers to session ids."""
    questions: list[Question] = []
    for child in top.children("qa_pairs", []):
        question_id = child.text("id", blank=False)
        if any(question.question_id == question_id for question in questions):
            raise child.fail("id", f"{question_id!r} stands twice", "give every question its own id")
        evidence: dict[str, None] = {}
        for anchor in child.children("evidence_anchors", []):
            message_id = _anchored(anchor, dialogue, indexes, repairs)
            if message_id:
                evidence[message_id] = None
        options = _options(child)
        correct = child.text("correct_option", "")
        if options and correct not in dict(options):
            raise child.fail("correct_option", f"is {correct!r}", f"give one of {', '.join(dict(options))}")
        questions.append(
            Question(
                question_id, child.text("question", blank=False), child.text("answer"), child.text("category", ""), options,
                correct, tuple(evidence),
            )
        )  # fmt: skip
    return replace(dialogue, questions=tuple(questions))


def _options(reader: Reader) -> tuple[tuple[str, str], ...]:
    options = reader.value.get("options", [])
    if options == []:
        return ()
    letters = ("A", "B", "C", "D")
    if not isinstance(options, Mapping) or tuple(sorted(options)) != letters:
        raise reader.fail("options", "are neither [] nor an object of the letters A to D", "give all four, or []")
    texts = Reader(options, reader.file, f"{reader.position}.options")
    return tuple((letter, texts.text(letter)) for letter in letters)


def _anchored(anchor: Reader, dialogue: Dialogue, indexes: Mapping[int, str], repairs: Counter[str]) -> str:
    """The message an anchor means: by turn id, else by session, speaker and excerpt if just one fits, else none."""
    messages = [m for session in dialogue.sessions for m in session.messages]
    turn_id = anchor.text("turn_id", "")
    if any(m.message_id == turn_id for m in messages):
        return turn_id
    excerpt = " ".join(anchor.text("message_excerpt", "").split()).rstrip("….")
    session_id = indexes.get(anchor.number("session_index", 0), "")
    speaker = anchor.text("speaker_display_name", "")
    fitting = [
        m.message_id
        for m in messages
        if excerpt and m.session_id == session_id and m.speaker == speaker and excerpt in " ".join(m.text.split())
    ]
    repairs["anchor_by_excerpt" if len(fitting) == 1 else "anchor_unresolved"] += 1
    return fitting[0] if len(fitting) == 1 else ""


# --- traces -----------------------------------------------------------------------------------------------------------


def _sessions_of(
    transitions: Sequence[Reader], repairs: Counter[str]
) -> tuple[list[Session], dict[int, str], list[tuple[str, int]]]:
    """Sessions, their 1-based numbers, and (session id, number of messages) of every transition."""
    sessions: list[Session] = []
    indexes: dict[int, str] = {}
    sizes: list[tuple[str, int]] = []
    seen: set[str] = set()
    for transition in transitions:
        session_id = transition.text("session_id", blank=False)
        if not sessions or sessions[-1].session_id != session_id:
            _new_session_id(transition, sessions)
            sessions.append(Session(session_id, transition.text("ts", ""), ()))
            indexes[transition.number("source_session_index", len(sessions) - 1) + 1] = session_id
        known = sessions[-1].messages
        added: list[Message] = []
        for child in transition.children("messages"):
            if child.text("session", session_id) != session_id:
                raise child.fail("session", f"is not {session_id!r}", "keep a transition within one session")
            message_id = child.text("msg_id", blank=False)
            if message_id.isdecimal():  # hand-made files count anew in every session
                message_id = f"{session_id}_t{int(message_id):03d}"
                repairs["message_id"] += 1
            message_id = _new_message_id(child, "msg_id", message_id, seen)
            position = len(known) + len(added)
            added.append(
                Message(
                    message_id, _speaker(child), child.text("content"), child.text("ts", ""), session_id, "", position
                )
            )
        if not added:
            raise transition.fail("messages", "is empty", "give the messages of the segment")
        sessions[-1] = replace(sessions[-1], messages=(*known, *added))
        sizes.append((session_id, len(added)))
    return sessions, indexes, sizes


def _members_of(top: Reader, sessions: Sequence[Session]) -> tuple[str, ...]:
    if "final_state" in top.value:
        roster = Reader(top.mapping("final_state"), top.file, "final_state").texts("roster", [])
        if roster:
            return roster
    return tuple(dict.fromkeys(m.speaker for session in sessions for m in session.messages))


def _window_of(top: Reader, dialogue: Dialogue, sizes: Sequence[tuple[str, int]]) -> int:
    """The window that cuts the sessions exactly as the transitions do: the declared one, else their longest."""
    for window in (top.number("window_size", 0), max(size for _, size in sizes)):
        if window and [(s.session_id, len(s.messages)) for s in dialogue.segments(window)] == list(sizes):
            return window
    raise top.fail("window_size", "does not cut the sessions as the transitions do", "mend the transitions' messages")


def _teacher(top: Reader) -> str:
    teacher = top.value.get("teacher", {})
    model = teacher.get("model", "") if isinstance(teacher, Mapping) else teacher
    if not isinstance(model, str):
        raise top.fail("teacher.model", f"is {type(model).__name__}, not text", "give the teacher's name")
    return f"{model or 'unknown'} (speakermem prompt {top.text('prompt_version', '') or 'unknown'})"


def _step(transition: Reader, index: int, repairs: Counter[str]) -> TraceStep:
    actions = tuple(_action(child, repairs) for child in transition.children("actions"))
    if not actions:
        raise transition.fail("actions", "is empty", "give a single NOOP where the teacher wrote nothing")
    writes = tuple(action for action in actions if action.action != "NOOP")
    if writes and len(writes) < len(actions):
        raise transition.fail("actions", "holds a NOOP beside other actions", "drop the NOOP")
    return TraceStep(index, writes, _entry_ids(transition, writes, repairs))


def _action(reader: Reader, repairs: Counter[str]) -> Action:
    """One action; a layer or kind in another spelling is respelt and counted, an unknown one is refused."""
    item = dict(reader.value)
    if item.get("action") == "ADD":
        for key in ("kind", "utype"):
            if isinstance(item.get(key), str) and item[key] not in KINDS and item[key].strip().casefold() in KINDS:
                item[key] = item[key].strip().casefold()
                repairs["kind_spelling"] += 1
        layer = item["layer"].strip().casefold() if isinstance(item.get("layer"), str) else None
        if layer is not None and item["layer"] not in LAYERS and (layer in LAYERS or layer in _SHORT_LAYERS):
            item["layer"] = _SHORT_LAYERS.get(layer, layer)
            repairs["layer_spelling"] += 1
    problems = shape_errors(item)
    if problems:
        raise reader.fail("", problems[0].message, "write an action of the contract")
    return to_action(item)


def _entry_ids(transition: Reader, writes: Sequence[Action], repairs: Counter[str]) -> tuple[str, ...]:
    """Ids of the records that the actions created: as reported, else found by content in the state afterwards."""
    report = Reader(transition.mapping("report", {}), transition.file, f"{transition.position}.report")
    created = report.texts("created_ids", [])
    if len(created) == len(writes):
        if len(set(created)) < len(created) or not all(entry_id.strip() for entry_id in created):
            raise report.fail("created_ids", "hold an id twice or a blank one", "give every record its own id")
        return created
    repairs["entry_ids_from_state"] += 1
    before = {entry.text("entry_id") for entry in _entries(transition, "pre_state")}
    new = [entry for entry in _entries(transition, "post_state") if entry.text("entry_id", blank=False) not in before]
    found = []
    for action in writes:
        same = [entry.text("entry_id") for entry in new if entry.text("content").strip() == action.content]
        if len(same) != 1:
            raise report.fail(
                "created_ids", f"are {len(created)} for {len(writes)} writes, and the states do not tell whose is whose",
                "give one id per ADD or UPDATE, in order",
            )  # fmt: skip
        found += same
    return tuple(found)


# --- states -----------------------------------------------------------------------------------------------------------


def _state(transition: Reader, key: str) -> Reader:
    return Reader(transition.mapping(key), transition.file, f"{transition.position}.{key}")


def _entries(transition: Reader, key: str) -> list[Reader]:
    return list(_state(transition, key).children("entries"))


def _state_differences(transition: Reader, index: int, step: ReplayedStep) -> Iterable[ReplayDifference]:
    for key, memory in (("pre_state", step.before), ("post_state", step.after)):
        if key == "post_state" or key in transition.value:
            for field, expected, found in _compare(_state(transition, key), memory):
                if expected != found:
                    yield ReplayDifference(index, f"{key}.{field}", repr(expected), repr(found))


def _compare(state: Reader, memory: MemoryState) -> Iterable[tuple[str, Any, Any]]:
    """(field, stored value, replayed value) of everything that must agree; order of entries does not matter."""
    stored = {entry.text("entry_id", blank=False): entry for entry in state.children("entries")}
    yield "entries", sorted(stored), sorted(record.entry_id for record in memory.records)
    heads = [entry.text("entry_id") for entry in state.children("heads", [])]
    yield "heads", sorted(heads), sorted(record.entry_id for record in memory.heads())
    edges = [(edge.text("old"), edge.text("new")) for edge in state.children("update_edges", [])]
    yield "update_edges", sorted(edges), sorted(memory.update_edges())
    for entry_id, entry in stored.items():
        record = memory.find(entry_id)
        if record is not None:
            for name in RECORD_FIELDS:
                yield f"entries[{entry_id}].{name}", _stored_field(entry, name), getattr(record, name)


def _stored_field(entry: Reader, name: str) -> Any:
    if name == "links":
        return entry.texts("links", [])
    if name == "kind":
        return entry.text("kind" if "kind" in entry.value else "utype", "")
    return entry.text(name, "")
