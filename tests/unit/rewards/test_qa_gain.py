"""The QA gain: picking, hand values, call counts, cache, missing judgements."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from writer_rl.configs.schema import QaConfig, SimulationConfig
from writer_rl.data.embedding import HashedEmbedder
from writer_rl.data.memory import MemoryState, Record
from writer_rl.data.records import Dialogue, Message, Question, Session
from writer_rl.data.simulation.chats import WINDOW, simulate_split
from writer_rl.data.traces import replay
from writer_rl.rewards.qa.cache import AnswerCache, CachedAnswer
from writer_rl.rewards.qa.embedded import embedded_stage
from writer_rl.rewards.qa.interfaces import QueryStage
from writer_rl.rewards.qa.types import Answer, Evidence, Judgement, Projection, RowEvidence
from writer_rl.rewards.qa_gain import QaScorer, pick_questions, qa_gain

CONFIG = QaConfig()


def question(question_id: str, text: str = "Where does Mira live now?", answer: str = "Leeds") -> Question:
    return Question(question_id, text, answer)


QUESTIONS = (
    question("q1"),
    question("q2", "What does Tom never eat?", "nuts"),
    question("q3", "Which pet does Tom have?", "cat"),
)


def dialogue(questions: Sequence[Question] = QUESTIONS) -> Dialogue:
    messages = (Message("1", "Mira", "Hello there"), Message("2", "Tom", "Good morning"))
    return Dialogue("d", ("Mira", "Tom"), (Session("s", "", messages),), tuple(questions))


def memory(**facts: str) -> MemoryState:
    return MemoryState(
        records=tuple(
            Record(f"m{i}", content, owner, owner, "per_speaker_core")
            for i, (owner, content) in enumerate(facts.items())
        )
    )


GOOD = memory(Mira="Mira lives in Leeds", Tom="Tom never eats nuts")


class CountingStage:
    """The embedded stage, with its calls counted and its judgements missing for chosen (question, answer) pairs."""

    def __init__(self, unjudged: Sequence[tuple[str, str]] = (), missing_score: float | None = None) -> None:
        self.calls: Counter[str] = Counter()
        self._inner = embedded_stage(CONFIG, HashedEmbedder())
        self._unjudged, self._missing_score = unjudged, missing_score

    def messages(self, projection: Projection, messages: Sequence[Message]) -> tuple[Message, ...]:
        self.calls["retrieve s1"] += 1
        return self._inner.retriever.messages(projection, messages)

    def rows(self, projection: Projection, memory: MemoryState) -> tuple[RowEvidence, ...]:
        return self._inner.retriever.rows(projection, memory)

    def answer(self, question: Question, projection: Projection, evidence: Evidence) -> Answer:
        self.calls["answer s1+s2" if evidence.rows else "answer s1"] += 1
        return self._inner.reader.answer(question, projection, evidence)

    def judge(self, question: Question, answer: Answer) -> Judgement:
        self.calls["judge"] += 1
        if (question.question_id, answer.text) in self._unjudged:
            return Judgement(self._missing_score, "no verdict in the reply")
        return self._inner.judge.judge(question, answer)

    def stage(self) -> QueryStage:
        return QueryStage("counting/1", self._inner.projector, self, self, self)


def scorer(stage: CountingStage | None = None, config: QaConfig = CONFIG, cache: AnswerCache | None = None) -> QaScorer:
    return QaScorer(config, HashedEmbedder(), cache, stage.stage() if stage else None)


def test_pick_questions() -> None:
    ten = [question(f"q{i}") for i in range(10)]
    # floor(i * 10 / 4) for i = 0..3
    assert [q.question_id for q in pick_questions(ten[::-1], 4)] == ["q0", "q2", "q5", "q7"]
    assert [q.question_id for q in pick_questions(ten[:3], 4)] == ["q0", "q1", "q2"]
    assert pick_questions(ten, 0) == ()


def test_qa_gain_hand_values() -> None:
    assert qa_gain([1.0, 0.5], [0.5, 0.5]) == 0.25
    assert qa_gain([0.0, 0.0], [1.0, 1.0]) == -1.0
    assert qa_gain([5.0], [0.0]) == 1.0  # a judge with a larger scale is clipped
    with pytest.raises(ValueError, match="same questions"):
        qa_gain([1.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="at least one"):
        qa_gain([], [])


def test_group_gains_hand_value() -> None:
    # S1 answers no question (0, 0, 0); GOOD answers two of three, half of it one of three.
    found = scorer().group_gains(dialogue(), [GOOD, MemoryState(), memory(Mira="Mira lives in Leeds")])
    assert found.gains == (pytest.approx(2 / 3), 0.0, pytest.approx(1 / 3))
    assert (found.question_ids, found.dropped, found.s1_mean) == (("q1", "q2", "q3"), (), 0.0)
    # Rows: Mira, Tom, Tom for each of three memories; empty are 0 + 3 + 2.
    assert found.none_rate == pytest.approx(5 / 9)


def test_s1_side_runs_once_per_question_whatever_the_group() -> None:
    stage = CountingStage()
    scoring = scorer(stage)
    scoring.group_gains(dialogue(), [GOOD] * 8)
    scoring.group_gains(dialogue(), [MemoryState()] * 8)
    assert scoring.s1_scores(dialogue()) == {"q1": 0.0, "q2": 0.0, "q3": 0.0}
    # Three questions: S1 once each; two distinct memories, so two S1+S2 answers each.
    assert stage.calls == {"retrieve s1": 3, "answer s1": 3, "answer s1+s2": 6, "judge": 9}


def test_cache_is_by_content_and_survives_a_resume() -> None:
    stage = CountingStage()
    first = scorer(stage)
    gains = first.group_gains(dialogue(), [GOOD, MemoryState()])
    kept = json.loads(json.dumps(first.cache.state_dict()))
    resumed_cache = AnswerCache()
    resumed_cache.load_state_dict(kept)
    fresh = CountingStage()
    resumed = scorer(fresh, cache=resumed_cache)
    assert resumed.group_gains(replace(dialogue(), dialogue_id="renamed"), [GOOD, MemoryState()]) == gains
    assert fresh.calls == {}
    assert json.loads(json.dumps(resumed.cache.state_dict())) == kept
    edited = dialogue([replace(q, answer="Oslo") for q in QUESTIONS])
    assert resumed.group_gains(edited, [GOOD]).gains == (0.0,)
    other_budget = scorer(fresh, CONFIG.model_copy(update={"s2_k": 1}), resumed_cache)
    before = fresh.calls["answer s1"]
    other_budget.group_gains(dialogue(), [GOOD])
    assert fresh.calls["answer s1"] == before + 3


def test_cache_is_bounded() -> None:
    cache = AnswerCache(max_entries=2)
    for key in "abc":
        cache.put(key, CachedAnswer(key, 0.0))
        cache.get("a")
    assert list(cache.state_dict()) == ["c", "a"]
    with pytest.raises(ValueError, match="max_entries"):
        AnswerCache(0)


@pytest.mark.parametrize("missing_score", [None, float("nan")])
def test_a_question_missing_for_one_trajectory_leaves_the_whole_group(missing_score: float | None) -> None:
    stage = CountingStage([("q3", "never eats nuts")], missing_score)  # what GOOD makes the reader answer to q3
    assert scorer(CountingStage()).answer_questions(dialogue(), GOOD)[2].answer == "never eats nuts"
    empty = MemoryState()
    found = scorer(stage).group_gains(dialogue(), [GOOD, empty, None])
    # Left q1 and q2: GOOD answers both. Counting the failure as 0 would give 2/3.
    assert found.gains == (1.0, 0.0, None)
    assert found.question_ids == ("q1", "q2")
    assert found.dropped[0] == ("q3", "trajectory 0: no verdict in the reply")


def test_fewer_than_two_questions_leave_the_group_without_qa() -> None:
    stage = CountingStage([("q3", "never eats nuts"), ("q2", "nuts")])
    found = scorer(stage).group_gains(dialogue(), [GOOD, MemoryState()])
    assert found.gains == (None, None)
    assert [question_id for question_id, _ in found.dropped] == ["q2", "q3"]
    assert scorer().group_gains(dialogue(QUESTIONS[:1]), [GOOD]).gains == (None,)
    assert scorer().group_gains(dialogue(()), [GOOD]).gains == (None,)


def test_a_missing_s1_side_drops_the_question_and_is_not_cached() -> None:
    s1_answer = scorer().answer_questions(dialogue(), None)[0].answer
    stage = CountingStage([("q1", s1_answer)])
    scoring = scorer(stage)
    found = scoring.group_gains(dialogue(), [GOOD])
    assert found.dropped == (("q1", "S1-only: no verdict in the reply"),)
    assert found.gains == (0.5,)  # q2 right, q3 wrong
    assert scoring.s1_scores(dialogue())["q1"] is None
    assert stage.calls["answer s1"] == 4  # q1 was tried again


def test_failed_trajectories_and_disabled_qa() -> None:
    assert scorer().group_gains(dialogue(), [None, None]).gains == (None, None)
    assert scorer(config=QaConfig(enabled=False)).group_gains(dialogue(), [GOOD]).gains == (None,)
    assert scorer(config=QaConfig(max_questions=1)).group_gains(dialogue(), [GOOD]).gains == (None,)


def test_answer_questions_in_both_arms() -> None:
    without = scorer().answer_questions(dialogue(), None)
    assert [r.question_id for r in without] == ["q1", "q2", "q3"]
    assert not any(r.has_records or r.none_rows for r in without)
    first, *_ = scorer().answer_questions(dialogue(), memory(Mira="Mira lives in Leeds"), QUESTIONS[:1])
    assert (first.answer, first.gold, first.score, first.error) == ("Leeds", "Leeds", 1.0, "")
    assert (first.entry_ids, first.support, first.message_ids) == (("m0",), ("record:m0",), ("1", "2"))
    assert "Mira lives in Leeds" in first.evidence
    tom = scorer().answer_questions(dialogue(), memory(Mira="Mira lives in Leeds"))[1]
    assert tom.none_rows == ("Tom",)
    assert "Tom: (none)" in tom.evidence


def test_true_memory_beats_the_raw_messages_on_simulated_chats() -> None:
    scoring = scorer()
    truth, wrong_owner, stale, costs = [], [], [], []
    for chat in simulate_split(SimulationConfig(num_train=24), "train"):
        *_, last = replay(chat.dialogue, chat.trace, WINDOW)
        true, members = last.after, chat.dialogue.members
        swapped = {name: members[i - 1] for i, name in enumerate(members)}
        variants = [
            true,
            MemoryState(),
            replace(true, records=tuple(replace(r, owner=swapped.get(r.owner, r.owner)) for r in true.records)),
            replace(true, records=tuple(replace(r, superseded_by="") for r in true.records if not r.links)),
        ]
        start = time.process_time()
        gains = scoring.group_gains(chat.dialogue, variants * 2).gains
        costs.append(time.process_time() - start)
        if gains[0] is not None:
            assert gains[1] == 0.0
            truth.append(gains[0])
            wrong_owner.append(gains[2])
            stale.append(gains[3])
    mean = {name: sum(values) / len(values) for name, values in {"t": truth, "w": wrong_owner, "s": stale}.items()}  # type: ignore[arg-type]
    assert mean["t"] > 0.2
    assert mean["w"] < mean["t"] - 0.1
    assert mean["s"] < mean["t"] - 0.1
    assert sorted(costs)[len(costs) // 2] < 0.05
