"""What passes between the parts of the query stage: projection, evidence, answer, judgement. All frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from writer_rl.data.memory import Record
from writer_rl.data.records import Message

Mode = Literal["head", "full"]
Scope = Literal["persons", "all", "group", "open"]


@dataclass(frozen=True, slots=True)
class Projection:
    """A question compiled into coordinates of the memory.

    Args:
        rows: Owners whose records are asked for, in roster order, `GROUP` last; empty only if nobody is known.
        issue: What the question is about: its words without names and function words.
        mode: `head` for the present state, `full` for the history.
        scope: `persons` (named members), `all` (each member), `group`, or `open` (the question names nobody).
        named: Members the question names, in the order in which it names them.

    Source: specification §7, Project.
    """

    rows: tuple[str, ...]
    issue: str
    mode: Mode = "head"
    scope: Scope = "open"
    named: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RowEvidence:
    """Derived evidence of one row.

    Args:
        owner: Member or `GROUP`.
        chains: One tuple per matter, old to new; a single head each in mode `head`.
        said: Heads about others whose source is this member (source-k).
    """

    owner: str
    chains: tuple[tuple[Record, ...], ...] = ()
    said: tuple[Record, ...] = ()

    @property
    def records(self) -> tuple[Record, ...]:
        return tuple(record for chain in self.chains for record in chain) + self.said


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that a reader sees besides the question.

    Args:
        messages: System-1 messages, oldest first.
        rows: System-2 rows; () in the S1-only arm. A row without records is shown as "(none)".
    """

    messages: tuple[Message, ...]
    rows: tuple[RowEvidence, ...] = ()

    @property
    def records(self) -> tuple[Record, ...]:
        """Every record shown, once each."""
        return tuple({record.entry_id: record for row in self.rows for record in row.records}.values())

    @property
    def empty_rows(self) -> tuple[str, ...]:
        return tuple(row.owner for row in self.rows if not row.records)


@dataclass(frozen=True, slots=True)
class Answer:
    """A reader's answer.

    Args:
        text: The answer; "" if the evidence holds none (a legitimate, wrong answer).
        support: Ids of the messages and records it was read from.
        error: Why the reader could not answer at all (a failed call); "" otherwise.
    """

    text: str
    support: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A judge's word on an answer.

    Args:
        score: 0 (wrong) to 1 (right); None if no judgement came about. A missing score is never replaced by 0.
        error: Why it is missing; "" otherwise.
    """

    score: float | None
    error: str = ""
