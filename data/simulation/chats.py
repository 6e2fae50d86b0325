"""Seeded group chats whose true memory, reference trace and questions are known exactly.

A chat is a sequence of sessions. Each session holds a few messages that establish or move on a matter, between side talk.
What a message establishes decides the reference action: ADD for a new matter, UPDATE for one that has moved on, nothing for
side talk and for matters that are merely said again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from writer_rl.configs.schema import SimulationConfig, TeacherFaults
from writer_rl.data.actions import GROUP, Action, action_key
from writer_rl.data.contract import PROMPT_VERSION
from writer_rl.data.records import Dialogue, Message, Question, Session
from writer_rl.data.simulation.vocabulary import (
    GROUP_MATTERS,
    HELDOUT_NAMES,
    NORM_MATTERS,
    PERSON_MATTERS,
    SIDE_TALK,
    SIDE_TALK_NAMED,
    STANCE_MATTERS,
    TRAIN_NAMES,
    TRAIT_MATTERS,
    MatterKind,
)
from writer_rl.data.traces import TeacherTrace, TraceStep

TRUTH = "simulated truth"
TEACHER = "simulated teacher"
# One session per segment: the window is at least as long as any session.
WINDOW = 25
# Fruitless draws after which a session that finds no free matter any more is left shorter.
_MAX_BARREN_DRAWS = 100


@dataclass(slots=True)
class _Matter:
    """A matter of the true world: one update chain of the true memory."""

    kind: MatterKind
    owner: str
    source: str
    layer: str
    values: list[str]
    entry_ids: list[str]
    message_ids: list[str]

    def content(self, version: int = -1) -> str:
        return self.kind.content.format(p=self.owner, v=self.values[version])


@dataclass(slots=True)
class _World:
    """True state of one chat while it is being made."""

    rng: random.Random
    members: Sequence[str]
    matters: list[_Matter] = field(default_factory=list)
    num_records: int = 0

    def next_id(self) -> str:
        self.num_records += 1
        return f"m{self.num_records}"

    def taken(self, owner: str, key: str) -> bool:
        return any(m.owner == owner and m.kind.key == key for m in self.matters)

    def fresh_value(self, kind: MatterKind, but: Sequence[str] = ()) -> str:
        return self.rng.choice([value for value in kind.values if value not in but])


@dataclass(frozen=True, slots=True)
class _Line:
    """A message to be, with the action it calls for and the matter it concerns."""

    speaker: str
    text: str
    action: Action | None = None
    entry_id: str = ""
    matter: _Matter | None = None


@dataclass(frozen=True, slots=True)
class SimulatedChat:
    """A dialogue with the trace that keeps its memory perfectly, and the trace of a teacher that errs as configured."""

    dialogue: Dialogue
    trace: TeacherTrace
    teacher_trace: TeacherTrace


class _Teacher:
    """Labels the same messages as the truth does, with the faults that teachers are known for, in a memory of its own."""

    def __init__(self, faults: TeacherFaults, seed: int) -> None:
        self._faults, self._rng = faults, random.Random(f"teacher/{seed}")
        self._num_records = 0
        self._heads: dict[int, str] = {}

    def write(self, lines: Sequence[_Line]) -> tuple[Action, ...]:
        """Actions for the messages of one session."""
        written: dict[tuple[str, ...], Action] = {}
        for line in lines:
            action = self._noise(line) if line.action is None else self._matter(line, line.action)
            # A faulty list must still be a valid one: nothing is written twice.
            if action is None or action_key(action) in written:
                continue
            written[action_key(action)] = action
            self._num_records += 1
            if line.matter is not None:
                self._heads[id(line.matter)] = f"m{self._num_records}"
        return tuple(written.values())

    def _noise(self, line: _Line) -> Action | None:
        if self._rng.random() >= self._faults.written_noise:
            return None
        content = f"{line.speaker} says {line.text}"
        return Action("ADD", line.speaker, line.speaker, "per_speaker_core", "observation", content)

    def _matter(self, line: _Line, action: Action) -> Action:
        matter = line.matter
        assert matter is not None
        if action.action == "UPDATE":
            if self._rng.random() >= self._faults.missed_update:
                return replace(action, entry_id=self._heads[id(matter)])
            return Action("ADD", matter.owner, matter.source, matter.layer, matter.kind.kind, action.content)
        told = action.owner not in (GROUP, action.source)
        if told and self._rng.random() < self._faults.misfiled_hearsay:
            return replace(action, owner=action.source, layer="per_speaker_core")
        return action


def _others(world: _World, name: str) -> list[str]:
    return [member for member in world.members if member != name]


def _add(world: _World, kind: MatterKind, owner: str, speaker: str, layer: str, text: str, value: str) -> _Line:
    matter = _Matter(kind, owner, speaker, layer, [value], [world.next_id()], [])
    world.matters.append(matter)
    action = Action("ADD", owner, speaker, layer, kind.kind, matter.content())
    return _Line(speaker, text, action, matter.entry_ids[0], matter)


def _person_line(world: _World, kind: MatterKind, owner: str, *, told: bool, value: str | None = None) -> _Line:
    value = value or world.fresh_value(kind)
    speaker = world.rng.choice(_others(world, owner)) if told else owner
    text = world.rng.choice(kind.told if told else kind.said).format(p=owner, v=value)
    return _add(world, kind, owner, speaker, "per_speaker_profile" if told else "per_speaker_core", text, value)


def _group_line(world: _World, kind: MatterKind, layer: str) -> _Line:
    value, speaker = world.fresh_value(kind), world.rng.choice(world.members)
    return _add(world, kind, GROUP, speaker, layer, world.rng.choice(kind.said).format(v=value), value)


def _update_line(world: _World, matter: _Matter, *, told: bool) -> _Line:
    value = world.fresh_value(matter.kind, matter.values)
    matter.values.append(value)
    if matter.owner == GROUP:
        speaker, wording = world.rng.choice(world.members), matter.kind.moved
    elif told:
        speaker, wording = world.rng.choice(_others(world, matter.owner)), matter.kind.told_moved
    else:
        speaker, wording = matter.owner, matter.kind.moved
    action = Action("UPDATE", entry_id=matter.entry_ids[-1], content=matter.content())
    matter.entry_ids.append(world.next_id())
    text = world.rng.choice(wording).format(p=matter.owner, v=value)
    return _Line(speaker, text, action, matter.entry_ids[-1], matter)


def _side_line(world: _World) -> _Line:
    speaker = world.rng.choice(world.members)
    if world.rng.random() < 0.3:
        return _Line(speaker, world.rng.choice(SIDE_TALK_NAMED).format(p=world.rng.choice(_others(world, speaker))))
    return _Line(speaker, world.rng.choice(SIDE_TALK))


def _restated_line(world: _World, matter: _Matter) -> _Line | None:
    """A matter that memory holds, said again unchanged: it calls for no action."""
    if matter.owner == GROUP:
        return _Line(world.rng.choice(world.members), world.rng.choice(matter.kind.said).format(v=matter.values[-1]))
    if not matter.kind.said:
        return None
    return _Line(matter.owner, world.rng.choice(matter.kind.said).format(v=matter.values[-1]))


def _new_matter_lines(world: _World, config: SimulationConfig, room: int) -> list[_Line]:
    """One new matter, or two that disagree where the session has room for both; nothing if no matter is free."""
    rng = world.rng
    if rng.random() < config.group_share:
        kinds = [(kind, "group_interaction") for kind in GROUP_MATTERS] + [
            (kind, "group_insight") for kind in NORM_MATTERS
        ]
        free = [pair for pair in kinds if not world.taken(GROUP, pair[0].key)]
        if free:
            return [_group_line(world, *rng.choice(free))]
    owner = rng.choice(world.members)
    if rng.random() < config.disagreement_share and room >= 2:
        kind = rng.choice(STANCE_MATTERS)
        pair = [name for name in rng.sample(list(world.members), 2) if not world.taken(name, kind.key)]
        if len(pair) == 2:
            first = _person_line(world, kind, pair[0], told=False)
            contrary = world.fresh_value(kind, [first.matter.values[0]] if first.matter else [])
            return [first, _person_line(world, kind, pair[1], told=False, value=contrary)]
    if rng.random() < config.hearsay_share:
        kind = rng.choice(TRAIT_MATTERS if rng.random() < 0.4 else PERSON_MATTERS)
        if not world.taken(owner, kind.key):
            return [_person_line(world, kind, owner, told=True)]
    free_kinds = [kind for kind in PERSON_MATTERS if not world.taken(owner, kind.key)]
    return [_person_line(world, rng.choice(free_kinds), owner, told=False)] if free_kinds else []


def _session_lines(world: _World, config: SimulationConfig) -> list[_Line]:
    rng = world.rng
    num_messages = rng.randint(*config.messages)
    old = list(world.matters)
    lines: list[_Line] = []
    if rng.random() >= config.noop_share:
        wanted = rng.randint(*config.matters)
        movable = [m for m in old if m.kind.moved and len(m.values) < len(m.kind.values)]
        barren = 0
        while len(lines) < wanted and barren < _MAX_BARREN_DRAWS:
            if movable and rng.random() < config.update_share:
                matter = movable.pop(rng.randrange(len(movable)))
                told = bool(matter.kind.told_moved) and rng.random() < config.hearsay_share
                lines.append(_update_line(world, matter, told=told))
            else:
                new = _new_matter_lines(world, config, num_messages - len(lines))
                barren += not new
                lines += new
        touched = [line.matter for line in lines]
        still = [m for m in old if all(m is not t for t in touched)]
        if still and len(lines) < num_messages and rng.random() < 0.15:
            restated = _restated_line(world, rng.choice(still))
            lines += [restated] if restated else []
    slots = sorted(rng.sample(range(max(num_messages, len(lines))), len(lines)))
    placed = dict(zip(slots, lines, strict=True))
    return [placed.get(i) or _side_line(world) for i in range(max(num_messages, len(lines)))]


def _questions(world: _World, dialogue_id: str, count: int) -> tuple[Question, ...]:
    """Questions whose answers the true memory holds: present value, changed value, who said it, how it changed."""
    rng = world.rng
    pool: list[tuple[str, str, str, _Matter, str]] = []
    for matter in world.matters:
        kind = matter.kind
        category = "current_state" if len(matter.values) > 1 else ("group" if matter.owner == GROUP else "single_fact")
        pool.append((category, kind.question.format(p=matter.owner), matter.values[-1], matter, "head"))
        if len(matter.values) > 1:
            asked = f"How did the answer change over time: {kind.question.format(p=matter.owner)}"
            pool.append(("how_changed", asked, " then ".join(matter.values), matter, "full"))
        if matter.layer == "per_speaker_profile" and len(matter.values) == 1:
            asked = f"Who said that {matter.content()}?"
            pool.append(("who_said", asked, matter.source, matter, "head"))
    rng.shuffle(pool)
    # Matters that changed are asked first: they are what a verbatim search gets wrong.
    pool.sort(key=lambda item: item[0] not in ("current_state", "how_changed"))
    return tuple(
        Question(
            f"{dialogue_id}-q{i + 1}",
            text,
            answer,
            category,
            evidence_ids=tuple(matter.message_ids),
            rows=(),
            mode=mode,
        )
        for i, (category, text, answer, matter, mode) in enumerate(pool[:count])
    )


def simulate_chat(dialogue_id: str, seed: int, names: Sequence[str], config: SimulationConfig) -> SimulatedChat:
    """Make one chat with its true memory.

    Args:
        dialogue_id: Id of the dialogue.
        seed: Seeds everything; the same arguments give the same chat.
        names: Names to draw members from.
        config: Sizes and shares.

    Returns:
        The dialogue and the reference trace; replaying the trace gives the true memory after every segment.
    """
    rng = random.Random(seed)
    world = _World(rng, rng.sample(list(names), rng.randint(*config.members)))
    start = datetime(2026, rng.randint(1, 9), rng.randint(1, 28), rng.randint(8, 20))
    sessions: list[Session] = []
    steps: list[TraceStep] = []
    teacher, teacher_steps = _Teacher(config.teacher_faults, seed), []
    for index in range(rng.randint(*config.sessions)):
        session_id = f"s{index + 1}"
        lines = _session_lines(world, config)
        messages = []
        for position, line in enumerate(lines):
            message_id = f"{session_id}-{position + 1}"
            if line.matter is not None:
                line.matter.message_ids.append(message_id)
            sent_at = (start + timedelta(minutes=3 * position)).isoformat()
            messages.append(Message(message_id, line.speaker, line.text, sent_at, session_id, position=position))
        sessions.append(Session(session_id, start.isoformat(), tuple(messages)))
        actions = tuple(line.action for line in lines if line.action)
        steps.append(TraceStep(index, actions))
        teacher_steps.append(TraceStep(index, teacher.write(lines)))
        start += timedelta(days=rng.randint(1, 6))
    dialogue = Dialogue(
        dialogue_id, tuple(world.members), tuple(sessions), _questions(world, dialogue_id, config.questions), "en",
        meta={"seed": seed},
    )  # fmt: skip
    return SimulatedChat(
        dialogue,
        TeacherTrace(dialogue_id, TRUTH, PROMPT_VERSION, WINDOW, tuple(steps)),
        TeacherTrace(dialogue_id, TEACHER, PROMPT_VERSION, WINDOW, tuple(teacher_steps)),
    )


def simulate_split(config: SimulationConfig, split: str) -> Iterator[SimulatedChat]:
    """All chats of `train` or `heldout`, one at a time.

    The two splits use different seeds and different names; chat i does not depend on how many are made.
    """
    count, names, base = {
        "train": (config.num_train, TRAIN_NAMES, 0),
        "heldout": (config.num_heldout, HELDOUT_NAMES, 1),
    }[split]
    for index in range(count):
        seed = random.Random(f"{config.seed}/{split}/{base}/{index}").getrandbits(48)
        yield simulate_chat(f"{split}-{index:05d}", seed, names, config)
