"""Update chains: does the Writer move a matter on where the teacher does, and the memory reward that includes it.

Source: specification §4, Chain and R_mem.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from writer_rl.rewards.similarity import GATE, RecordLike, RuleSet, similarity
from writer_rl.rewards.speaker_levenshtein import matched_weight, speaker_levenshtein

STATE_WEIGHT = 0.80
CHAIN_WEIGHT = 0.20

Edge = tuple[RecordLike, RecordLike]


@dataclass(frozen=True, slots=True)
class MemoryReward:
    """Reward of a memory after a segment, with its parts; all from 0 to 1.

    Args:
        memory: R_mem, the reward itself.
        phi: SpeakerLevenshtein of the whole state.
        macro: Mean over owners.
        worst: Lowest owner.
        buckets: Soft F1 by owner.
        chain: Agreement of update edges; None where the term is dropped.
    """

    memory: float
    phi: float
    macro: float
    worst: float
    buckets: Mapping[str, float]
    chain: float | None


def update_edges(records: Iterable[RecordLike]) -> list[Edge]:
    """(old, new) of every update; a pointer to a record that is not there makes no edge.

    Example:
        Records m1 (superseded by m2), m2 and m3 give the one edge (m1, m2).
    """
    records = tuple(records)
    by_id = {record.entry_id: record for record in records}
    return [(old, by_id[old.superseded_by]) for old in records if old.superseded_by in by_id]


def edge_similarity(predicted: Edge, reference: Edge, rules: RuleSet) -> float:
    """Mean similarity of old and of new contents, 0 below the gate of 0.50. Neither half is gated alone.

    Source: specification §4, 0.5·κ̄(old, old*) + 0.5·κ̄(new, new*).

    Example:
        Equal old contents and unrelated new ones (κ̄ = 0) give exactly 0.5, which is kept.
    """
    value = 0.5 * similarity(predicted[0].content, reference[0].content, rules) + 0.5 * similarity(
        predicted[1].content, reference[1].content, rules
    )
    return value if value >= GATE else 0.0


def update_chain(predicted: Iterable[RecordLike], reference: Iterable[RecordLike], rules: RuleSet) -> float | None:
    """Soft F1 of predicted and reference update edges.

    Edges can match if their owner and layer agree; *fixed* asks for the source, too.

    Args:
        predicted: Records of the Writer's memory.
        reference: Records of the teacher's memory.
        rules: Rule set.

    Returns:
        0 to 1. Without any reference edge: *fixed* gives None (the term is dropped), *paper* 1 if there is no predicted
        edge either and 0 otherwise. With reference edges but no predicted one: 0.

    Source: specification §4, Chain.

    Example:
        One predicted edge equal to one of two reference edges: 2·1 / (1 + 2) = 2/3.
    """
    mine, theirs = update_edges(predicted), update_edges(reference)
    if not theirs:
        if rules == "fixed":
            return None
        return 0.0 if mine else 1.0
    if not mine:
        return 0.0
    their_cells = _cells(theirs, rules)
    total = sum(
        matched_weight([[edge_similarity(edge, other, rules) for other in their_cells[cell]] for edge in edges])
        for cell, edges in _cells(mine, rules).items()
        if cell in their_cells
    )
    return 2.0 * total / (len(mine) + len(theirs))


def _cells(edges: Sequence[Edge], rules: RuleSet) -> dict[tuple[str, ...], list[Edge]]:
    """Edges by the coordinates that must agree: those of the old record, which a new one inherits."""
    cells: dict[tuple[str, ...], list[Edge]] = defaultdict(list)
    for edge in edges:
        old = edge[0]
        cells[(old.owner, old.layer) if rules == "paper" else (old.owner, old.layer, old.source)].append(edge)
    return dict(cells)


def memory_reward(predicted: Iterable[RecordLike], reference: Iterable[RecordLike], rules: RuleSet) -> MemoryReward:
    """R_mem of the cumulative memory after a segment against the teacher's memory after the same segment.

    Args:
        predicted: All records of the Writer's memory, superseded ones included.
        reference: All records of the teacher's memory, superseded ones included.
        rules: Rule set.

    Returns:
        0.80 · phi + 0.20 · chain, or phi alone where the chain term is dropped.

    Source: specification §4, R_mem.

    Example:
        Two empty memories: *fixed* gives memory 1 with chain None; *paper* gives memory 1 with chain 1.
    """
    predicted, reference = tuple(predicted), tuple(reference)
    state = speaker_levenshtein(predicted, reference, rules)
    chain = update_chain(predicted, reference, rules)
    memory = state.phi if chain is None else STATE_WEIGHT * state.phi + CHAIN_WEIGHT * chain
    return MemoryReward(memory, state.phi, state.macro, state.worst, state.buckets, chain)
