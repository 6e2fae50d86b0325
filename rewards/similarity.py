"""Text similarity of two memory contents: token overlap and character order in one number between 0 and 1.

Two rule sets exist. *paper* repeats the published scoring, weaknesses included; *fixed* reads every script in its
written order and does not let `difflib` throw frequent characters away.

Source: specification §4, text similarity.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import Literal, Protocol

try:  # a C++ port that gives the same ratios several times faster; difflib serves where it is not installed
    from cydifflib import SequenceMatcher
except ImportError:
    from difflib import SequenceMatcher

RuleSet = Literal["paper", "fixed"]
RULE_SETS: tuple[RuleSet, ...] = ("paper", "fixed")

TOKEN_WEIGHT = 0.60
SEQUENCE_WEIGHT = 0.40
GATE = 0.50

_HAN = "\u3400-\u9fff"
_MORE_HAN = "\uf900-\ufaff\U00020000-\U0003ffff"
_LATIN_RUN = re.compile(r"[a-z0-9]+")
_HAN_CHARACTER = re.compile(f"[{_HAN}]")
_WORD_OR_HAN = re.compile(rf"[{_HAN}{_MORE_HAN}]|(?:(?![{_HAN}{_MORE_HAN}])\w)+")


class RecordLike(Protocol):
    """What a reward reads of a derived record; `writer_rl.data.memory.Record` is one."""

    @property
    def entry_id(self) -> str: ...
    @property
    def owner(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def layer(self) -> str: ...
    @property
    def content(self) -> str: ...
    @property
    def superseded_by(self) -> str: ...


@lru_cache(maxsize=1 << 16)
def tokens(text: str, rules: RuleSet) -> tuple[str, ...]:
    """Tokens of a content, repeats kept.

    *paper*: runs of a-z and 0-9 of the lower-cased text, then every character from U+3400 to U+9FFF; the order between
    the two scripts is lost and letters with marks split words. *fixed*: NFKC, case-folded; word runs of any script and
    single Han characters (extension planes included) in the order written. Kana, Hangul and unspaced scripts such as
    Thai stay runs.

    Args:
        text: Any text, possibly empty.
        rules: Rule set.

    Source: specification §4, tokens.

    Example:
        >>> tokens("Zoë moved to 東京 in May", "paper")
        ('zo', 'moved', 'to', 'in', 'may', '東', '京')
        >>> tokens("Zoë moved to 東京 in May", "fixed")
        ('zoë', 'moved', 'to', '東', '京', 'in', 'may')
    """
    if rules == "paper":
        lowered = text.lower()
        return (*_LATIN_RUN.findall(lowered), *_HAN_CHARACTER.findall(lowered))
    return tuple(_WORD_OR_HAN.findall(unicodedata.normalize("NFKC", text).casefold()))


@lru_cache(maxsize=1 << 16)
def _forms(text: str, rules: RuleSet) -> tuple[frozenset[str], str]:
    """Token set and joined tokens of a content."""
    words = tokens(text, rules)
    return frozenset(words), " ".join(words)


def token_f1(predicted: frozenset[str], reference: frozenset[str]) -> float:
    """Harmonic mean of precision and recall of two token sets, 0 to 1; 0 if either is empty.

    Source: specification §4, F1_tok = 2·|A ∩ B| / (|A| + |B|).

    Example:
        >>> token_f1(frozenset({"likes", "tea"}), frozenset({"likes", "green", "tea"}))
        0.8
    """
    if not predicted or not reference:
        return 0.0
    return 2.0 * len(predicted & reference) / (len(predicted) + len(reference))


def sequence_ratio(predicted: str, reference: str, autojunk: bool, matcher: type = SequenceMatcher) -> float:
    """Share of characters in matching blocks, 0 to 1. Not symmetric: the order of arguments is part of the rule.

    Args:
        predicted: Joined tokens of the predicted content.
        reference: Joined tokens of the reference content.
        autojunk: Drop characters that make up over 1 % of a reference of 200 characters or more (`difflib`'s default).
        matcher: `difflib.SequenceMatcher` or a port with equal results.

    Source: specification §4, S_seq.

    Example:
        >>> sequence_ratio("abcd", "bcde", autojunk=False)
        0.75
    """
    return float(matcher(None, predicted, reference, autojunk=autojunk).ratio())


@lru_cache(maxsize=1 << 18)
def similarity(predicted: str, reference: str, rules: RuleSet) -> float:
    """Similarity of two contents, 0 (nothing in common) to 1 (same tokens in the same order).

    Args:
        predicted: Content the Writer wrote.
        reference: Content of the teacher.
        rules: Rule set.

    Returns:
        0.60 · token F1 + 0.40 · sequence ratio; 0 if either side has no token, equal texts included.

    Source: specification §4, κ̄.

    Example:
        Tokens {likes, tea} and {likes, green, tea}: F1 = 2·2/5 = 0.8. "likes tea" (9 characters) lies in "likes green
        tea" (15) as the blocks "likes " and "tea": ratio 2·9/24 = 0.75. Together 0.60·0.8 + 0.40·0.75 = 0.78.

        >>> round(similarity("likes tea", "Likes green tea.", "fixed"), 12)
        0.78
    """
    predicted_set, predicted_text = _forms(predicted, rules)
    reference_set, reference_text = _forms(reference, rules)
    if not predicted_set or not reference_set:
        return 0.0
    overlap = token_f1(predicted_set, reference_set)
    return TOKEN_WEIGHT * overlap + SEQUENCE_WEIGHT * sequence_ratio(predicted_text, reference_text, rules == "paper")


@lru_cache(maxsize=1 << 18)
def gated_similarity(predicted: str, reference: str, rules: RuleSet) -> float:
    """Similarity where it reaches the gate of 0.50, else 0. Equal coordinates are the caller's business.

    Pairs that cannot reach the gate even if every character of the shorter text matched are refused without comparing
    them; the bound uses the arithmetic of the ratio itself, so the outcome never differs.

    Source: specification §4, κ_ij.

    Example:
        >>> gated_similarity("likes tea", "owns a red bicycle", "fixed")
        0.0
    """
    predicted_set, predicted_text = _forms(predicted, rules)
    reference_set, reference_text = _forms(reference, rules)
    if not predicted_set or not reference_set:
        return 0.0
    num_characters = len(predicted_text) + len(reference_text)
    highest_ratio = 2.0 * min(len(predicted_text), len(reference_text)) / num_characters
    if TOKEN_WEIGHT * token_f1(predicted_set, reference_set) + SEQUENCE_WEIGHT * highest_ratio < GATE:
        return 0.0
    value = similarity(predicted, reference, rules)
    return value if value >= GATE else 0.0
