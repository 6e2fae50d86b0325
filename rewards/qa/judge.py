"""The offline judge: token F1 on whitespace sets, as the paper's authors score answers."""

from __future__ import annotations

from writer_rl.data.records import Question
from writer_rl.rewards.qa.types import Answer, Judgement


def _word_set(text: str) -> frozenset[str]:
    return frozenset(text.lower().strip().rstrip(".").split())


def answer_f1(predicted: str, gold: str) -> float:
    """`2pr/(p + r)` of the lower-cased whitespace sets, closing full stops stripped; 0 if either is empty.

    Source: specification §7, token-F1.

    Example:
        Predicted {in, leeds}, gold {leeds}: p = 1/2, r = 1, F1 = 2·0.5·1/1.5.

        >>> round(answer_f1("in Leeds.", "Leeds"), 6)
        0.666667
    """
    found, wanted = _word_set(predicted), _word_set(gold)
    shared = len(found & wanted)
    if not shared:
        return 0.0
    precision, recall = shared / len(found), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


def gold_answer(question: Question) -> str:
    """The gold text: the right option of a multiple choice, else the answer."""
    return dict(question.options).get(question.correct_option) or question.answer


class TokenF1Judge:
    """Scores by `answer_f1`; an answer that never came about is missing, not wrong."""

    def judge(self, question: Question, answer: Answer) -> Judgement:
        if answer.error:
            return Judgement(None, answer.error)
        return Judgement(answer_f1(answer.text, gold_answer(question)))
