"""Checks of teacher traces: each finds its fault and leaves the sound case alone."""

from __future__ import annotations

import pytest

from writer_rl.data.actions import GROUP, Action
from writer_rl.data.contract import PROMPT_VERSION
from writer_rl.data.records import Dialogue, Message, Session
from writer_rl.data.trace_checks import check_trace, detect_language, restates
from writer_rl.data.traces import TeacherTrace, TraceStep

CHAT = (
    "The deadline is on Friday and we should tell them about it.",
    "I will send the report to Ana before the meeting.",
    "That sounds good, it is settled then.",
    "Do you have the keys for the flat? I was not there.",
)


def found(*lists: tuple[Action, ...], chat: tuple[str, ...] = CHAT, language: str = "") -> list[tuple[int, str]]:
    """Codes of a trace over segments of two messages; Ana and Ben speak in turn."""
    chat = chat + ("ok",) * (2 * len(lists) - len(chat))
    messages = tuple(Message(f"c{i}", ("Ana", "Ben")[i % 2], text) for i, text in enumerate(chat[: 2 * len(lists)]))
    dialogue = Dialogue("d", ("Ana", "Ben"), (Session("s", "2026-08-10", messages),), language=language)
    trace = TeacherTrace("d", "t", PROMPT_VERSION, 2, tuple(TraceStep(i, actions) for i, actions in enumerate(lists)))
    return [(finding["segment_index"], finding["code"]) for finding in check_trace(dialogue, trace)]


def add(
    content: str, owner: str = "Ana", source: str = "Ana", layer: str = "per_speaker_core", kind: str = "fact"
) -> Action:
    return Action("ADD", owner, source, layer, kind, content)


def update(entry_id: str, content: str) -> Action:
    return Action("UPDATE", content=content, entry_id=entry_id)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("The work is not ready and it will be shown with the others", "en"),
        ("Il lavoro non è pronto e sarà presentato con gli altri nella mostra", "it"),
        ("Le travail n'est pas prêt et il sera montré avec les autres dans la salle", "fr"),
        ("Die Arbeit ist nicht fertig und wird mit den anderen in der Halle gezeigt", "de"),
        ("El trabajo no está listo y se muestra con los otros en la sala", "es"),
        ("O trabalho não está pronto e é mostrado com os outros na sala", "pt"),
        ("Het werk is niet klaar en wordt met de anderen in de zaal getoond", "nl"),
        ("Praca nie jest gotowa i będzie pokazana z innymi, ale tylko w tej sali", "pl"),
        ("作品还没准备好，要和其他的一起展出 in Leeds", "zh"),
        ("作品はまだ準備ができていません", "ja"),
        ("작품이 아직 준비되지 않았어요", "ko"),
        ("Работа ещё не готова", "ru"),
        ("ok 👍", ""),
        ("Leeds, York, Karachi", ""),
        ("", ""),
    ],
)
def test_languages(text: str, code: str) -> None:
    assert detect_language([text]) == code


def test_language_of_a_mixture_is_left_open() -> None:
    assert (
        detect_language(["The work is not ready and it is late", "Il lavoro non è pronto e gli altri sono in ritardo"])
        == ""
    )


def test_foreign_records_are_found_per_segment() -> None:
    italian = add("Non è pronta e sarà presentata con gli altri della mostra")
    english = add("Ana is not ready and will send it to the others")
    assert found((english,), (italian,)) == [(1, "foreign_language")]
    assert found((english,), (english,)) == [(1, "repeated_add")]


def test_a_short_segment_follows_the_whole_trace() -> None:
    italian = add("Non è pronta e sarà presentata con gli altri della mostra")
    assert found((italian,), (add("Preferisce Leeds"),)) == [(0, "foreign_language"), (1, "foreign_language")]
    assert found((add("Preferisce Leeds"),), ()) == []


def test_a_declared_language_decides() -> None:
    assert found((add("Ana is not ready and will send it to the others"),), language="it") == [(0, "foreign_language")]


def test_repeated_adds_need_the_same_owner_and_another_segment() -> None:
    assert found((add("likes tea"),), (add("Likes  TEA."),)) == [(1, "repeated_add")]
    assert found((add("likes tea"),), (add("likes tea", "Ben", "Ben"),)) == []


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("Bob prefers concise checklists", "Bob prefers the concise checklist", True),
        ("The review takes place on Friday", "The review takes place on a Friday.", True),
        ("Nina tracks budget checkpoint 3", "Nina tracks budget checkpoint 4", False),
        ("The review is on Thursday", "The review is on Tuesday", False),
        ("The plan is approved", "The plan is not approved", False),
        ("The plan is approved", "The plan is unapproved", False),
        ("Bob prefers concise checklists", "Bob prefers concise checklists with auth cases", False),
        ("Ana owes Ben", "Ben owes Ana", False),
        ("Ben will come", "Ben might come", False),
        ("Ana lives in Leeds with Ben and works at the museum", "Ana lives in Leeds", False),
        ("La serie non è pronta", "La serie è pronta", False),
    ],
)
def test_restating(old: str, new: str, same: bool) -> None:
    assert restates(old, new) is same
    assert found((add(old),), (update("m1", new),)).count((1, "restating_update")) == same


def test_layers_of_persons() -> None:
    assert found((add("likes tea", layer="per_speaker_profile"),)) == [(0, "self_report_as_profile")]
    assert found((add("likes tea", source="Ben"),)) == [(0, "hearsay_as_core")]
    assert found((add("likes tea", source="Ben", layer="per_speaker_profile"), add("likes tea"))) == []


def test_strangers() -> None:
    assert (0, "unknown_name") in found((add("likes tea", owner="Eve"),))
    assert found((add("meets weekly", GROUP, "Eve", "group_insight"),)) == [(0, "unknown_name")]
    assert found((add("meets weekly", GROUP, "ana", "group_insight"),)) == []


def test_group_decisions_want_a_word_of_agreement() -> None:
    def decision(content: str, kind: str = "decision") -> Action:
        return add(content, GROUP, "Ana", "group_interaction", kind)

    code = "group_decision_without_cue"
    assert found((decision("The group meets"),), ()) == [(0, code)]
    assert found((), (decision("The group meets"),)) == []  # "it is settled then"
    assert found((), (decision("Ana proposes that the group meets"),)) == [(1, code)]
    assert found((), (decision("Ana propone che tutti vengano"),)) == [(1, code)]
    assert found((decision("The group meets", "observation"),), ()) == []


def test_numbers_that_nobody_said() -> None:
    chat = ("forty years, at 07:30, in room B12", "ok", "the 3rd time", "ok")
    code = "unsupported_number"
    assert found((add("married 40 years, at 7.30"),), (), chat=chat) == []
    assert found((add("third try was number 3"),), (), chat=chat) == [(0, code)]
    assert found((), (add("third try was number 3"),), chat=chat) == []
    assert found((add("since 2025"),), (), chat=chat) == [(0, code)]
    assert found((add("is 42"),), chat=("she is forty-two", "ok")) == []
    assert found((add("is 42"),), chat=("forty people, two cars", "ok")) == [(0, code)]


def test_a_sound_trace_has_no_finding() -> None:
    assert (
        found((add("Ana will not be at the meeting"),), (update("m1", "Ana will be at the meeting after all"),)) == []
    )
