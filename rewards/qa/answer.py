"""The offline reader: picks the evidence line that fits the question best and reads the answer out of it.

One frozen function serves both arms. It treats messages and records as lines of the same kind; a record differs only by
what it states: whose it is, who said it, and that it is the present state.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from writer_rl.data.actions import GROUP
from writer_rl.data.records import Question
from writer_rl.rewards.qa.types import Answer, Evidence, Projection
from writer_rl.rewards.qa.words import Word, content_roots, mentions, overlap, rarity, root, words

_ASKS_PERSON = re.compile(r"^\W*(who|whose|whom)\b|谁", re.IGNORECASE)
_SAYING_WORDS = """say said says tell told mention mentioned claim claimed report reported think thought believe
believed note noted announce announced state stated suggest suggested according"""
_SAYING = frozenset(root(word) for word in _SAYING_WORDS.split())
_STATE_PRIOR = 0.25  # a line that states owner and state outranks an utterance that fits equally well
_ABOUT, _BY, _SOURCE = 1.0, 0.8, 0.3  # the line is about a named member; comes from one; both, with another source
_RECENCY = 0.1
_ASKING = 0.5  # an utterance that asks asserts nothing
_AFTER_MATCH = 1.5  # in most languages what is said of a matter follows it
_SAME_MATTER = 0.6  # share of the best score from which an older utterance counts as the same matter
_HISTORY_LINES = 2


@dataclass(frozen=True, slots=True)
class _Line:
    key: str
    text: str
    owner: str
    source: str
    mentioned: tuple[str, ...]
    is_record: bool
    age: float  # 0 newest of its track, 1 oldest
    chain: tuple[tuple[str, str], ...] = ()  # (id, text), old to new


class ExtractiveReader:
    """Deterministic extractive reader without a model.

    A line scores the share of the question's words it holds (weighted by rarity among the lines), plus whether it is
    about the members the question names, plus small terms for stated states and recency; questions in the chat lose.
    The answer is the best line without the words of the question; "who" questions are answered by a name; mode `full`
    by the chain, old to new; scope `all` by one answer per member; a multiple choice by the option that the best lines
    support.
    """

    def answer(self, question: Question, projection: Projection, evidence: Evidence) -> Answer:
        """Answer one question; without any line the answer is empty."""
        lines = _lines(projection, evidence)
        if not lines:
            return Answer("")
        asks_person = bool(_ASKS_PERSON.search(question.text)) and not question.options
        issue = content_roots(projection.issue)
        asks_source = asks_person and bool(issue & _SAYING)
        weight = rarity([content_roots(line.text) for line in lines])
        sought = issue - _SAYING if asks_source else issue
        score = {line.key: _score(line, projection, sought, weight, asks_source) for line in lines}
        ranked = sorted(lines, key=lambda line: (-score[line.key], line.age, line.key))
        best = ranked[0]
        if question.options:
            return _option(question, ranked, score)
        if projection.scope == "all":
            return _per_member(projection, ranked, question.text)
        if asks_person:
            return Answer(_person(best, projection, asks_source), (best.key,))
        if projection.mode == "full":
            told = best.chain or _history(ranked, score)
            spans = [_span(text, question.text, projection) for _, text in told]
            return Answer(" then ".join(dict.fromkeys(filter(None, spans))), tuple(key for key, _ in told))
        return Answer(_span(best.text, question.text, projection), (best.key,))


def _lines(projection: Projection, evidence: Evidence) -> list[_Line]:
    people = tuple(dict.fromkeys([*(m.speaker for m in evidence.messages), *projection.rows, *projection.named]))
    lines = []
    newest = max(len(evidence.messages) - 1, 1)
    for position, message in enumerate(evidence.messages):
        key, mentioned = f"message:{message.message_id}", mentions(message.text, people)
        age = 1 - position / newest
        lines.append(_Line(key, message.text, message.speaker, message.speaker, mentioned, False, age))
    last = max((record.created_at_segment for record in evidence.records), default=0) or 1
    chains = [chain for row in evidence.rows for chain in (*row.chains, *((record,) for record in row.said))]
    # A head that one row shows alone and another with its history counts once, with the history.
    for chain in {chain[-1].entry_id: chain for chain in sorted(chains, key=len)}.values():
        head = chain[-1]
        key, mentioned = f"record:{head.entry_id}", mentions(head.content, people)
        history = tuple((f"record:{record.entry_id}", record.content) for record in chain)
        age = 1 - head.created_at_segment / last
        lines.append(_Line(key, head.content, head.owner, head.source, mentioned, True, age, history))
    return lines


def _score(
    line: _Line, projection: Projection, sought: frozenset[str], weight: dict[str, float], asks_source: bool
) -> float:
    named = projection.named
    about = line.owner in named if line.is_record else any(name in named for name in line.mentioned)
    by = not line.is_record and line.source in named
    if asks_source:
        person = _ABOUT if about else 0.0
    elif line.is_record:
        person = _ABOUT * about + _SOURCE * (about and line.source in named and line.source != line.owner)
    else:
        person = max(_BY * about, _ABOUT * by)
    if projection.scope == "group":
        person = _ABOUT if line.owner == GROUP else 0.0
    score = overlap(sought, content_roots(line.text), weight) + person - _RECENCY * line.age
    if line.is_record:
        return score + _STATE_PRIOR
    return score - _ASKING if line.text.rstrip().endswith(("?", "？")) else score


def _person(line: _Line, projection: Projection, asks_source: bool) -> str:
    if asks_source:
        return line.source
    others = [name for name in line.mentioned if name not in projection.named and name != GROUP]
    if line.is_record and line.owner != GROUP and line.owner not in projection.named:
        return line.owner
    return others[0] if others else line.source


def _history(ranked: Sequence[_Line], score: dict[str, float]) -> tuple[tuple[str, str], ...]:
    """The best utterances of one matter, oldest first."""
    enough = _SAME_MATTER * score[ranked[0].key]
    told = [line for line in ranked[:_HISTORY_LINES] if score[line.key] >= enough]
    return tuple((line.key, line.text) for line in sorted(told, key=lambda line: -line.age))


def _per_member(projection: Projection, ranked: Sequence[_Line], question: str) -> Answer:
    parts, support = [], []
    for row in projection.rows:
        line = next((line for line in ranked if line.owner == row), None)
        if line is not None:
            parts.append(f"{row} {_span(line.text, question, projection, (row,))}")
            support.append(line.key)
    return Answer(" and ".join(parts), tuple(support))


def _option(question: Question, ranked: Sequence[_Line], score: dict[str, float]) -> Answer:
    best = ranked[:3]
    support = {
        text: sum(score[line.key] * _share(content_roots(text), content_roots(line.text)) for line in best)
        for _, text in question.options
    }
    return Answer(max(support, key=lambda text: support[text]), tuple(line.key for line in best))


def _share(part: frozenset[str], whole: frozenset[str]) -> float:
    return len(part & whole) / len(part) if part else 0.0


def _span(text: str, question: str, projection: Projection, names: tuple[str, ...] = ()) -> str:
    """The longest run of words that the question does not hold, without function words at its edges.

    Length counts content words, not their rarity: a value that record and message agree on must not lose by being
    frequent.
    """
    name_roots = {word.root for name in (*projection.named, *names) for word in words(name)}
    asked = content_roots(question) | name_roots
    runs: list[list[Word]] = [[]]
    follows: list[bool] = [False]
    matched = False
    previous = 0
    for word in words(text):
        known = word.root in asked and not (word.is_function and word.root not in name_roots)
        if known or word.sentence != previous:
            runs.append([])
            matched = matched or (known and word.root not in name_roots)
            follows.append(matched)
        if not known:
            runs[-1].append(word)
        previous = word.sentence
    best, longest = "", 0.0
    for run, after in zip(runs, follows, strict=True):
        bare = [index for index, word in enumerate(run) if not word.is_function]
        if not bare:
            continue
        length = len(bare) * (_AFTER_MATCH if after else 1.0)
        if length >= longest:
            best, longest = text[run[bare[0]].start : run[bare[-1]].end], length
    return best or text.strip()
