"""One Writer step: prompt from memory, completion to memory. Pure but for the embedder's cache.

Order: render the prompt from the memory before the segment, store the messages in System 1, then parse, validate and apply.

Source: specification §3.
"""

from __future__ import annotations

from dataclasses import dataclass

from writer_rl.configs.schema import ContractConfig
from writer_rl.data.actions import ActionReport, actions_schema, parse_completion, validate
from writer_rl.data.contract import action_budget, render_prompt
from writer_rl.data.embedding import Embedder
from writer_rl.data.memory import MemoryState
from writer_rl.data.records import Dialogue, Segment
from writer_rl.rollouts.generator import Completion, SamplingSpec
from writer_rl.rollouts.prompt_tokens import PromptEncoder


@dataclass(frozen=True, slots=True)
class Observation:
    """What the Writer is given at a segment, and the memory its answer will be applied to.

    Args:
        memory_before: Memory before the segment.
        memory: The same with the segment's messages stored and its speakers on the roster.
        budget: Most actions allowed.
    """

    segment: Segment
    memory_before: MemoryState
    memory: MemoryState
    prompt_ids: tuple[int, ...]
    budget: int


@dataclass(frozen=True, slots=True)
class WriteStep:
    """One completed step of a trajectory.

    Args:
        memory_before: Memory the answer was validated against (messages stored already).
        memory_after: Memory after the answer; the same object where the answer was refused.
    """

    segment_index: int
    prompt_ids: tuple[int, ...]
    completion: Completion
    report: ActionReport
    memory_before: MemoryState
    memory_after: MemoryState
    budget: int

    @property
    def hit_limit(self) -> bool:
        """Whether the completion ran into the token limit, by the engine's own finish reason."""
        return self.completion.finish_reason == "length"


class Environment:
    """The Writer's side of one dialogue. Holds no trajectory state, so any number of trajectories may share it."""

    def __init__(
        self, dialogue: Dialogue, window: int, options: ContractConfig, encoder: PromptEncoder, embedder: Embedder | None,
        max_segments: int = 0,
    ) -> None:  # fmt: skip
        segments = dialogue.segments(window)
        self.dialogue = dialogue
        self.segments = segments[:max_segments] if max_segments else segments
        self._options, self._encoder, self._embedder = options, encoder, embedder

    def start(self) -> MemoryState:
        """The empty memory every trajectory starts from."""
        return MemoryState.empty(self.dialogue.members, self.dialogue.aliases)

    def observe(self, memory: MemoryState, segment_index: int) -> Observation:
        """Render the prompt of a segment and store its messages."""
        segment = self.segments[segment_index]
        prompt = render_prompt(memory, segment, self._options, self._embedder)
        budget = action_budget(len(segment.messages))
        return Observation(segment, memory, memory.observe(segment), tuple(self._encoder.prompt_ids(prompt)), budget)

    def act(self, seen: Observation, completion: Completion) -> WriteStep:
        """Parse, validate and apply a completion; a refused one leaves the derived memory as it was."""
        report = validate(parse_completion(completion.text), seen.memory, self._options.rules)
        after = seen.memory.apply(report, seen.segment, self._embedder)
        return WriteStep(seen.segment.index, seen.prompt_ids, completion, report, seen.memory, after, seen.budget)


def constrained(spec: SamplingSpec, budget: int) -> SamplingSpec:
    """The spec with decoding held to the JSON schema of an action list of at most `budget` actions."""
    return SamplingSpec(spec.temperature, spec.top_p, spec.max_new_tokens, actions_schema(budget))
