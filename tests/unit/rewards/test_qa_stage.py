"""The offline query stage: projection, retrieval, evidence, reading, judging."""

from __future__ import annotations

import pytest

from writer_rl.configs.errors import InputError
from writer_rl.configs.schema import QaConfig
from writer_rl.data.actions import GROUP
from writer_rl.data.embedding import HashedEmbedder
from writer_rl.data.memory import MemoryState, Record
from writer_rl.data.records import Message, Question
from writer_rl.rewards.qa.answer import ExtractiveReader
from writer_rl.rewards.qa.embedded import embedded_stage
from writer_rl.rewards.qa.evidence import render_evidence
from writer_rl.rewards.qa.judge import TokenF1Judge, answer_f1, gold_answer
from writer_rl.rewards.qa.project import RuleProjector
from writer_rl.rewards.qa.retrieve import BudgetRetriever, bm25
from writer_rl.rewards.qa.types import Answer, Evidence, Projection, RowEvidence
from writer_rl.rewards.qa.words import mentions, root, words

MEMBERS = ("Mira", "Tom", "Sam")


def project(text: str, **fields: object) -> Projection:
    return RuleProjector().project(Question("q", text, "", **fields), MEMBERS, {"Mimi": "Mira"})  # type: ignore[arg-type]


def chat(*lines: tuple[str, str], session: str = "s1") -> tuple[Message, ...]:
    return tuple(
        Message(f"{session}-{i}", speaker, text, session_id=session, position=i)
        for i, (speaker, text) in enumerate(lines)
    )


def person(entry_id: str, owner: str, content: str, source: str = "", segment: int = 0, **fields: object) -> Record:
    layer = "group_interaction" if owner == GROUP else "per_speaker_core"
    return Record(entry_id, content, owner, source or owner, layer, created_at_segment=segment, **fields)  # type: ignore[arg-type]


MESSAGES = chat(
    ("Mira", "I moved to York."),
    ("Tom", "Mira is always late, as usual."),
    ("Sam", "Is anyone awake?"),
    ("Mira", "Coffee first."),
    ("Sam", "It's settled, we go to Porto in May."),
    ("Mira", "Not York any more, Leeds is home since Friday."),
    ("Tom", "Mira, are you there?"),
)
MEMORY = MemoryState(
    messages=MESSAGES,
    records=(
        person("m1", "Mira", "Mira lives in York", superseded_by="m4"),
        person("m2", "Mira", "Mira is always late", source="Tom"),
        person("m3", GROUP, "The group goes to Porto in May", source="Sam"),
        person("m4", "Mira", "Mira lives in Leeds", segment=1, links=("m1",)),
        person("m5", "Tom", "Tom never eats nuts"),
    ),
)


def ask(text: str, memory: MemoryState | None = MEMORY, **fields: object) -> Answer:
    stage = embedded_stage(QaConfig(), HashedEmbedder())
    question = Question("q", text, "", **fields)  # type: ignore[arg-type]
    projection = stage.projector.project(question, MEMBERS, {})
    rows = () if memory is None else stage.retriever.rows(projection, memory)
    return stage.reader.answer(question, projection, Evidence(stage.retriever.messages(projection, MESSAGES), rows))


@pytest.mark.parametrize(
    ("text", "rows", "mode", "scope"),
    [
        ("Where does Mira live now?", ("Mira",), "head", "persons"),
        ("What does Tom think of Mimi?", ("Mira", "Tom"), "head", "persons"),
        ("How did Mira's home change?", ("Mira",), "full", "persons"),
        ("Where did Tom work before?", ("Tom",), "full", "persons"),
        ("What is each member's view?", MEMBERS, "head", "all"),
        ("What did the group decide about the trip?", (GROUP,), "head", "group"),
        ("What did Sam decide for the group?", ("Sam", GROUP), "head", "persons"),
        ("Who lives in Leeds?", (*MEMBERS, GROUP), "head", "open"),
    ],
)
def test_project(text: str, rows: tuple[str, ...], mode: str, scope: str) -> None:
    projection = project(text)
    assert (projection.rows, projection.mode, projection.scope) == (rows, mode, scope)


def test_project_obeys_the_data_set() -> None:
    projection = project("Where is the trip?", rows=("GROUP",), mode="full")
    assert (projection.rows, projection.mode, projection.scope) == (("GROUP",), "full", "group")


def test_issue_holds_neither_names_nor_function_words() -> None:
    assert project("Where does Mira live with Mimi now?").issue == "live"


def test_words() -> None:
    assert {root(word) for word in ("live", "lives", "lived", "living")} == {"liv"}
    assert root("has") == root("have")
    assert [word.root for word in words("去年 Porto")] == ["去", "年", "porto"]
    assert [word.sentence for word in words("One. Two 3.5 four")] == [0, 1, 1, 1, 1]
    assert [word.is_function for word in words("May we go in May? May be.")] == [
        True,
        True,
        False,
        True,
        False,
        True,
        True,
    ]
    assert mentions("In May, may I?", ["May"]) == ("May",)
    assert mentions("may I ask Tom?", ["May", "Tom"]) == ("Tom",)
    assert mentions("问小明去哪里", ["小明"]) == ("小明",)


def test_bm25_hand_value() -> None:
    # N = 2, "a" in one document: idf = log(1 + 1.5/1.5) = log 2; both documents have mean length, so
    # damp = k1 and the term factor is 1·2.5/(1 + 1.5) = 1.
    assert bm25(frozenset({"a"}), [["a", "b"], ["c", "b"]]) == [pytest.approx(0.6931471805599453), 0]
    assert bm25(frozenset({"a"}), []) == []


def test_messages_keep_budget_and_order() -> None:
    retriever = BudgetRetriever(QaConfig(s1_top_k=2), HashedEmbedder())
    found = retriever.messages(project("Who said that Mira is always late?"), MESSAGES)
    assert len(found) == 2
    assert "s1-1" in {message.message_id for message in found}
    assert [m.position for m in found] == sorted(m.position for m in found)
    assert BudgetRetriever(QaConfig(s1_top_k=0), HashedEmbedder()).messages(project("Mira?"), MESSAGES) == ()


def test_expansion_takes_neighbours_of_the_same_session_within_the_budget() -> None:
    messages = MESSAGES + chat(("Tom", "zebra crossing"), ("Sam", "Lol"), session="s2")
    found = BudgetRetriever(QaConfig(s1_top_k=3, expand=2), HashedEmbedder()).messages(project("zebra"), messages)
    assert [message.message_id for message in found][-2:] == ["s2-0", "s2-1"]
    assert len(found) == 3


def test_rows_budget_source_k_chains_and_empty_rows() -> None:
    retriever = BudgetRetriever(QaConfig(s2_k=1, source_k=1), HashedEmbedder())
    row = retriever.rows(project("Where does Mira live now?"), MEMORY)[0]
    assert [[r.entry_id for r in chain] for chain in row.chains] == [["m4"]]
    row = retriever.rows(project("How did it change where Mira lives?"), MEMORY)[0]
    assert [[r.entry_id for r in chain] for chain in row.chains] == [["m1", "m4"]]
    tom, sam = retriever.rows(project("What do Tom and Sam say?"), MEMORY)
    assert [r.entry_id for r in tom.records] == ["m5", "m2"]
    assert [r.entry_id for r in sam.said] == ["m3"]
    evidence = Evidence((), retriever.rows(project("each?"), MemoryState()))
    assert evidence.empty_rows == MEMBERS
    assert evidence.records == ()


def test_render_by_person_and_chain() -> None:
    rows = (
        RowEvidence("Mira", ((MEMORY.records[0], MEMORY.records[3]),)),
        RowEvidence("Tom", (), (MEMORY.records[1],)),
        RowEvidence("Sam"),
    )
    assert render_evidence(Evidence(MESSAGES[:1], rows)) == (
        "Mira:\n- Mira lives in York → Mira lives in Leeds\n"
        "Tom:\n- said about Mira: Mira is always late\n"
        "Sam: (none)\n"
        "Messages:\n- Mira: I moved to York."
    )


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Where does Mira live now?", "Leeds"),
        ("How did it change where Mira lives?", "York then Leeds"),
        ("Who said that Mira is always late?", "Tom"),
        ("Who lives in Leeds?", "Mira"),
        ("Where does the group go?", "Porto in May"),
        ("What does Tom never eat?", "nuts"),
    ],
)
def test_reader_with_memory(text: str, answer: str) -> None:
    assert ask(text).text == answer


def test_reader_without_memory_misses_what_is_worded_otherwise() -> None:
    assert ask("Where does Mira live now?", None).text != "Leeds"
    assert ask("Who said that Mira is always late?", None).text == "Tom"


def test_wrong_coordinates_mislead_the_reader() -> None:
    told = person("x1", "Mira", "Mira is always late", source="Sam")
    assert ask("Who said that Mira is always late?", MemoryState(records=(told,))).text == "Sam"
    stale = MemoryState(records=(person("x1", "Mira", "Mira lives in York"),))
    assert ask("Where does Mira live now?", stale).text == "York"
    foreign = MemoryState(records=(person("x1", "Tom", "Mira lives in Leeds"),))
    assert ask("Where does Mira live now?", foreign).text != "Leeds"


def test_reader_everyone_options_and_nothing() -> None:
    each = ask("What does everyone live on or eat?").text
    assert "Tom nuts" in each
    assert "Mira" in each
    options = (("A", "somewhere in York"), ("B", "somewhere in Leeds"))
    assert ask("Where does Mira live now?", options=options).text == "somewhere in Leeds"
    assert ExtractiveReader().answer(Question("q", "Who?", ""), project("Who?"), Evidence(())) == Answer("")


def test_empty_rows_leave_the_answer_untouched() -> None:
    for text in ("Where does Mira live now?", "Who said it?", "What did the group decide?", "What does each eat?"):
        assert ask(text, MemoryState()) == ask(text, None)


def test_reader_support_names_what_it_read() -> None:
    assert ask("Where does Mira live now?").support == ("record:m4",)
    assert ask("How did it change where Mira lives?").support == ("record:m1", "record:m4")


@pytest.mark.parametrize(
    ("predicted", "gold", "score"),
    [
        ("in Leeds", "Leeds", 2 / 3),  # p = 1/2, r = 1
        ("LEEDS.", "leeds", 1.0),
        ("Leeds, now", "Leeds now", 0.5),  # whitespace sets: "leeds," is another word
        ("a a b", "a b", 1.0),  # sets
        ("", "", 0.0),
        ("x", "", 0.0),
        ("York", "Leeds", 0.0),
    ],
)
def test_answer_f1(predicted: str, gold: str, score: float) -> None:
    assert answer_f1(predicted, gold) == pytest.approx(score)


def test_judge() -> None:
    question = Question("q", "?", "B", options=(("A", "York"), ("B", "Leeds")), correct_option="B")
    assert gold_answer(question) == "Leeds"
    assert TokenF1Judge().judge(question, Answer("Leeds")).score == 1.0
    missing = TokenF1Judge().judge(question, Answer("", error="timeout"))
    assert (missing.score, missing.error) == (None, "timeout")


def test_embedded_stage_cannot_ask() -> None:
    with pytest.raises(InputError, match=r"reward\.qa\.ask"):
        embedded_stage(QaConfig(ask=True), HashedEmbedder())
