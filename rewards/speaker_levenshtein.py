"""SpeakerLevenshtein: how well a predicted memory agrees with the reference memory, owner by owner.

Source: specification §4, SpeakerLevenshtein.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from writer_rl.rewards.similarity import RecordLike, RuleSet, gated_similarity

MACRO_WEIGHT = 0.80
WORST_WEIGHT = 0.20
MAX_LISTED = 5  # up to 32 choices; above, scipy


@dataclass(frozen=True, slots=True)
class StateScore:
    """Agreement of two memories, every number from 0 (none) to 1 (the same).

    Args:
        phi: 0.80 · macro + 0.20 · worst.
        macro: Mean over owners.
        worst: Lowest owner.
        buckets: Soft F1 by owner; `GROUP` is one of them.
    """

    phi: float
    macro: float
    worst: float
    buckets: Mapping[str, float]


def matched_weight(weights: Sequence[Sequence[float]]) -> float:
    """Total weight of the heaviest one-to-one matching of rows with columns (Hungarian method).

    Args:
        weights: Rows × columns of non-negative weights; 0 means "no pair".

    Example:
        Taking 0.9 first would leave 0 for the second row; the heaviest matching takes 0.8 and 0.7.

        >>> matched_weight([[0.9, 0.8], [0.7, 0.0]])
        1.5
    """
    kept = [row for row in weights if any(row)]
    columns = [column for column in zip(*kept, strict=True) if any(column)]
    if not columns:
        return 0.0
    few, many = (columns, list(zip(*columns, strict=True))) if len(columns) <= len(kept) else (kept, columns)
    if len(few) <= MAX_LISTED:
        return _listed_weight(many)
    from scipy.optimize import linear_sum_assignment  # half a second to import, and most memories never need it

    rows, picks = linear_sum_assignment(few, maximize=True)
    return math.fsum(few[row][pick] for row, pick in zip(rows, picks, strict=True))


def _listed_weight(rows: Sequence[Sequence[float]]) -> float:
    """Exact matching: after each row, the best weight for every choice of columns taken so far."""
    best = {0: 0.0}
    for row in rows:
        for taken, weight in list(best.items()):
            for column, gain in enumerate(row):
                chosen = taken | 1 << column
                if gain and chosen != taken and best.get(chosen, -1.0) < weight + gain:
                    best[chosen] = weight + gain
    return max(best.values())


def owner_f1(predicted: Sequence[RecordLike], reference: Sequence[RecordLike], rules: RuleSet) -> float:
    """Soft F1 of one owner's records, 0 to 1; both sides empty 1, one side empty 0.

    Only records of equal source and layer can match, so the matching falls apart into one small problem per pair of
    those.

    Source: specification §4, F_p = 2·Σ κ / (|M_p| + |M*_p|).

    Example:
        Two predicted records against one reference record, one of them equal to it: 2·1 / (2 + 1) = 2/3.
    """
    if not predicted and not reference:
        return 1.0
    if not predicted or not reference:
        return 0.0
    predicted_cells, reference_cells = _cells(predicted), _cells(reference)
    total = math.fsum(
        matched_weight(
            [[gated_similarity(mine, theirs, rules) for theirs in reference_cells[cell]] for mine in contents]
        )
        for cell, contents in predicted_cells.items()
        if cell in reference_cells
    )
    return 2.0 * total / (len(predicted) + len(reference))


def _cells(records: Iterable[RecordLike]) -> dict[tuple[str, str], list[str]]:
    """Contents by (source, layer)."""
    cells: dict[tuple[str, str], list[str]] = defaultdict(list)
    for record in records:
        cells[record.source, record.layer].append(record.content)
    return dict(cells)


def _by_owner(records: Iterable[RecordLike]) -> dict[str, list[RecordLike]]:
    owners: dict[str, list[RecordLike]] = defaultdict(list)
    for record in records:
        owners[record.owner].append(record)
    return owners


def speaker_levenshtein(predicted: Iterable[RecordLike], reference: Iterable[RecordLike], rules: RuleSet) -> StateScore:
    """Compare two memories over all their derived records, superseded ones included.

    Args:
        predicted: Records of the Writer's memory.
        reference: Records of the teacher's memory after the same segment.
        rules: Rule set of the text similarity.

    Returns:
        Scores over the union of the owners of both sides; without any owner every score is 1.

    Source: specification §4, Φ = 0.80·mean_p F_p + 0.20·min_p F_p.

    Example:
        Owner Ana agrees fully (F = 1), owner GROUP exists in the reference alone (F = 0): macro 0.5, worst 0, phi 0.4.
    """
    mine, theirs = _by_owner(predicted), _by_owner(reference)
    buckets = {owner: owner_f1(mine.get(owner, []), theirs.get(owner, []), rules) for owner in sorted({*mine, *theirs})}
    if not buckets:
        return StateScore(1.0, 1.0, 1.0, {})
    macro = math.fsum(buckets.values()) / len(buckets)
    worst = min(buckets.values())
    return StateScore(MACRO_WEIGHT * macro + WORST_WEIGHT * worst, macro, worst, buckets)
