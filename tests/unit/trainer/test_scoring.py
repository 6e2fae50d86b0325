"""From trajectories to returns, advantages and samples: whose advantage is it, and what is never a zero."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, pstdev

import pytest
from transformers import AutoTokenizer

from writer_rl.configs.schema import (
    ContractConfig,
    DataConfig,
    GrpoConfig,
    QaConfig,
    RewardConfig,
    RunConfig,
    SimulationConfig,
)
from writer_rl.data.actions import Action, render_actions
from writer_rl.data.embedding import HashedEmbedder
from writer_rl.rewards.qa_gain import QaScorer
from writer_rl.rollouts.collect import Group, collect_groups
from writer_rl.rollouts.environment import Environment
from writer_rl.rollouts.generator import PolicyWeights, SamplingSpec
from writer_rl.rollouts.prompt_tokens import PromptEncoder
from writer_rl.rollouts.replay import Failure, ReplayGenerator
from writer_rl.rollouts.seeds import derive_seed
from writer_rl.trainer.data_sets import Example, load_examples
from writer_rl.trainer.scoring import ScoredGroup, reward_metrics, score_group, train_samples

SEED, NUM_SEGMENTS = 3, 3
REWARD, GRPO, EMBEDDER = RewardConfig(), GrpoConfig(), HashedEmbedder()


def examples(**simulation) -> list[Example]:
    settings = {"num_train": 2, "sessions": (NUM_SEGMENTS, NUM_SEGMENTS), "noop_share": 0.0} | simulation
    return load_examples(RunConfig(data=DataConfig(simulation=SimulationConfig(**settings))), "train")


@pytest.fixture(scope="module")
def encoder(tiny_chat_dir) -> PromptEncoder:
    return PromptEncoder(AutoTokenizer.from_pretrained(tiny_chat_dir))


def write(encoder: PromptEncoder, example: Example, writers: list) -> Group:
    """A group in which trajectory i answers position t with `writers[i](reference actions, t)`."""
    places = {
        derive_seed(SEED, example.dialogue.dialogue_id, i, t): (i, t)
        for i in range(len(writers))
        for t in range(NUM_SEGMENTS)
    }

    def answers(prompt_ids, seed):
        index, position = places[seed]
        return writers[index](example.trace.steps[position].actions, position)

    generator = ReplayGenerator(answers, encode=encoder.plain_ids, decode=encoder.text, eos_token_ids=(257,))
    generator.load_policy(PolicyWeights(0, "base", Path()))
    environment = Environment(example.dialogue, example.trace.window, ContractConfig(), encoder, EMBEDDER)
    return collect_groups(
        [environment],
        generator,
        SamplingSpec(max_new_tokens=4000),
        group_size=len(writers),
        seed=SEED,
        max_prompt_tokens=6000,
    )[0]


def perfect(actions, position):
    return render_actions(actions)


def silent(actions, position):
    return render_actions([])


def late(actions, position):
    """Broken at first, right from the second segment on (where its UPDATEs may name records it never wrote)."""
    return '{"actions":[' if position == 0 else render_actions([a for a in actions if a.action == "ADD"])


def misfiled(actions, position):
    return render_actions(
        [Action("ADD", a.source, a.source, "per_speaker_core", a.kind, a.content) for a in actions if a.action == "ADD"]
    )


def breaks_down(actions, position):
    return Failure("engine out of memory") if position == 1 else render_actions(actions)


def scored(encoder, writers, *, qa=True, reward=REWARD, grpo=GRPO, **simulation) -> ScoredGroup:
    example = examples(**simulation)[0]
    scorer = QaScorer(reward.qa, EMBEDDER) if qa else None
    return score_group(write(encoder, example, writers), example, reward, grpo, scorer)


def test_an_advantage_belongs_to_its_trajectory_and_position(encoder):
    """Fault 5: recomputed by hand from the returns at each position; the last step's advantage is not everybody's."""
    found = scored(encoder, [perfect, silent, late, misfiled])
    samples = {(s.trajectory_index, s.segment_index): s for s in train_samples([found])}
    differing = 0
    for index, entry in enumerate(found.scored):
        assert entry is not None
        steps = found.group.trajectories[index].steps
        for position in range(NUM_SEGMENTS):
            column = [other.returns[position] for other in found.scored]
            spread = pstdev(column)
            expected = 0.0 if spread < 0.02 else (entry.returns[position] - fmean(column)) / spread
            expected = max(-3.0, min(3.0, expected))
            assert found.advantages[index][position] == pytest.approx(expected, abs=1e-12)
            if expected != 0:
                sample = samples[index, position]
                assert sample.advantage == found.advantages[index][position]
                assert sample.prompt_ids == steps[position].prompt_ids
                assert sample.completion_ids == steps[position].completion.token_ids
                assert sample.sampling_logprobs == steps[position].completion.sampling_logprobs
        differing += len(set(found.advantages[index])) == NUM_SEGMENTS
    assert differing >= 2, "all positions carry one advantage: a weak test"
    assert len(samples) == sum(a != 0 for row in found.advantages for a in row)
    assert found.advantages[2][0] < 0 < found.advantages[0][0]  # broken against perfect


def test_trained_ids_end_with_one_eos_and_are_the_sampled_ones(encoder):
    """Faults 19 and 20 from the sampler to the learner's sample."""
    found = scored(encoder, [perfect, silent])
    for sample in train_samples([found]):
        step = found.group.trajectories[sample.trajectory_index].steps[sample.segment_index]
        assert sample.completion_ids is step.completion.token_ids
        assert sample.completion_ids.count(257) == 1
        assert sample.completion_ids[-1] == 257


def test_returns_are_those_of_the_specification(encoder):
    found = scored(encoder, [perfect, silent])
    assert len(found.qa_questions) >= 2
    for entry in found.scored:
        for position, (step, value) in enumerate(zip(entry.steps, entry.returns, strict=True)):
            gain = 0.35 * 0.95 ** (NUM_SEGMENTS - 1 - position) * entry.qa_gain
            expected = 0.20 * step.valid.total + 0.45 * step.memory.memory + step.valid.penalty + gain
            assert value == pytest.approx(expected, abs=1e-12)
    best = found.scored[0]
    assert all(step.memory.memory == pytest.approx(1.0) and step.valid.total == 1.0 for step in best.steps)
    assert best.qa_gain > 0 == found.scored[1].qa_gain


def test_a_failed_trajectory_leaves_the_baseline(encoder):
    """It is unscorable, not bad: the others' advantages are as if it had never been, and it trains nothing."""
    writers = [perfect, silent, misfiled]
    without, with_failure = scored(encoder, writers), scored(encoder, [*writers, breaks_down])
    assert with_failure.advantages[:3] == without.advantages
    assert with_failure.scored[:3] == without.scored
    assert with_failure.scored[3] is None
    assert with_failure.advantages[3] == (0.0,)  # the one step it made
    assert {s.trajectory_index for s in train_samples([with_failure])} == {0, 1, 2}


def test_one_scorable_trajectory_learns_nothing(encoder):
    """Fault 4: advantage 0 and not the raw return; the same for a group that agrees."""
    alone = scored(encoder, [perfect, breaks_down, breaks_down])
    assert alone.advantages[0] == (0.0,) * NUM_SEGMENTS
    assert train_samples([alone]) == []
    equal = scored(encoder, [perfect] * 4)
    assert all(value == 0.0 for row in equal.advantages for value in row)
    assert (equal.num_positions, equal.num_zero_variance) == (NUM_SEGMENTS, NUM_SEGMENTS)
    assert reward_metrics([equal])["group/zero_variance_frac"] == 1.0


def test_all_failed(encoder):
    found = scored(encoder, [breaks_down, breaks_down])
    assert train_samples([found]) == []
    metrics = reward_metrics([found])
    assert metrics["group/failed_trajectories"] == 2.0
    assert not [key for key in metrics if key.startswith("reward/")]  # fault 32: absent, not 0


def test_a_group_without_questions_is_scored_without_qa(encoder):
    """Fault 33: other weights, no gain, and no 0 in the metrics."""
    for options in ({"questions": 0}, {"questions": 1}, {"qa": False}):
        found = scored(encoder, [perfect, silent], **options)
        assert found.qa_questions == ()
        for entry in found.scored:
            assert entry.qa_gain is None
            for step, value in zip(entry.steps, entry.returns, strict=True):
                expected = 0.25 * step.valid.total + 0.75 * step.memory.memory + step.valid.penalty
                assert value == pytest.approx(expected, abs=1e-12)
        metrics = reward_metrics([found])
        assert "reward/qa_gain_mean" not in metrics
        assert metrics["group/without_qa_frac"] == 1.0


def test_metrics_average_only_what_was_measured(encoder):
    """Faults 32 and 33 over a batch: half of the groups have no questions, one has a failed trajectory."""
    with_qa = scored(encoder, [perfect, silent, breaks_down])
    without = scored(encoder, [perfect, silent], qa=False)
    metrics = reward_metrics([with_qa, without])
    gains = [entry.qa_gain for entry in with_qa.scored if entry is not None]
    assert metrics["reward/qa_gain_mean"] == pytest.approx(fmean(gains))
    assert metrics["group/without_qa_frac"] == 0.5
    assert metrics["group/failed_trajectories"] == 1.0
    returns = [value for g in (with_qa, without) for entry in g.scored if entry for value in entry.returns]
    assert metrics["reward/return_mean"] == pytest.approx(fmean(returns))
    assert metrics["reward/return_std"] == pytest.approx(pstdev(returns))


def test_the_chain_is_absent_where_the_reference_never_updates(encoder):
    found = scored(encoder, [perfect, silent], update_share=0.0)
    assert "reward/chain_mean" not in reward_metrics([found])
    assert all(step.memory.memory == step.memory.phi for entry in found.scored for step in entry.steps)
    moving = scored(encoder, [perfect, silent], update_share=1.0)
    assert reward_metrics([moving])["reward/chain_mean"] == pytest.approx(0.5)  # perfect 1, silent 0


def test_no_group_at_all():
    metrics = reward_metrics([])
    assert metrics == {"group/zero_variance_frac": 0.0, "group/failed_trajectories": 0.0, "group/without_qa_frac": 0.0}


def test_truncation_and_validity_are_counted(encoder):
    found = scored(encoder, [perfect, late], qa=False)
    metrics = reward_metrics([found])
    assert metrics["completion/valid_frac"] == pytest.approx(1 - 1 / (2 * NUM_SEGMENTS))
    assert metrics["completion/truncated_frac"] == 0.0


def test_disabled_questions_leave_the_group_without_qa(encoder):
    found = scored(encoder, [perfect, silent], reward=RewardConfig(qa=QaConfig(enabled=False)))
    assert found.qa_questions == ()
