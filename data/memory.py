"""The two tracks of memory as one immutable value.

System 1 keeps every message verbatim; System 2 keeps derived records. Every change returns a new state that shares its
parts with the old one, so that forking a trajectory is a matter of keeping a reference.

Source: specification §2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from writer_rl.data.actions import GROUP, ActionReport
from writer_rl.data.embedding import Embedder
from writer_rl.data.records import Message, Segment

ADD_CONFIDENCE = 0.7
UPDATE_CONFIDENCE_STEP = 0.1
PROVENANCE_MIN_COSINE = 0.25
PROVENANCE_MAX_MESSAGES = 3

_DATE_SUFFIX = re.compile(r"\s*@\s*[\d\-/.:T ]+$")


@dataclass(frozen=True, slots=True)
class Record:
    """One derived record (System 2).

    Args:
        entry_id: Unique in its memory.
        content: What is remembered.
        owner: Who it is about; `GROUP` on the group layers.
        source: Who said or observed it.
        layer: One of `writer_rl.data.actions.LAYERS`.
        kind: One of `writer_rl.data.actions.KINDS`.
        created_at_segment: 0-based segment that wrote it.
        sent_at: Time of that segment, ISO 8601 or empty.
        confidence: 0 to 1; 0.7 on ADD, +0.1 per UPDATE.
        from_ids: Up to three messages it comes from.
        links: The record it supersedes, if any.
        superseded_by: The record that supersedes it; empty for a head.
    """

    entry_id: str
    content: str
    owner: str
    source: str
    layer: str
    kind: str = "fact"
    created_at_segment: int = 0
    sent_at: str = ""
    confidence: float = ADD_CONFIDENCE
    from_ids: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    superseded_by: str = ""


def _fold(name: str) -> str:
    return _DATE_SUFFIX.sub("", name.strip()).strip().casefold()


@dataclass(frozen=True, slots=True)
class Roster:
    """Members known so far, in order of appearance, and the aliases that lead to them."""

    members: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def with_members(self, names: Iterable[str]) -> Roster:
        """The roster with further members appended; names that resolve to a member already are passed over."""
        members = list(self.members)
        known = {_fold(member) for member in members} | {_fold(alias) for alias in self.aliases}
        for name in names:
            if name and _fold(name) not in known:
                members.append(name)
                known.add(_fold(name))
        return self if len(members) == len(self.members) else replace(self, members=tuple(members))

    def canonical(self, name: str) -> str | None:
        """The member that a written name means, or None.

        White space, case and a trailing "@date" do not matter; aliases are followed.

        Example:
            >>> Roster(("Ana",)).canonical(" ana@2026-08-10 ")
            'Ana'
        """
        folded = _fold(name)
        for member in self.members:
            if _fold(member) == folded:
                return member
        for alias, member in self.aliases.items():
            if _fold(alias) == folded:
                return member
        return None


def sequential_ids(memory: MemoryState) -> str:
    """Next short id, `m1`, `m2`, …: few tokens for the Writer to copy, and the same in every replay."""
    number = len(memory.records) + 1
    while memory.find(f"m{number}") is not None:
        number += 1
    return f"m{number}"


@dataclass(frozen=True)
class MemoryState:
    """System 1 and System 2 after some segments. Never changed in place.

    Args:
        messages: Every message so far, verbatim, in order.
        records: Every record ever written, superseded ones included, in order of creation.
        roster: Members known so far.

    Raises:
        ValueError: Two records share an id.
    """

    messages: tuple[Message, ...] = ()
    records: tuple[Record, ...] = ()
    roster: Roster = Roster()
    _positions: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        positions = {record.entry_id: position for position, record in enumerate(self.records)}
        if len(positions) != len(self.records):
            raise ValueError("two records share an entry_id; give every record its own")
        object.__setattr__(self, "_positions", positions)

    @classmethod
    def empty(cls, members: Sequence[str] = (), aliases: Mapping[str, str] | None = None) -> MemoryState:
        """Memory before the first segment; members that are known from the chat's member list may be given."""
        return cls(roster=Roster(aliases=MappingProxyType(dict(aliases or {}))).with_members(members))

    def observe(self, segment: Segment) -> MemoryState:
        """Store a segment's messages in System 1 and its speakers in the roster. No model is involved."""
        roster = self.roster.with_members(message.speaker for message in segment.messages)
        return replace(self, messages=self.messages + segment.messages, roster=roster)

    def find(self, entry_id: str) -> Record | None:
        """The record with that id, or None."""
        position = self._positions.get(entry_id)
        return None if position is None else self.records[position]

    def heads(self) -> tuple[Record, ...]:
        """Records that are not superseded, oldest first."""
        return tuple(record for record in self.records if not record.superseded_by)

    def chain(self, entry_id: str) -> tuple[Record, ...]:
        """The whole update chain through a record, old to new.

        Raises:
            KeyError: No such record.
        """
        record = self.records[self._positions[entry_id]]
        older: list[Record] = []
        current = record
        while current.links:
            current = self.records[self._positions[current.links[0]]]
            older.append(current)
        newer: list[Record] = []
        current = record
        while current.superseded_by:
            current = self.records[self._positions[current.superseded_by]]
            newer.append(current)
        return (*reversed(older), record, *newer)

    def update_edges(self) -> tuple[tuple[str, str], ...]:
        """(old id, new id) of every UPDATE so far."""
        return tuple((record.links[0], record.entry_id) for record in self.records if record.links)

    def owners(self) -> tuple[str, ...]:
        """Owners of records, alphabetical, `GROUP` last."""
        names = {record.owner for record in self.records}
        return (*sorted(names - {GROUP}), *([GROUP] if GROUP in names else []))

    def apply(
        self,
        report: ActionReport,
        segment: Segment,
        embedder: Embedder | None = None,
        next_id: Callable[[MemoryState], str] = sequential_ids,
    ) -> MemoryState:
        """Apply a validated list as a whole; a report with any error changes nothing.

        ADD appends a record. UPDATE appends a node that inherits owner, source, layer and kind from the head it
        supersedes, and links the two; nothing is overwritten.

        Args:
            report: Outcome of `writer_rl.data.actions.validate` against this state.
            segment: Segment being written, for time and provenance.
            embedder: Finds the messages a record comes from; None leaves `from_ids` empty.
            next_id: Gives the id of the next record from the state before it is added.
        """
        if not report.valid:
            return self
        texts = [action.content for action in report.actions if action.action != "NOOP"]
        provenance = iter(_provenance(texts, segment, embedder))
        state = self
        for action in report.actions:
            if action.action == "NOOP":
                continue
            new_id = next_id(state)
            from_ids = next(provenance)
            if action.action == "ADD":
                added = Record(
                    new_id, action.content, action.owner, action.source, action.layer, action.kind,
                    segment.index, segment.started_at, ADD_CONFIDENCE, from_ids,
                )  # fmt: skip
                state = replace(state, records=(*state.records, added))
            else:
                state = state._supersede(action.entry_id, new_id, action.content, segment, from_ids)
        return state

    def _supersede(
        self, old_id: str, new_id: str, content: str, segment: Segment, from_ids: tuple[str, ...]
    ) -> MemoryState:
        position = self._positions[old_id]
        old = self.records[position]
        node = replace(
            old, entry_id=new_id, content=content, created_at_segment=segment.index, sent_at=segment.started_at,
            confidence=min(1.0, round(old.confidence + UPDATE_CONFIDENCE_STEP, 10)), from_ids=from_ids,
            links=(old_id,), superseded_by="",
        )  # fmt: skip
        records = list(self.records)
        records[position] = replace(old, superseded_by=new_id)
        return replace(self, records=(*records, node))


def _provenance(texts: Sequence[str], segment: Segment, embedder: Embedder | None) -> list[tuple[str, ...]]:
    """For each text the ids of up to three messages with cosine >= 0.25, most similar first."""
    if embedder is None or not texts:
        return [() for _ in texts]
    cosine_RM = embedder.embed(texts) @ embedder.embed([f"{m.speaker}: {m.text}" for m in segment.messages]).T
    found = []
    for row in cosine_RM:
        ranked = sorted(range(len(row)), key=lambda i: (-row[i], i))[:PROVENANCE_MAX_MESSAGES]
        found.append(tuple(segment.messages[i].message_id for i in ranked if row[i] >= PROVENANCE_MIN_COSINE))
    return found
