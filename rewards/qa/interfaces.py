"""The four exchangeable parts of the frozen query stage.

An implementation reports failed calls in `Answer.error` or `Judgement.error`; it does not raise for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from writer_rl.data.memory import MemoryState
from writer_rl.data.records import Message, Question
from writer_rl.rewards.qa.types import Answer, Evidence, Judgement, Projection, RowEvidence


class Projector(Protocol):
    """Compiles a question into rows, issue, mode and scope."""

    def project(self, question: Question, members: Sequence[str], aliases: Mapping[str, str]) -> Projection: ...


class Retriever(Protocol):
    """Fetches evidence from either track within a fixed budget."""

    def messages(self, projection: Projection, messages: Sequence[Message]) -> tuple[Message, ...]:
        """System 1: the selected messages, oldest first."""
        ...

    def rows(self, projection: Projection, memory: MemoryState) -> tuple[RowEvidence, ...]:
        """System 2: one entry per projected row, empty ones included."""
        ...


class Reader(Protocol):
    """Answers from evidence. One frozen function for every arm."""

    def answer(self, question: Question, projection: Projection, evidence: Evidence) -> Answer: ...


class Judge(Protocol):
    """Scores an answer against the gold answer."""

    def judge(self, question: Question, answer: Answer) -> Judgement: ...


@dataclass(frozen=True)
class QueryStage:
    """Project, retrieve, answer, judge.

    Args:
        name: Kind and version; part of every cache key, so that a changed stage never meets old answers.
    """

    name: str
    projector: Projector
    retriever: Retriever
    reader: Reader
    judge: Judge
