"""The dialogues and reference traces a run trains on and is evaluated on, from simulation or from canonical files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from writer_rl.configs.errors import InputError
from writer_rl.configs.schema import DataConfig, RunConfig
from writer_rl.data.actions import render_actions
from writer_rl.data.contract import render_prompt
from writer_rl.data.dialogues import read_dialogues
from writer_rl.data.embedding import Embedder
from writer_rl.data.memory import MemoryState
from writer_rl.data.records import Dialogue
from writer_rl.data.simulation.chats import simulate_split
from writer_rl.data.traces import ReplayedStep, TeacherTrace, read_traces, replay
from writer_rl.rollouts.prompt_tokens import PromptEncoder

Split = Literal["train", "heldout"]


@dataclass(frozen=True, slots=True)
class Example:
    """A dialogue with its reference and with what SFT imitates.

    Args:
        steps: The reference, replayed: the state after each segment is what rewards compare with.
        demonstrations: The teacher's trace, replayed: what SFT imitates. The two are one, unless the simulated teacher errs.
    """

    dialogue: Dialogue
    trace: TeacherTrace
    steps: tuple[ReplayedStep, ...]
    demonstrations: tuple[ReplayedStep, ...]

    @property
    def references(self) -> tuple[MemoryState, ...]:
        """Reference memory after each segment."""
        return tuple(step.after for step in self.steps)


@dataclass(frozen=True, slots=True)
class SftRow:
    """One supervised sample; the completion ends with exactly one end-of-sequence token."""

    dialogue_id: str
    segment_index: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]


def load_examples(config: RunConfig, split: Split, embedder: Embedder | None = None) -> list[Example]:
    """Dialogues of a split with their replayed references.

    Args:
        config: The run.
        split: `train` or `heldout`.
        embedder: For provenance in the reference states; None leaves it empty.

    Raises:
        InputError: A file is unreadable, a trace is missing, stale or refused, or no held-out set is configured.
    """
    data = config.data
    if data.source == "simulation":
        chats = simulate_split(data.simulation, split)
        found = [(chat.dialogue, chat.trace, chat.teacher_trace) for chat in chats]
    else:
        found = [(dialogue, trace, trace) for dialogue, trace in _pairs_from_files(data, split)]
    if split == "train" and data.max_dialogues:
        found = found[: data.max_dialogues]
    if not found:
        raise InputError("data", f"the {split} split is empty", "raise data.simulation.num_train / num_heldout")
    return [_example(dialogue, trace, teacher, data, embedder) for dialogue, trace, teacher in found]


def _example(
    dialogue: Dialogue, trace: TeacherTrace, teacher: TeacherTrace, data: DataConfig, embedder: Embedder | None
) -> Example:
    window = trace.window if data.source == "files" and trace.window else data.window
    limit = data.max_segments or len(trace.steps)
    steps = tuple(replay(dialogue, trace, window, embedder=embedder))[:limit]
    demonstrations = steps if teacher == trace else tuple(replay(dialogue, teacher, window, embedder=embedder))[:limit]
    return Example(dialogue, replace(trace, window=window, steps=trace.steps[:limit]), steps, demonstrations)


def _pairs_from_files(data: DataConfig, split: Split) -> list[tuple[Dialogue, TeacherTrace]]:
    dialogue_path, trace_path = (
        (data.train_dialogues, data.train_traces) if split == "train" else (data.heldout_dialogues, data.heldout_traces)
    )
    if not dialogue_path or not trace_path:
        raise InputError(
            f"data.{split}_dialogues", "is not set", f"give data.{split}_dialogues and data.{split}_traces"
        )
    dialogues = {dialogue.dialogue_id: dialogue for dialogue in read_dialogues(dialogue_path)}
    traces = read_traces(trace_path, allow_stale_prompt=data.allow_stale_prompt)
    missing = [trace.dialogue_id for trace in traces if trace.dialogue_id not in dialogues]
    if missing:
        raise InputError(
            trace_path, f"has a trace of {missing[0]!r}, which is no dialogue of {dialogue_path}", "pair the two files"
        )
    return [(dialogues[trace.dialogue_id], trace) for trace in traces]


def sft_rows(
    examples: Sequence[Example], config: RunConfig, encoder: PromptEncoder, embedder: Embedder | None
) -> list[SftRow]:
    """One row per segment: the prompt on the teacher's memory, and the teacher's actions.

    Raises:
        InputError: A row is longer than `sft.max_length`; it is never truncated.
    """
    rows = []
    for example in examples:
        for step in example.demonstrations:
            prompt = encoder.prompt_ids(render_prompt(step.before, step.segment, config.contract, embedder))
            target = encoder.completion_ids(render_actions([a for a in step.actions if a.action != "NOOP"]))
            if len(prompt) + len(target) > config.sft.max_length:
                raise InputError(
                    f"dialogue {example.dialogue.dialogue_id}: segment {step.segment.index}",
                    f"makes a sample of {len(prompt)} + {len(target)} tokens, above sft.max_length = {config.sft.max_length}",
                    "raise sft.max_length, lower data.window, or lower contract.memory_chars",
                )
            rows.append(SftRow(example.dialogue.dialogue_id, step.segment.index, tuple(prompt), tuple(target)))
    return rows
