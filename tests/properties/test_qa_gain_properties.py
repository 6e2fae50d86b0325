"""Invariances of the QA gain over random memories of simulated chats (known fault 33 among them)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from writer_rl.configs.schema import QaConfig, SimulationConfig
from writer_rl.data.embedding import HashedEmbedder
from writer_rl.data.memory import MemoryState
from writer_rl.data.records import Dialogue, Question
from writer_rl.data.simulation.chats import WINDOW, simulate_split
from writer_rl.data.traces import replay
from writer_rl.rewards.qa.embedded import embedded_stage
from writer_rl.rewards.qa.interfaces import QueryStage
from writer_rl.rewards.qa.types import Answer, Judgement
from writer_rl.rewards.qa_gain import QaScorer

CONFIG = QaConfig()
SEEDS = range(6)


class SilentJudge:
    """The embedded judge, silent on the questions given; answers are judged alike in both arms."""

    def __init__(self, silent: frozenset[str]) -> None:
        self._silent = silent
        self._inner = embedded_stage(CONFIG, HashedEmbedder()).judge

    def judge(self, question: Question, answer: Answer) -> Judgement:
        if question.question_id in self._silent:
            return Judgement(None, "silent")
        return self._inner.judge(question, answer)


def case(seed: int) -> tuple[Dialogue, list[MemoryState | None]]:
    """A simulated chat and eight memories: random parts of the true one, and one failed trajectory."""
    rng = random.Random(seed)
    chat = next(iter(simulate_split(SimulationConfig(num_train=1, seed=seed), "train")))
    *_, last = replay(chat.dialogue, chat.trace, WINDOW)
    states: list[MemoryState | None] = [None]
    for _ in range(7):
        kept = tuple(replace(r, links=(), superseded_by="") for r in last.after.records if rng.random() < 0.6)
        states.append(replace(last.after, records=kept))
    return chat.dialogue, states


def scorer(silent: frozenset[str] = frozenset()) -> QaScorer:
    inner = embedded_stage(CONFIG, HashedEmbedder())
    stage = QueryStage(f"test/{sorted(silent)}", inner.projector, inner.retriever, inner.reader, SilentJudge(silent))
    return QaScorer(CONFIG, HashedEmbedder(), stage=stage)


@pytest.mark.parametrize("seed", SEEDS)
def test_permuting_trajectories_permutes_gains(seed: int) -> None:
    dialogue, states = case(seed)
    order = random.Random(seed).sample(range(len(states)), len(states))
    gains = scorer().group_gains(dialogue, states).gains
    assert scorer().group_gains(dialogue, [states[i] for i in order]).gains == tuple(gains[i] for i in order)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_gain_does_not_depend_on_company_cache_or_question_order(seed: int) -> None:
    dialogue, states = case(seed)
    shared = scorer()
    gains = shared.group_gains(dialogue, states).gains
    assert shared.group_gains(dialogue, states).gains == gains
    turned = replace(dialogue, questions=dialogue.questions[::-1])
    assert scorer().group_gains(turned, states).gains == gains
    for state, gain in zip(states, gains, strict=True):
        assert scorer().group_gains(dialogue, [state]).gains == (gain,)


@pytest.mark.parametrize("seed", SEEDS)
def test_silence_equals_absence_never_zero(seed: int) -> None:
    """A judge that is silent on a question gives the gains of a data set without that question."""
    dialogue, states = case(seed)
    for asked in dialogue.questions:
        silent = frozenset({asked.question_id})
        without = replace(dialogue, questions=tuple(q for q in dialogue.questions if q != asked))
        assert scorer(silent).group_gains(dialogue, states).gains == scorer().group_gains(without, states).gains


@pytest.mark.parametrize("seed", SEEDS)
def test_bounds_and_empty_memory(seed: int) -> None:
    dialogue, states = case(seed)
    gains = scorer().group_gains(dialogue, [*states, MemoryState(), MemoryState.empty(dialogue.members)]).gains
    assert gains[0] is None
    assert all(-1.0 <= gain <= 1.0 for gain in gains[1:] if gain is not None)
    if gains[1] is not None:
        assert gains[-2:] == (0.0, 0.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_failed_trajectories_take_no_question_away(seed: int) -> None:
    dialogue, states = case(seed)
    alone = scorer().group_gains(dialogue, states[1:])
    together = scorer().group_gains(dialogue, [*states, None, None])
    assert together.question_ids == alone.question_ids
    assert together.gains == (None, *alone.gains, None, None)
