"""Words of questions and evidence: tokens with positions, light stems, names."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log

_HAN = "\u3400-\u9fff"
_WORD = re.compile(rf"[{_HAN}]|(?:(?![{_HAN}])\w)+")
_SENTENCE_END = re.compile(r"[.!?;:\n。！？；：…](?!\w)")
_SUFFIXES = ("ing", "ed", "es", "s", "e")
_IRREGULAR = {"has": "have", "had": "have", "goes": "go", "went": "go", "gone": "go"}

# Closed-class words carry no matter of their own: they neither count as overlap nor stand at the edge of an answer.
_FUNCTION_WORDS = """
a an the this that these those it its i me my mine you your yours he him his she her hers we us our ours they them
their theirs s t d m re ve ll and or but so as than then if because about at by for from in into of off on onto out
over to under up with within be am is are was were been being do does did done doing will would shall should can
could may might must not no yes just also too very really now currently still today there here who whom whose what
which when where why how every each some any ok okay oh hey hi guys"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a text.

    Args:
        root: Light stem of the folded word.
        start: Character offset of its first character.
        end: Character offset behind its last character.
        is_function: Whether it belongs to the closed-class words.
        sentence: 0-based sentence it stands in.
    """

    root: str
    start: int
    end: int
    is_function: bool
    sentence: int


@lru_cache(maxsize=1 << 16)
def root(word: str) -> str:
    """A light stem, so that *lives*, *lived* and *living* meet *live*. Words without such endings stay as they are.

    Example:
        >>> root("lives"), root("living"), root("planned"), root("plan")
        ('liv', 'liv', 'plan', 'plan')
    """
    word = _IRREGULAR.get(word, word)
    for suffix in _SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= 2 and word.isascii():
            word = word[: -len(suffix)]
            break
    if len(word) > 3 and word[-1] == word[-2]:
        word = word[:-1]
    return word[:-1] + "i" if len(word) > 3 and word[-1] == "y" else word


@lru_cache(maxsize=1 << 15)
def words(text: str) -> tuple[Word, ...]:
    """Words of a text in order; every Han character is a word of its own."""
    ends = [match.start() for match in _SENTENCE_END.finditer(text)]
    found: list[Word] = []
    sentence = 0
    for match in _WORD.finditer(text):
        while sentence < len(ends) and ends[sentence] < match.start():
            sentence += 1
        folded = unicodedata.normalize("NFKC", match.group()).casefold()
        opens = not found or found[-1].sentence != sentence
        # A capital inside a sentence marks a name: the month May, a friend called Will.
        is_name = not opens and len(folded) > 1 and match.group()[0].isupper()
        is_function = folded in FUNCTION_WORDS and not is_name
        found.append(Word(root(folded), match.start(), match.end(), is_function, sentence))
    return tuple(found)


@lru_cache(maxsize=1 << 15)
def content_roots(text: str) -> frozenset[str]:
    """Stems of the words that carry a matter."""
    return frozenset(word.root for word in words(text) if not word.is_function)


def rarity(documents: Sequence[frozenset[str]]) -> dict[str, float]:
    """Inverse document frequency `log(1 + (N − n + 0.5)/(n + 0.5))`, positive for every word that occurs.

    Example:
        >>> round(rarity([frozenset({"a", "b"}), frozenset({"a"})])["b"], 6)
        0.693147
    """
    counts: dict[str, int] = {}
    for document in documents:
        for word in document:
            counts[word] = counts.get(word, 0) + 1
    return {word: log(1 + (len(documents) - n + 0.5) / (n + 0.5)) for word, n in counts.items()}


def overlap(question: frozenset[str], document: frozenset[str], weight: Mapping[str, float]) -> float:
    """Share, 0 to 1, of the question's weight that a document holds; words that occur nowhere have no weight."""
    total = sum(weight.get(word, 0.0) for word in sorted(question))
    return sum(weight[word] for word in sorted(question & document)) / total if total else 0.0


@lru_cache(maxsize=1 << 12)
def _name_pattern(name: str, fold: bool) -> re.Pattern[str]:
    # Han text has no spaces, so a name may touch other words there.
    pattern = re.escape(name) if re.search(rf"[{_HAN}]", name) else rf"(?<!\w){re.escape(name)}(?!\w)"
    return re.compile(pattern, re.IGNORECASE if fold else 0)


@lru_cache(maxsize=1 << 15)
def _mentions(text: str, names: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    for fold in (False, True):
        places: dict[str, int] = {}
        for name, member in names:
            match = _name_pattern(name, fold).search(text)
            if match:
                places[member] = min(match.start(), places.get(member, match.start()))
        if places:
            return tuple(sorted(places, key=lambda member: (places[member], member)))
    return ()


def mentions(text: str, members: Iterable[str], aliases: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Members whose name or alias stands in a text, in order of appearance.

    As written first; only if nobody is found, whatever the case (so that *may* is not a member called *May*).

    Example:
        >>> mentions("Did Ben tell Ana's aunt?", ["Ana", "Ben"])
        ('Ben', 'Ana')
    """
    names = [(member, member) for member in members if member]
    names += [(alias, member) for alias, member in (aliases or {}).items() if alias]
    return _mentions(text, tuple(names))
