"""Doubts about a teacher's trace: language, repetition, empty updates, misfiled and unsupported records.

Every check is a pure function from replayed steps to findings, JSON objects with `segment_index`, `code` and `detail` (and
`entry_id` where one record is meant). A finding is a reason to look, not a verdict: nothing is changed or dropped here.

Source: the contract of specification §3; the kinds of fault are those seen in released teacher traces.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any

from writer_rl.data.actions import GROUP, GROUP_LAYERS, normalise_content
from writer_rl.data.memory import Record
from writer_rl.data.records import Dialogue
from writer_rl.data.traces import ReplayedStep, TeacherTrace, replay

Finding = dict[str, Any]


def _set_of(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


MIN_FUNCTION_WORDS = 4
MIN_LEAD = 1.5
RESTATING_RATIO = 0.75

# Frequent function words. A word that several languages share counts for each of them.
FUNCTION_WORDS: dict[str, frozenset[str]] = {
    "en": _set_of(
        "the a an and or but of to in on at for with from by is are was were be been has have had will would should could "
        "not that this these those it its he she they them his her their we you your my our i as if when who what which "
        "because about after before there than then so just do does did can may might no"
    ),
    "it": _set_of(
        "il lo la gli le un uno una di da del della dei delle dello nel nella nei al alla ai alle dal dalla sul sulla per con "
        "che chi non è e ed o ma si sono ha hanno ho era essere stato questo questa come più anche perché quando se suo sua "
        "sue suoi loro cui dopo ci tra fra"
    ),
    "fr": _set_of(
        "le la les un une des du de et ou mais est sont a ont au aux dans pour par avec sur que qui ne pas ce cette ces il elle "
        "ils elles nous vous je son sa ses leur leurs plus été être se en y d l qu n c j s"
    ),
    "de": _set_of(
        "der die das den dem des ein eine einen einem einer und oder aber ist sind war hat haben wird nicht mit von zu zum zur "
        "im in am auf für bei nach aus als auch dass es er sie wir ihr ich sein seine ihre sich wenn noch nur kein keine"
    ),
    "es": _set_of(
        "el la los las un una unos unas de del al y o pero es son está están ha han que quien no se su sus con por para en como "
        "más también porque cuando si lo le les fue ser este esta estos sobre entre después ya muy"
    ),
    "pt": _set_of(
        "o a os as um uma de do da dos das no na nos nas ao à e ou mas é são está foi ser tem têm que quem não se seu sua seus "
        "com por para em como mais também porque quando ele ela eles pelo pela já muito este esta isso"
    ),
    "nl": _set_of(
        "de het een en of maar is zijn was heeft hebben van in op te aan voor met bij naar uit als ook dat die dit niet geen wel "
        "er hij zij ze we wij ik je haar hun om over dan nog wordt werd kan zal"
    ),
    "pl": _set_of(
        "i w na z ze do nie to jest są się że jak ale o po od dla za przez był była było być ma mają co który która które jego "
        "jej ich już tylko tym tego ten ta te czy gdy oraz"
    ),
}  # fmt: skip
_SCRIPTS = (("HIRAGANA", "ja"), ("KATAKANA", "ja"), ("HANGUL", "ko"), ("CJK", "zh"), ("CYRILLIC", "ru"),
            ("ARABIC", "ar"), ("GREEK", "el"), ("HEBREW", "he"), ("DEVANAGARI", "hi"), ("THAI", "th"))  # fmt: skip

# Stems: a word that starts with one of them announces a wish, not a settled matter.
_PROPOSAL = re.compile(
    r"\b(propos|suggest|recommend|would like|should\b|could\b|vorschl|schlägt|schlage|sollte|propon|propuest|sugier|suger|suggeri|"
    r"dovrebb|vorrebb|debería|devia|voorstel|stelt|proponuj)",
    re.IGNORECASE,
)
_AGREEMENT = re.compile(
    r"\b(agree|agreed|decided?|settled?|deal|confirmed|approved|booked|voted?|unanimous|it is\b|let'?s (do|go|meet|make|keep)|"
    r"we(?:'|’)?(?:ll| will|re going| are going)|sounds good|works for me|fair enough|that'?s fair|count me in|i'?m in\b|"
    r"all in favou?r|d'accordo|deciso|va bene|confermato|einverstanden|abgemacht|beschlossen|machen wir|d'accord|décidé|"
    r"c'est bon|de acuerdo|decidido|vale\b|combinado|fechado|afgesproken|akkoord|zgoda|ustalone)"
    r"|同意|决定|決定|就这么|說好|说好|賛成|决まり|了解",
    re.IGNORECASE,
)
_NEGATION = _set_of(
    "no not never none nothing without cannot non mai né senza ne pas jamais sans nicht kein keine nie ohne sin nunca não "
    "nem sem niet geen nooit zonder nie bez nigdy"
)
# Small words whose change changes the matter.
_DECISIVE = _NEGATION | _set_of("may might could would should already before after until more less più meno")
_ALL_FUNCTION_WORDS = frozenset[str]().union(*FUNCTION_WORDS.values())
_UNITS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_NUMBER_WORDS = {word: value for value, word in enumerate(_UNITS)} | {word: 10 * n for n, word in enumerate(_TENS, 2)}
_NUMBER_WORDS |= {"first": 1, "second": 2, "third": 3, "fourth": 4, "fifth": 5, "sixth": 6, "hundred": 100}
_WORD = re.compile(r"[^\W_]+", re.UNICODE)


def words(text: str) -> list[str]:
    """Case-folded runs of letters and digits; contracted "n't" becomes the word "not".

    Example:
        >>> words("Isn't it 7-9?")
        ['is', 'not', 'it', '7', '9']
    """
    folded = unicodedata.normalize("NFKC", text).casefold().replace("’", "'")
    return _WORD.findall(re.sub(r"n't\b", " not", folded))


def detect_language(texts: Iterable[str]) -> str:
    """Language of texts taken together, an ISO 639-1 code, or "" when they are too short or too mixed to tell.

    Scripts decide first; Latin text goes by function words: the best language needs at least four of them and half as
    many again as the second.

    Example:
        >>> detect_language(["La serie non è pronta", "Raj ha un nuovo contratto"])
        'it'
        >>> detect_language(["ok", "Leeds!"])
        ''
    """
    text = " ".join(texts)
    scripts: Counter[str] = Counter()
    for char in text:
        if char.isalpha():
            name = unicodedata.name(char, "")
            scripts[next((code for prefix, code in _SCRIPTS if name.startswith(prefix)), "")] += 1
    total = scripts.total()
    if not total:
        return ""
    if scripts["ja"] >= 0.1 * total and scripts["ja"] + scripts["zh"] > 0.4 * total:
        return "ja"
    # A Chinese character says as much as several letters, so names in Latin letters do not outvote it.
    for code, count in scripts.most_common():
        if code and count > (0.25 if code == "zh" else 0.5) * total:
            return code
    found = Counter(words(text))
    scores = sorted(
        ((sum(found[word] for word in known), code) for code, known in FUNCTION_WORDS.items()),
        key=lambda pair: -pair[0],
    )
    (best, code), (second, _) = scores[0], scores[1]
    return code if best >= MIN_FUNCTION_WORDS and best >= MIN_LEAD * second else ""


def chat_language(dialogue: Dialogue) -> str:
    """The language a dialogue declares, else the one its messages show, else ""."""
    declared = dialogue.language.strip().casefold()[:2]
    return declared or detect_language(m.text for session in dialogue.sessions for m in session.messages)


def foreign_language(steps: Sequence[ReplayedStep], language: str) -> list[Finding]:
    """Records in another language than the chat's.

    A segment is judged by its own records; one that is too short to tell follows the whole trace.
    """
    if not language:
        return []
    overall = detect_language(action.content for step in steps for action in step.actions)
    found = []
    for step in steps:
        contents = [action.content for action in step.actions if action.content]
        written = detect_language(contents) or overall
        if contents and written and written != language:
            detail = f"{len(contents)} records are written in {written}, the chat in {language}"
            found.append(_finding(step, "foreign_language", detail))
    return found


def repeated_adds(steps: Sequence[ReplayedStep]) -> list[Finding]:
    """ADDs whose normalised content, owner and layer were added in an earlier segment already."""
    first: dict[tuple[str, str, str], Record] = {}
    found = []
    for step, record in _written(steps, "ADD"):
        key = (record.owner, record.layer, normalise_content(record.content))
        if key in first and first[key].created_at_segment != step.segment.index:
            detail = f"repeats {first[key].entry_id!r} of segment {first[key].created_at_segment}: {record.content}"
            found.append(_finding(step, "repeated_add", detail, record.entry_id))
        first.setdefault(key, record)
    return found


def _content_words(text: str) -> list[str]:
    return [word for word in words(text) if word in _DECISIVE or word not in _ALL_FUNCTION_WORDS]


def _same_word(word: str, old: Sequence[str]) -> str | None:
    """The old word that `word` repeats or inflects; decisive words and numbers must be the same letter by letter."""
    if word in old:
        return word
    if word in _DECISIVE or any(char.isdigit() for char in word) or len(word) < 5:
        return None
    near = (
        o
        for o in old
        if o[:4] == word[:4] and SequenceMatcher(None, word, o).ratio() >= 0.8 and not re.search(r"\d", o)
    )
    return next(near, None)


def restates(old: str, new: str) -> bool:
    """Whether a new content says what the old one said: nothing but its words, in much the same order, little left out.

    Example:
        >>> restates("Ben prefers concise checklists", "Ben prefers the concise checklist")
        True
        >>> restates("Nina tracks checkpoint 3", "Nina tracks checkpoint 4")
        False
        >>> restates("Ana owes Ben", "Ben owes Ana")
        False
    """
    old_words, new_words = _content_words(old), _content_words(new)
    if not old_words or not new_words:
        return normalise_content(old) == normalise_content(new)
    aligned = [_same_word(word, old_words) for word in new_words]
    kept = {word for word in aligned if word is not None}
    dropped = [word for word in old_words if word not in kept]
    if None in aligned or any(word in _DECISIVE or re.search(r"\d", word) for word in dropped):
        return False
    return SequenceMatcher(None, old_words, aligned, autojunk=False).ratio() >= RESTATING_RATIO


def restating_updates(steps: Sequence[ReplayedStep]) -> list[Finding]:
    """UPDATEs that say what the superseded record said already."""
    found = []
    for step, record in _written(steps, "UPDATE"):
        old = step.after.find(record.links[0])
        if old is not None and restates(old.content, record.content):
            detail = f"{old.content!r} became {record.content!r}"
            found.append(_finding(step, "restating_update", detail, record.entry_id))
    return found


def misfiled_reports(steps: Sequence[ReplayedStep]) -> list[Finding]:
    """ADDs on the wrong person layer: own words filed as what others observe, or hearsay filed as own words."""
    found = []
    for step, record in _written(steps, "ADD"):
        if record.layer == "per_speaker_profile" and record.owner == record.source:
            detail = f"{record.owner} speaks of themselves on the layer of what others observe: {record.content}"
            found.append(_finding(step, "self_report_as_profile", detail, record.entry_id))
        if record.layer == "per_speaker_core" and record.owner != record.source:
            detail = (
                f"{record.source} speaks of {record.owner} on the layer of {record.owner}'s own words: {record.content}"
            )
            found.append(_finding(step, "hearsay_as_core", detail, record.entry_id))
    return found


def unknown_names(steps: Sequence[ReplayedStep]) -> list[Finding]:
    """ADDs whose owner or source is no member: rule set *fixed* would refuse their whole list."""
    found = []
    for step, record in _written(steps, "ADD"):
        names = [record.source] if record.owner == GROUP else [record.owner, record.source]
        strangers = [name for name in dict.fromkeys(names) if step.after.roster.canonical(name) is None]
        if strangers:
            detail = f"{' and '.join(strangers)} is no member: {record.content}"
            found.append(_finding(step, "unknown_name", detail, record.entry_id))
    return found


def group_decisions_without_cue(steps: Sequence[ReplayedStep]) -> list[Finding]:
    """GROUP decisions whose content calls itself a proposal, or whose segment holds no word of agreement.

    Best effort: cue words of a few languages, English above all; irony and agreement by silence are beyond it.
    """
    found = []
    for step, record in _written(steps, "ADD"):
        if record.owner != GROUP or record.layer not in GROUP_LAYERS or record.kind != "decision":
            continue
        if _PROPOSAL.search(record.content):
            detail = f"the record itself tells of a proposal: {record.content}"
        elif not any(_AGREEMENT.search(message.text.replace("’", "'")) for message in step.segment.messages):
            detail = f"no message of the segment agrees to or settles anything: {record.content}"
        else:
            continue
        found.append(_finding(step, "group_decision_without_cue", detail, record.entry_id))
    return found


def _numbers(text: str) -> set[str]:
    """Numbers of a text without leading zeros: "07:30" gives 7 and 30, "forty-two" 40, 2 and 42."""
    numbers = {digits.lstrip("0") or "0" for digits in re.findall(r"\d+", text)}
    tens = 0
    for word in words(text):
        value = _NUMBER_WORDS.get(word)
        if value is not None:
            numbers |= {str(value), str(tens + value)} if tens and 0 < value < 10 else {str(value)}
        tens = value if value is not None and word in _TENS else 0
    return numbers


def unsupported_numbers(steps: Sequence[ReplayedStep]) -> list[Finding]:
    """Digits in a record that no message so far mentions, in digits or in English words: perhaps an invented detail."""
    found = []
    mentioned: set[str] = set()
    for step in steps:
        for message in step.segment.messages:
            mentioned |= _numbers(message.text) | _numbers(message.speaker)
        for record in _new_records(step):
            unsaid = {digits.lstrip("0") or "0" for digits in re.findall(r"\d+", record.content)} - mentioned
            if unsaid:
                detail = f"no message so far mentions {', '.join(sorted(unsaid))}: {record.content}"
                found.append(_finding(step, "unsupported_number", detail, record.entry_id))
    return found


def check_steps(steps: Sequence[ReplayedStep], language: str) -> tuple[Finding, ...]:
    """All checks on replayed steps, ordered by segment.

    Args:
        steps: A whole replay, in order.
        language: The chat's language, see `chat_language`; "" leaves language out.
    """
    found = [
        *foreign_language(steps, language),
        *repeated_adds(steps),
        *restating_updates(steps),
        *misfiled_reports(steps),
        *unknown_names(steps),
        *group_decisions_without_cue(steps),
        *unsupported_numbers(steps),
    ]
    return tuple(sorted(found, key=lambda finding: (finding["segment_index"], finding["code"])))


def check_trace(dialogue: Dialogue, trace: TeacherTrace) -> tuple[Finding, ...]:
    """All checks on a trace, replayed with its own window.

    Raises:
        InputError: The trace does not replay.
    """
    return check_steps(list(replay(dialogue, trace, trace.window)), chat_language(dialogue))


def _new_records(step: ReplayedStep) -> tuple[Record, ...]:
    return step.after.records[len(step.before.records) :]


def _written(steps: Sequence[ReplayedStep], name: str) -> Iterator[tuple[ReplayedStep, Record]]:
    """Each record that an action of that name created, with its step."""
    for step in steps:
        for record in _new_records(step):
            if bool(record.links) == (name == "UPDATE"):
                yield step, record


def _finding(step: ReplayedStep, code: str, detail: str, entry_id: str = "") -> Finding:
    finding: Finding = {"segment_index": step.segment.index, "code": code, "detail": detail}
    return finding | {"entry_id": entry_id} if entry_id else finding
