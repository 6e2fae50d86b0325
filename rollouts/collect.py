"""Trajectories over whole dialogues. Each advances as soon as its own completion is there: neither the G trajectories of a
group nor the dialogues wait for each other."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from writer_rl.data.memory import MemoryState
from writer_rl.rollouts.environment import Environment, Observation, WriteStep, constrained
from writer_rl.rollouts.generator import Completion, Generator, SamplingSpec
from writer_rl.rollouts.seeds import derive_seed


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One Writer's pass over a dialogue.

    Args:
        dialogue_id: Its dialogue.
        index: 0-based place in its group.
        steps: Completed steps, one a segment; fewer than the dialogue's segments if it failed.
        failure: Why it stopped early; empty if it did not. A failed trajectory is unscorable, not bad.
    """

    dialogue_id: str
    index: int
    steps: tuple[WriteStep, ...]
    failure: str = ""

    @property
    def final_memory(self) -> MemoryState | None:
        """Memory after the last segment; None for a failed trajectory."""
        return None if self.failure or not self.steps else self.steps[-1].memory_after


@dataclass(frozen=True, slots=True)
class Group:
    """The G trajectories of one dialogue under one policy version."""

    dialogue_id: str
    policy_version: int
    trajectories: tuple[Trajectory, ...]


@dataclass(slots=True)
class _Walker:
    """A trajectory under way."""

    environment: Environment
    index: int
    memory: MemoryState
    steps: list[WriteStep] = field(default_factory=list)
    seen: Observation | None = None
    failure: str = ""


def collect_groups(
    environments: Sequence[Environment],
    generator: Generator,
    spec: SamplingSpec,
    *,
    group_size: int,
    seed: int,
    max_prompt_tokens: int,
    constrain: bool = False,
    expected_version: int | None = None,
    on_step: Callable[[WriteStep], None] | None = None,
) -> list[Group]:
    """Sample `group_size` trajectories for every environment.

    Args:
        environments: One per dialogue.
        generator: Holds the policy to sample from.
        spec: Sampling settings.
        group_size: Trajectories per dialogue, G.
        seed: Seeds every draw together with dialogue, trajectory and segment, so that no two trajectories share a stream.
        max_prompt_tokens: A longer prompt ends its trajectory as failed; nothing is truncated.
        constrain: Decode under the JSON schema of the action list.
        expected_version: Policy version to sample from; None takes the one that is loaded, and holds every request to it.
        on_step: Called after every completed step.

    Returns:
        Groups in the order of `environments`; failed trajectories are kept and marked.

    Raises:
        StalePolicyError: The generator holds no policy, or another than `expected_version` (fault 17).
    """
    version = generator.policy_version if expected_version is None else expected_version
    done: queue.SimpleQueue[tuple[_Walker, Future[Completion]]] = queue.SimpleQueue()
    walkers = [
        _Walker(environment, index, environment.start()) for environment in environments for index in range(group_size)
    ]

    def submit(walker: _Walker) -> bool:
        position = len(walker.steps)
        walker.seen = walker.environment.observe(walker.memory, position)
        if len(walker.seen.prompt_ids) > max_prompt_tokens:
            walker.failure = f"prompt of {len(walker.seen.prompt_ids)} tokens exceeds {max_prompt_tokens}"
            return False
        own_seed = derive_seed(seed, walker.environment.dialogue.dialogue_id, walker.index, position)
        own_spec = constrained(spec, walker.seen.budget) if constrain else spec
        future = generator.submit(list(walker.seen.prompt_ids), own_spec, own_seed, expected_version=version)
        future.add_done_callback(lambda finished, walker=walker: done.put((walker, finished)))  # type: ignore[misc]
        return True

    waiting = sum(submit(walker) for walker in walkers)
    while waiting:
        walker, future = done.get()
        waiting -= 1
        completion = future.result()
        if completion.finish_reason == "error":
            walker.failure = completion.error or "the generator failed"
            continue
        assert walker.seen is not None
        step = walker.environment.act(walker.seen, completion)
        walker.steps.append(step)
        walker.memory = step.memory_after
        if on_step is not None:
            on_step(step)
        if len(walker.steps) < len(walker.environment.segments):
            waiting += submit(walker)
    return [
        Group(
            environment.dialogue.dialogue_id,
            -1 if version is None else version,
            tuple(
                Trajectory(environment.dialogue.dialogue_id, walker.index, tuple(walker.steps), walker.failure)
                for walker in walkers[position * group_size : (position + 1) * group_size]
            ),
        )
        for position, environment in enumerate(environments)
    ]
