"""Groups of trajectories to returns and advantages: the one place that joins rollouts and rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from writer_rl.configs.schema import GrpoConfig, RewardConfig
from writer_rl.data.memory import MemoryState
from writer_rl.rewards.compose import ScoredTrajectory, StepReward, score_trajectory
from writer_rl.rewards.qa_gain import QaScorer
from writer_rl.rewards.update_chain import memory_reward
from writer_rl.rewards.validity import validity_reward
from writer_rl.rollouts.collect import Group, Trajectory
from writer_rl.trainer.advantages import position_advantages
from writer_rl.trainer.batching import TrainSample
from writer_rl.trainer.data_sets import Example


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with its rewards and advantages; only this type can be trained on.

    Args:
        scored: One entry per trajectory; None for an unscorable one.
        advantages: Trajectories × segments; 0 where nothing is learned.
        num_positions: Segments that were compared.
        num_zero_variance: Segments dropped because their returns hardly differ.
        qa_questions: Ids of the questions the QA gain rests on; empty where the group was scored without QA.
    """

    group: Group
    scored: tuple[ScoredTrajectory | None, ...]
    advantages: tuple[tuple[float, ...], ...]
    num_positions: int
    num_zero_variance: int
    qa_questions: tuple[str, ...]


def score_step_rewards(trajectory: Trajectory, references: Sequence[MemoryState], rules: str) -> tuple[StepReward, ...]:
    """Validity and memory reward of every step, the latter on the cumulative state after the segment."""
    return tuple(
        StepReward(
            validity_reward(step.report, step.memory_before, step.budget, step.hit_limit, rules),  # type: ignore[arg-type]
            memory_reward(step.memory_after.records, reference.records, rules),  # type: ignore[arg-type]
        )
        for step, reference in zip(trajectory.steps, references, strict=True)
    )


def score_group(
    group: Group, example: Example, settings: RewardConfig, grpo: GrpoConfig, qa: QaScorer | None
) -> ScoredGroup:
    """Rewards, returns and position-wise advantages of one group.

    A failed trajectory is unscorable: it leaves every baseline and gets advantage 0. Without at least two usable questions
    the whole group is scored without QA.

    Source: specification §4 and §5.
    """
    gains: Sequence[float | None] = [None] * len(group.trajectories)
    questions: tuple[str, ...] = ()
    if qa is not None:
        judged = qa.group_gains(example.dialogue, [trajectory.final_memory for trajectory in group.trajectories])
        gains, questions = judged.gains, tuple(judged.question_ids)
    scored: list[ScoredTrajectory | None] = []
    for trajectory, gain in zip(group.trajectories, gains, strict=True):
        if trajectory.failure:
            scored.append(None)
            continue
        steps = score_step_rewards(trajectory, example.references, settings.rules)
        scored.append(score_trajectory(group.dialogue_id, trajectory.index, steps, gain, settings))
    returns = [
        list(entry.returns) if entry is not None else [None] * len(trajectory.steps)
        for entry, trajectory in zip(scored, group.trajectories, strict=True)
    ]
    result = position_advantages(returns, grpo.min_group_std, grpo.advantage_clip)
    return ScoredGroup(
        group,
        tuple(scored),
        tuple(map(tuple, result.advantages)),
        result.num_groups,
        result.num_zero_variance,
        questions,
    )


def train_samples(groups: Sequence[ScoredGroup]) -> list[TrainSample]:
    """Completions with a non-zero advantage, each with the advantage of its own step (fault 5) and the sampled ids (fault 19)."""
    return [
        TrainSample(
            step.prompt_ids, step.completion.token_ids, step.completion.sampling_logprobs, advantage,
            scored.group.dialogue_id, trajectory.index, step.segment_index,
        )
        for scored in groups
        for trajectory, advantages in zip(scored.group.trajectories, scored.advantages, strict=True)
        for step, advantage in zip(trajectory.steps, advantages, strict=True)
        if advantage != 0.0 and step.completion.token_ids
    ]  # fmt: skip


def _mean_std(values: Sequence[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5


def reward_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Means (and spreads over steps) of the return and of every component, over scorable trajectories only.

    A quantity nobody measured (QA gain of groups scored without QA, the chain where the reference has no edge) is absent, not 0.
    """
    scored = [entry for group in groups for entry in group.scored if entry is not None]
    steps = [step for entry in scored for step in entry.steps]
    columns: Mapping[str, list[float]] = {
        "return": [value for entry in scored for value in entry.returns],
        "memory": [step.memory.memory for step in steps],
        "final_memory": [entry.steps[-1].memory.memory for entry in scored if entry.steps],
        "phi": [step.memory.phi for step in steps],
        "chain": [step.memory.chain for step in steps if step.memory.chain is not None],
        "valid": [step.valid.total for step in steps],
        "json": [step.valid.json for step in steps],
        "schema": [step.valid.schema for step in steps],
        "dup": [step.valid.dup for step in steps],
        "stop": [step.valid.stop for step in steps],
        "penalty": [step.valid.penalty for step in steps],
        "qa_gain": [entry.qa_gain for entry in scored if entry.qa_gain is not None],
    }
    metrics = {}
    for name, values in columns.items():
        if values:
            metrics[f"reward/{name}_mean"], metrics[f"reward/{name}_std"] = _mean_std(values)
    positions = sum(group.num_positions for group in groups)
    completions = [step.completion for g in groups for trajectory in g.group.trajectories for step in trajectory.steps]
    metrics |= {
        "group/zero_variance_frac": sum(g.num_zero_variance for g in groups) / max(1, positions),
        "group/failed_trajectories": float(sum(entry is None for g in groups for entry in g.scored)),
        "group/without_qa_frac": sum(not g.qa_questions for g in groups) / max(1, len(groups)),
    }
    if completions:
        metrics["completion/tokens_mean"] = sum(len(c.token_ids) for c in completions) / len(completions)
        metrics["completion/truncated_frac"] = sum(c.finish_reason == "length" for c in completions) / len(completions)
        reports = [step.report for g in groups for trajectory in g.group.trajectories for step in trajectory.steps]
        metrics["completion/valid_frac"] = sum(report.valid for report in reports) / len(reports)
    return metrics
