"""The QA gain: what a finished memory adds to answers that the raw messages already allow.

Source: specification §4 (QA gain) and §7 (one budget for training and evaluation).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from writer_rl.configs.schema import QaConfig
from writer_rl.data.embedding import Embedder
from writer_rl.data.memory import MemoryState, Record
from writer_rl.data.records import Dialogue, Message, Question
from writer_rl.rewards.qa.cache import AnswerCache, CachedAnswer, content_key
from writer_rl.rewards.qa.embedded import embedded_stage
from writer_rl.rewards.qa.evidence import render_evidence
from writer_rl.rewards.qa.interfaces import QueryStage
from writer_rl.rewards.qa.judge import gold_answer
from writer_rl.rewards.qa.types import Answer, Evidence, Projection

MIN_QUESTIONS = 2


@dataclass(frozen=True, slots=True)
class QuestionResult:
    """One question answered in one arm.

    Args:
        score: 0 to 1; None if answering or judging failed.
        error: Why the score is missing; "" otherwise.
        evidence: Evidence as shown to the reader.
        message_ids: Messages shown.
        entry_ids: Records shown.
        support: Ids, prefixed `message:` or `record:`, the answer was read from.
        has_records: Whether any record was shown.
        none_rows: Rows shown as "(none)".
    """

    question_id: str
    category: str
    question: str
    gold: str
    answer: str
    score: float | None
    error: str
    evidence: str
    message_ids: tuple[str, ...]
    entry_ids: tuple[str, ...]
    support: tuple[str, ...]
    has_records: bool
    none_rows: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupGains:
    """QA gains of a group.

    Args:
        gains: R_QA per trajectory, −1 to 1; None where it cannot be scored. All None: score the group without QA.
        question_ids: Questions that counted.
        dropped: (question id, reason) of those that left the whole group.
        s1_mean: Mean score of the S1-only answers over `question_ids`; None if nothing was scored.
        none_rate: Share, 0 to 1, of projected rows without a record, over scorable trajectories; None without rows.
    """

    gains: tuple[float | None, ...]
    question_ids: tuple[str, ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()
    s1_mean: float | None = None
    none_rate: float | None = None


def pick_questions(questions: Sequence[Question], max_questions: int) -> tuple[Question, ...]:
    """At most `max_questions` questions, spread evenly over the list sorted by id.

    Args:
        questions: n questions of a dialogue.
        max_questions: m, 0 or more; with m < n the picked indices are ⌊i·n/m⌋.

    Example:
        Ten questions q0 … q9 and m = 4 give indices 0, 2, 5, 7.
    """
    ordered = sorted(questions, key=lambda question: question.question_id)
    if len(ordered) <= max_questions:
        return tuple(ordered)
    return tuple(ordered[i * len(ordered) // max_questions] for i in range(max_questions))


def qa_gain(with_memory: Sequence[float], without_memory: Sequence[float]) -> float:
    """`clip(mean(QA(S1+S2)) − mean(QA(S1)), −1, 1)` over the same questions.

    Args:
        with_memory: Scores of the S1+S2 answers, one per question, 0 to 1.
        without_memory: Scores of the S1-only answers, same order.

    Raises:
        ValueError: The lists differ in length or are empty.

    Example:
        >>> qa_gain([1.0, 0.5], [0.5, 0.5])
        0.25
    """
    if len(with_memory) != len(without_memory) or not with_memory:
        raise ValueError(
            f"{len(with_memory)} and {len(without_memory)} scores; give both the same questions, at least one"
        )
    gain = (math.fsum(with_memory) - math.fsum(without_memory)) / len(with_memory)
    return max(-1.0, min(1.0, gain))


@dataclass(frozen=True, slots=True)
class _Baseline:
    """The S1-only side of one question: everything that does not depend on a trajectory."""

    question: Question
    projection: Projection
    messages: tuple[Message, ...]
    answer: Answer
    score: float | None
    error: str


class QaScorer:
    """Scores finished trajectories of a group; S1-only sides are computed once per question and cached by content.

    Args:
        config: Budget and number of questions, the same object that evaluation uses.
        embedder: Sentence vectors of the retriever.
        cache: Answers by content; give one to keep it over a resume (`state_dict`). None starts an empty one.
        stage: Query stage; None builds the embedded one.
    """

    def __init__(
        self, config: QaConfig, embedder: Embedder, cache: AnswerCache | None = None, stage: QueryStage | None = None
    ) -> None:
        self.config = config
        self.cache = AnswerCache() if cache is None else cache
        self._stage = stage or embedded_stage(config, embedder)
        self._budget = config.model_dump(include={"recall_n", "s1_top_k", "s2_k", "source_k", "expand", "ask"})

    def s1_scores(self, dialogue: Dialogue) -> dict[str, float | None]:
        """Score, 0 to 1, of every picked question answered from System 1 alone; None where it is missing."""
        return {side.question.question_id: side.score for side in self._baselines(dialogue, self._picked(dialogue))}

    def group_gains(self, dialogue: Dialogue, final_states: Sequence[MemoryState | None]) -> GroupGains:
        """R_QA of each trajectory of a group.

        Args:
            dialogue: The dialogue all trajectories wrote about; its messages are System 1 of both arms.
            final_states: Memory of each trajectory after its last segment; None for a trajectory that failed.

        Returns:
            Gains in the same order. A failed trajectory has None and takes no question away. A question without a score
            on either side, for any other trajectory, counts for none. With fewer than two questions left all gains are
            None.

        Source: specification §4, R_QA = mean(QA(S1+S2)) − mean(QA(S1)).
        """
        nothing: tuple[float | None, ...] = (None,) * len(final_states)
        if not self.config.enabled or all(state is None for state in final_states):
            return GroupGains(nothing)
        dropped: dict[str, str] = {}
        without: dict[str, float] = {}
        scored: list[dict[str, float]] = [{} for _ in final_states]
        num_rows = num_empty = 0
        for side in self._baselines(dialogue, self._picked(dialogue)):
            question_id = side.question.question_id
            if side.score is None:
                dropped[question_id] = f"S1-only: {side.error}"
                continue
            without[question_id] = side.score
            for index, state in enumerate(final_states):
                if state is None:
                    continue
                result = self._with_memory(dialogue, side, state)
                num_rows += len(side.projection.rows)
                num_empty += len(result.none_rows)
                if result.score is None:
                    dropped.setdefault(question_id, f"trajectory {index}: {result.error}")
                    continue
                scored[index][question_id] = result.score
        kept = [question_id for question_id in without if question_id not in dropped]
        none_rate = num_empty / num_rows if num_rows else None
        if len(kept) < MIN_QUESTIONS:
            return GroupGains(nothing, (), tuple(dropped.items()), None, none_rate)
        base = [without[question_id] for question_id in kept]
        gains = tuple(
            None if state is None else qa_gain([scored[index][question_id] for question_id in kept], base)
            for index, state in enumerate(final_states)
        )
        return GroupGains(gains, tuple(kept), tuple(dropped.items()), math.fsum(base) / len(base), none_rate)

    def answer_questions(
        self, dialogue: Dialogue, memory: MemoryState | None, questions: Sequence[Question] | None = None
    ) -> list[QuestionResult]:
        """Answer questions in one arm of the evaluation.

        Args:
            dialogue: Its messages are System 1.
            memory: Final memory; None for the S1-only arm.
            questions: Questions to answer; None answers all of the dialogue, in the order of their ids.
        """
        asked = pick_questions(dialogue.questions, len(dialogue.questions)) if questions is None else questions
        sides = self._baselines(dialogue, asked)
        if memory is not None:
            return [self._with_memory(dialogue, side, memory) for side in sides]
        return [_result(side, Evidence(side.messages), side.answer, side.score, side.error) for side in sides]

    def _picked(self, dialogue: Dialogue) -> tuple[Question, ...]:
        return pick_questions(dialogue.questions, self.config.max_questions)

    def _baselines(self, dialogue: Dialogue, questions: Sequence[Question]) -> list[_Baseline]:
        messages = [message for session in dialogue.sessions for message in session.messages]
        chat_key = content_key([[m.message_id, m.speaker, m.text, m.sent_at, m.session_id] for m in messages])
        by_id = {message.message_id: message for message in messages}
        sides = []
        for question in questions:
            projection = self._stage.projector.project(question, dialogue.members, dialogue.aliases)
            key = self._key("s1", chat_key, question, projection)
            known = self.cache.get(key)
            if known is not None:
                shown = tuple(by_id[message_id] for message_id in known.message_ids)
                sides.append(_Baseline(question, projection, shown, Answer(known.text, known.support), known.score, ""))
                continue
            shown = self._stage.retriever.messages(projection, messages)
            answer, score, error = self._judged(question, projection, Evidence(shown))
            if score is not None:
                message_ids = tuple(message.message_id for message in shown)
                self.cache.put(key, CachedAnswer(answer.text, score, answer.support, message_ids))
            sides.append(_Baseline(question, projection, shown, answer, score, error))
        return sides

    def _with_memory(self, dialogue: Dialogue, side: _Baseline, memory: MemoryState) -> QuestionResult:
        evidence = Evidence(side.messages, self._stage.retriever.rows(side.projection, memory))
        records = [
            [row.owner, [list(map(_coordinates, chain)) for chain in row.chains], list(map(_coordinates, row.said))]
            for row in evidence.rows
        ]
        shown = [[m.message_id, m.speaker, m.text, m.sent_at] for m in side.messages]
        key = self._key("s1+s2", shown, side.question, side.projection, records)
        known = self.cache.get(key)
        if known is not None:
            return _result(side, evidence, Answer(known.text, known.support), known.score, "")
        answer, score, error = self._judged(side.question, side.projection, evidence)
        if score is not None:
            self.cache.put(key, CachedAnswer(answer.text, score, answer.support))
        return _result(side, evidence, answer, score, error)

    def _key(self, arm: str, chat: object, question: Question, projection: Projection, records: object = None) -> str:
        asked = [question.text, gold_answer(question), question.options, astuple(projection)]
        return content_key(self._stage.name, self._budget, arm, chat, asked, records)

    def _judged(
        self, question: Question, projection: Projection, evidence: Evidence
    ) -> tuple[Answer, float | None, str]:
        answer = self._stage.reader.answer(question, projection, evidence)
        if answer.error:
            return answer, None, answer.error
        judgement = self._stage.judge.judge(question, answer)
        if judgement.score is None or not math.isfinite(judgement.score):
            return answer, None, judgement.error or f"the judge gave {judgement.score}"
        return answer, judgement.score, ""


def _coordinates(record: Record) -> list[object]:
    return [record.entry_id, record.content, record.owner, record.source, record.created_at_segment, record.sent_at]


def _result(side: _Baseline, evidence: Evidence, answer: Answer, score: float | None, error: str) -> QuestionResult:
    return QuestionResult(
        question_id=side.question.question_id,
        category=side.question.category,
        question=side.question.text,
        gold=gold_answer(side.question),
        answer=answer.text,
        score=score,
        error=error,
        evidence=render_evidence(evidence),
        message_ids=tuple(message.message_id for message in evidence.messages),
        entry_ids=tuple(record.entry_id for record in evidence.records),
        support=answer.support,
        has_records=bool(evidence.records),
        none_rows=evidence.empty_rows,
    )
