"""What a chat is made of: messages, sessions, questions, dialogues, and the segments a Writer reads.

All types are frozen; the files they are read from are validated in `writer_rl.data.dialogues`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Message:
    """One message, verbatim (System 1).

    Args:
        message_id: Unique within the dialogue.
        speaker: Who sent it, as the chat shows the name.
        text: The text, unchanged.
        sent_at: ISO 8601 time as the source gives it; may lack a zone; empty if unknown.
        session_id: Session it belongs to.
        channel: Channel or room; empty if there is one only.
        position: 0-based position in its session.
        reply_to: `message_id` it answers; empty if none.
    """

    message_id: str
    speaker: str
    text: str
    sent_at: str = ""
    session_id: str = ""
    channel: str = ""
    position: int = 0
    reply_to: str = ""


@dataclass(frozen=True, slots=True)
class Session:
    """Consecutive messages of one sitting, in file order."""

    session_id: str
    started_at: str
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a dialogue. Nothing of it may reach a Writer's prompt.

    Args:
        question_id: Unique within the dialogue; questions are picked in the order of their ids.
        text: The question.
        answer: Gold answer.
        category: Label of the data set.
        options: (letter, text) pairs of a multiple choice; empty for free answers.
        correct_option: Gold letter, or the short gold phrase some data sets put there.
        evidence_ids: Messages that hold the answer.
        rows: Owners whose records are asked for (`GROUP` included); empty lets the reader decide.
        mode: `head` asks for the present state, `full` for the history.
    """

    question_id: str
    text: str
    answer: str
    category: str = ""
    options: tuple[tuple[str, str], ...] = ()
    correct_option: str = ""
    evidence_ids: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    mode: str = "head"


@dataclass(frozen=True, slots=True)
class Segment:
    """The messages of one write: at most `window` consecutive messages of one session.

    Args:
        index: 0-based position among the dialogue's segments.
    """

    index: int
    session_id: str
    started_at: str
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A whole group chat with its questions."""

    dialogue_id: str
    members: tuple[str, ...]
    sessions: tuple[Session, ...]
    questions: tuple[Question, ...] = ()
    language: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)

    def segments(self, window: int) -> tuple[Segment, ...]:
        """Cut every session into segments of at most `window` messages; none spans two sessions.

        Args:
            window: Messages per segment, 1 or more.

        Raises:
            ValueError: `window` is below 1.

        Example:
            A session of 60 messages with window 25 gives segments of 25, 25 and 10.
        """
        if window < 1:
            raise ValueError(f"window is {window}; give 1 or more messages per segment")
        cut: list[Segment] = []
        for session in self.sessions:
            for start in range(0, len(session.messages), window):
                part = session.messages[start : start + window]
                cut.append(Segment(len(cut), session.session_id, part[0].sent_at or session.started_at, part))
        return tuple(cut)
