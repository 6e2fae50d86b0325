"""Canonical trace files: a teacher's actions per segment. States are replayed from them, never stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from writer_rl.configs.errors import InputError
from writer_rl.data.actions import Action, ParsedCompletion, action_payload, shape_errors, to_action, validate
from writer_rl.data.contract import PROMPT_VERSION
from writer_rl.data.dialogues import check_schema
from writer_rl.data.embedding import Embedder
from writer_rl.data.files import Reader, json_files, read_json, write_json
from writer_rl.data.memory import MemoryState, sequential_ids
from writer_rl.data.records import Dialogue, Segment

TRACES_SCHEMA = "writer-rl/traces/1"


@dataclass(frozen=True, slots=True)
class TraceStep:
    """A teacher's action list for one segment.

    Args:
        segment_index: 0-based segment of the dialogue.
        actions: Valid actions; empty means the teacher wrote NOOP.
        entry_ids: Ids given to the ADD and UPDATE actions, in order; empty uses sequential ids.
    """

    segment_index: int
    actions: tuple[Action, ...]
    entry_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TeacherTrace:
    """Reference actions for a whole dialogue, one step a segment.

    Args:
        prompt_version: `PROMPT_VERSION` the trace was made under.
        window: Messages per segment it was made with.
        findings: Doubts recorded by the importer or teacher, as JSON objects with `segment_index`, `code`, `detail`.
    """

    dialogue_id: str
    teacher: str
    prompt_version: str
    window: int
    steps: tuple[TraceStep, ...]
    findings: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One segment of a replay: the memory the Writer saw, what it wrote, and the memory afterwards."""

    segment: Segment
    before: MemoryState
    actions: tuple[Action, ...]
    after: MemoryState


def replay(
    dialogue: Dialogue, trace: TeacherTrace, window: int, *, rules: str = "paper", embedder: Embedder | None = None
) -> Iterator[ReplayedStep]:
    """Replay a trace from empty memory through the same validation and application as a Writer's output.

    Args:
        dialogue: The dialogue of the trace.
        trace: Steps for its segments.
        window: Messages per segment.
        rules: Rule set of the validation.
        embedder: For provenance; None leaves it empty.

    Raises:
        InputError: The trace belongs to another dialogue, misses a segment, or holds a list that is refused.
    """
    segments = dialogue.segments(window)
    name = f"trace of {trace.dialogue_id}"
    if trace.dialogue_id != dialogue.dialogue_id:
        raise InputError(name, f"does not belong to dialogue {dialogue.dialogue_id}", "pair traces and dialogues by id")
    if len(trace.steps) != len(segments):
        raise InputError(
            f"{name}: steps", f"are {len(trace.steps)} for {len(segments)} segments of window {window}",
            f"use the window the trace was made with ({trace.window})",
        )  # fmt: skip
    state = MemoryState.empty(dialogue.members, dialogue.aliases)
    for segment, step in zip(segments, trace.steps, strict=True):
        before = state
        state = state.observe(segment)
        actions = step.actions or (Action("NOOP"),)
        report = validate(ParsedCompletion(True, tuple(action_payload(a) for a in actions)), state, rules)  # type: ignore[arg-type]
        if not report.valid:
            problems = "; ".join(str(error) for error in report.errors)
            raise InputError(
                f"{name}: steps[{step.segment_index}]", f"is refused ({problems})", "mend or drop the step"
            )
        taken = next((entry_id for entry_id in step.entry_ids if state.find(entry_id) is not None), None)
        if taken is not None:
            raise InputError(
                f"{name}: steps[{step.segment_index}].entry_ids", f"give {taken!r}, which memory holds already",
                "give every record its own id, or give none in the whole trace",
            )  # fmt: skip
        ids = iter(step.entry_ids)
        state = state.apply(report, segment, embedder, lambda memory, ids=ids: next(ids, "") or sequential_ids(memory))  # type: ignore[misc]
        yield ReplayedStep(segment, before, report.actions, state)


def read_traces(path: str | Path, *, allow_stale_prompt: bool = False) -> list[TeacherTrace]:
    """Read a canonical trace file, or every such file of a folder.

    Args:
        path: File or folder.
        allow_stale_prompt: Accept traces made under another `PROMPT_VERSION`.

    Raises:
        InputError: A file breaks the format, or was made for another prompt.
    """
    found: list[TeacherTrace] = []
    for file in json_files(Path(path)):
        top = Reader(read_json(file), str(file), "")
        check_schema(top, TRACES_SCHEMA)
        for child in top.children("traces"):
            trace = _trace(child)
            if trace.prompt_version != PROMPT_VERSION and not allow_stale_prompt:
                raise child.fail(
                    "prompt_version", f"is {trace.prompt_version!r}; this contract is {PROMPT_VERSION!r}",
                    "make the traces again, or accept them with --allow-stale-prompt (data.allow_stale_prompt=true)",
                )  # fmt: skip
            if any(trace.dialogue_id == other.dialogue_id for other in found):
                raise child.fail(
                    "dialogue_id", f"{trace.dialogue_id!r} has a trace already", "keep one trace a dialogue"
                )
            found.append(trace)
    if not found:
        raise InputError(str(path), "holds no trace", "give at least one")
    return found


def _trace(reader: Reader) -> TeacherTrace:
    steps: list[TraceStep] = []
    given: set[str] = set()
    for position, child in enumerate(reader.children("steps")):
        if child.number("segment_index") != position:
            raise child.fail(
                "segment_index", f"is {child.value['segment_index']} at place {position}", "list steps in order"
            )
        actions = tuple(_action(item) for item in child.children("actions"))
        ids = child.texts("entry_ids", [])
        writes = sum(action.action != "NOOP" for action in actions)
        if ids and len(ids) != writes:
            raise child.fail(
                "entry_ids", f"are {len(ids)} for {writes} writes", "give one id per ADD or UPDATE, or none"
            )
        for place, entry_id in enumerate(ids):
            if not entry_id.strip() or entry_id in given:
                raise child.fail(
                    f"entry_ids[{place}]", f"is {entry_id!r}, blank or given before", "give every record its own id"
                )
            given.add(entry_id)
        steps.append(TraceStep(position, actions, ids))
    if not steps:
        raise reader.fail("steps", "is empty", "give one step per segment")
    if reader.number("window") < 1:
        raise reader.fail("window", "is 0", "give the messages per segment the trace was made with, 1 or more")
    findings = tuple(dict(child.value) for child in reader.children("findings", []))
    return TeacherTrace(
        reader.text("dialogue_id", blank=False), reader.text("teacher", ""), reader.text("prompt_version"),
        reader.number("window"), tuple(steps), findings,
    )  # fmt: skip


def _action(reader: Reader) -> Action:
    problems = shape_errors(reader.value)
    if problems:
        raise reader.fail("", problems[0].message, "write an action of the contract")
    return to_action(dict(reader.value))


def write_traces(path: str | Path, traces: Sequence[TeacherTrace]) -> None:
    """Write a canonical trace file, whole or not at all."""
    payload = {
        "schema": TRACES_SCHEMA,
        "traces": [
            {
                "dialogue_id": trace.dialogue_id,
                "teacher": trace.teacher,
                "prompt_version": trace.prompt_version,
                "window": trace.window,
                "steps": [
                    {
                        "segment_index": step.segment_index,
                        "actions": [action_payload(action) for action in step.actions],
                        "entry_ids": list(step.entry_ids),
                    }
                    for step in trace.steps
                ],
                "findings": list(trace.findings),
            }
            for trace in traces
        ],
    }
    write_json(Path(path), payload)
