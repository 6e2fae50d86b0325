"""Rule-based projection of a question: names and a few cue words decide rows, mode and scope."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from writer_rl.data.actions import GROUP
from writer_rl.data.records import Question
from writer_rl.rewards.qa.types import Projection, Scope
from writer_rl.rewards.qa.words import mentions, words

_EVERYONE = re.compile(r"\b(every(one|body)|each)\b|每个|每位|大家|所有人", re.IGNORECASE)
_GROUP = re.compile(
    r"\b(group|team|we|us|our|together|decide[sd]?|decisions?|agreed?|agreements?)\b|我们|决定", re.IGNORECASE
)
_HISTORY = re.compile(
    r"\b(chang(e[sd]?|ing)|used to|before|previous(ly)?|histor(y|ies)|original(ly)?|evol\w+|shift\w*|over time)\b"
    r"|\bhow did\b|变化|以前|之前",
    re.IGNORECASE,
)


class RuleProjector:
    """Names in the question give rows; without names, "everyone" gives all members and "we" or "decided" the group.

    Rows and mode that the data set itself gives with the question take precedence.
    """

    def project(self, question: Question, members: Sequence[str], aliases: Mapping[str, str]) -> Projection:
        """Project one question.

        Args:
            question: Its `rows` and `mode` are obeyed where they are given.
            members: The chat's members.
            aliases: Other names of members.

        Source: specification §7, Project.

        Example:
            "How did Ana's plan change?" with members Ana and Ben: rows ("Ana",), mode full, scope persons.
        """
        named = mentions(question.text, members, aliases)
        asks_group = bool(_GROUP.search(question.text))
        scope: Scope
        if _EVERYONE.search(question.text) and not named:
            scope, rows = "all", (*members,)
        elif named:
            rows = tuple(member for member in members if member in named)
            scope, rows = "persons", (*rows, *([GROUP] if asks_group else []))
        elif asks_group:
            scope, rows = "group", (GROUP,)
        else:
            scope, rows = "open", (*members, GROUP)
        if question.rows:
            rows = question.rows
            scope = "group" if rows == (GROUP,) else "persons" if named else scope
        full = question.mode == "full" or bool(_HISTORY.search(question.text))
        return Projection(rows, _issue(question.text, named, aliases), "full" if full else "head", scope, named)


def _issue(text: str, named: Sequence[str], aliases: Mapping[str, str]) -> str:
    names = {word.root for name in named for word in words(name)}
    names |= {word.root for alias, member in aliases.items() if member in named for word in words(alias)}
    return " ".join(text[w.start : w.end] for w in words(text) if not w.is_function and w.root not in names)
