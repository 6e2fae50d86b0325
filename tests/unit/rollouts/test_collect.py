"""Trajectories of a group: each goes its own way, fails alone, and draws its own noise."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from writer_rl.configs.schema import ContractConfig, SimulationConfig
from writer_rl.data.actions import render_actions
from writer_rl.data.embedding import HashedEmbedder
from writer_rl.data.simulation.chats import WINDOW, simulate_split
from writer_rl.rollouts.collect import collect_groups
from writer_rl.rollouts.environment import Environment
from writer_rl.rollouts.generator import Completion, GeneratorError, PolicyWeights, SamplingSpec, StalePolicyError
from writer_rl.rollouts.prompt_tokens import PromptEncoder
from writer_rl.rollouts.replay import Failure, ReplayGenerator
from writer_rl.rollouts.seeds import derive_seed

CHATS = list(simulate_split(SimulationConfig(num_train=2, sessions=(3, 3)), "train"))
SEED, SPEC, GROUP_SIZE = 5, SamplingSpec(), 3
NOOP = render_actions([])
PLACES = {
    derive_seed(SEED, c.dialogue.dialogue_id, index, position): (c.dialogue.dialogue_id, index, position)
    for c in CHATS for index in range(GROUP_SIZE) for position in range(3)
}  # fmt: skip
FIRST = CHATS[0].dialogue.dialogue_id


@pytest.fixture(scope="module")
def encoder(tiny_chat_dir) -> PromptEncoder:
    return PromptEncoder(AutoTokenizer.from_pretrained(tiny_chat_dir))


@pytest.fixture(scope="module")
def environments(encoder) -> list[Environment]:
    options = ContractConfig(embedder="hashed")
    return [Environment(c.dialogue, WINDOW, options, encoder, HashedEmbedder()) for c in CHATS]


class Slow(ReplayGenerator):
    """A replay that holds back the answers to some seeds until it is told to go on."""

    def __init__(self, answers, held: set[int]) -> None:
        super().__init__(answers)
        self._held = held
        self.go_on = threading.Event()

    def submit(self, prompt_ids, spec, seed, *, expected_version=None):
        done = super().submit(prompt_ids, spec, seed, expected_version=expected_version)
        if seed not in self._held:
            return done
        later: Future[Completion] = Future()

        def release() -> None:
            self.go_on.wait(30)
            later.set_result(done.result())

        threading.Thread(target=release, daemon=True).start()
        return later


def reference_answer(prompt_ids: tuple[int, ...], seed: int) -> str:
    dialogue_id, _, position = PLACES[seed]
    chat = next(c for c in CHATS if c.dialogue.dialogue_id == dialogue_id)
    return render_actions(chat.trace.steps[position].actions)


def loaded(generator: ReplayGenerator) -> ReplayGenerator:
    generator.load_policy(PolicyWeights(7, "base", Path()))
    return generator


def collect(environments, generator, **changes):
    settings = {"group_size": GROUP_SIZE, "seed": SEED, "max_prompt_tokens": 4000} | changes
    return collect_groups(environments, generator, SPEC, **settings)


def test_groups_come_in_order_and_hold_every_step(environments):
    seen = []
    groups = collect(environments, loaded(ReplayGenerator(reference_answer)), on_step=seen.append)
    assert [g.dialogue_id for g in groups] == [c.dialogue.dialogue_id for c in CHATS]
    assert len(seen) == 2 * GROUP_SIZE * 3
    for group in groups:
        assert group.policy_version == 7
        assert [t.index for t in group.trajectories] == list(range(GROUP_SIZE))
        for trajectory in group.trajectories:
            assert [s.segment_index for s in trajectory.steps] == [0, 1, 2]
            assert all(s.report.valid and s.completion.policy_version == 7 for s in trajectory.steps)
            assert trajectory.final_memory is trajectory.steps[-1].memory_after


def test_each_step_continues_its_own_memory(environments):
    """On policy: the memory a step is validated against is what the trajectory's own step before has left."""

    def answers(prompt_ids, seed):
        return reference_answer(prompt_ids, seed) if PLACES[seed][1] == 1 else NOOP

    for group in collect(environments, loaded(ReplayGenerator(answers))):
        for trajectory in group.trajectories:
            for before, after in zip(trajectory.steps, trajectory.steps[1:], strict=False):
                assert after.memory_before.records == before.memory_after.records
            assert bool(trajectory.final_memory.records) == (trajectory.index == 1)


def test_a_slow_trajectory_holds_nobody_up(environments):
    """No lock-step: one trajectory's first answer comes only when all others have finished their dialogues."""
    slow = derive_seed(SEED, FIRST, 0, 0)
    generator = loaded(Slow(reference_answer, {slow}))
    order = []

    def on_step(step) -> None:
        order.append(step)
        if len(order) == (2 * GROUP_SIZE - 1) * 3:
            generator.go_on.set()

    groups = collect(environments, generator, on_step=on_step)
    assert generator.go_on.is_set(), "the others waited for the slow one"
    assert [s.segment_index for s in order[-3:]] == [0, 1, 2]
    assert list(groups[0].trajectories[0].steps) == order[-3:]


def test_order_of_arrival_changes_nothing(environments):
    plain = collect(environments, loaded(ReplayGenerator(reference_answer)))
    generator = loaded(Slow(reference_answer, {derive_seed(SEED, FIRST, i, 1) for i in (0, 2)}))
    generator.go_on.set()
    assert collect(environments, generator) == plain


def test_a_failed_completion_ends_its_trajectory_alone(environments):
    def answers(prompt_ids, seed):
        return Failure("out of memory") if PLACES[seed] == (FIRST, 1, 1) else reference_answer(prompt_ids, seed)

    groups = collect(environments, loaded(ReplayGenerator(answers)))
    failed = groups[0].trajectories[1]
    assert failed.failure == "out of memory"
    assert len(failed.steps) == 1
    assert failed.final_memory is None
    others = [t for g in groups for t in g.trajectories if t is not failed]
    assert all(not t.failure and len(t.steps) == 3 for t in others)


def test_a_refused_answer_is_no_failure(environments):
    groups = collect(environments, loaded(ReplayGenerator(lambda prompt_ids, seed: "not JSON")))
    trajectory = groups[0].trajectories[0]
    assert not trajectory.failure
    assert len(trajectory.steps) == 3
    assert trajectory.final_memory.records == ()
    assert len(trajectory.final_memory.messages) == sum(len(s.messages) for s in CHATS[0].dialogue.sessions)


def test_a_prompt_that_is_too_long_ends_its_trajectory_and_is_not_cut(environments):
    lengths = [
        len(t.steps[0].prompt_ids)
        for t in collect(environments, loaded(ReplayGenerator(reference_answer)))[0].trajectories
    ]
    asked = []

    def answers(prompt_ids, seed):
        asked.append(len(prompt_ids))
        return reference_answer(prompt_ids, seed)

    groups = collect(environments[:1], loaded(ReplayGenerator(answers)), max_prompt_tokens=lengths[0])
    assert set(asked) == {lengths[0]}  # later prompts hold memory and are longer: they were never submitted
    for trajectory in groups[0].trajectories:
        assert len(trajectory.steps) == 1
        assert f"exceeds {lengths[0]}" in trajectory.failure
    groups = collect(environments[:1], loaded(ReplayGenerator(answers)), max_prompt_tokens=64)
    assert all(t.failure and not t.steps for t in groups[0].trajectories)


def test_every_draw_has_a_seed_of_its_own_and_the_same_one_again(environments):
    """Fault 18: dialogue, trajectory and segment decide the seed; nothing else does."""

    def seeds(**changes) -> list[int]:
        found: list[int] = []

        def answers(prompt_ids, seed):
            found.append(seed)
            return NOOP

        collect(environments, loaded(ReplayGenerator(answers)), **changes)
        return found

    first = seeds()
    assert len(set(first)) == len(first) == 2 * GROUP_SIZE * 3
    assert sorted(first) == sorted(PLACES)
    assert sorted(seeds()) == sorted(first)
    assert not set(seeds(seed=SEED + 1)) & set(first)
    assert set(first) < set(seeds(group_size=GROUP_SIZE + 1))


def test_decoding_is_constrained_to_each_segments_own_budget(environments):
    specs = []

    class Recording(ReplayGenerator):
        def submit(self, prompt_ids, spec, seed, *, expected_version=None):
            specs.append((seed, spec))
            return super().submit(prompt_ids, spec, seed, expected_version=expected_version)

    collect(environments, loaded(Recording(reference_answer)), constrain=True)
    for seed, spec in specs:
        dialogue_id, _, position = PLACES[seed]
        chat = next(c for c in CHATS if c.dialogue.dialogue_id == dialogue_id)
        writes = spec.json_schema["properties"]["actions"]["anyOf"][0]
        assert writes["maxItems"] == max(8, 2 * len(chat.dialogue.sessions[position].messages))


def test_no_policy_or_another_one_is_refused(environments):
    """Fault 17."""
    with pytest.raises(StalePolicyError, match="no policy"):
        collect(environments, ReplayGenerator(reference_answer))
    with pytest.raises(StalePolicyError, match="version 7, not 8"):
        collect(environments, loaded(ReplayGenerator(reference_answer)), expected_version=8)
    assert collect(environments, loaded(ReplayGenerator(reference_answer)), expected_version=7)


def test_a_dead_engine_is_not_hidden(environments):
    generator = loaded(ReplayGenerator(reference_answer))
    generator.close()
    with pytest.raises(GeneratorError, match="closed"):
        collect(environments, generator)
