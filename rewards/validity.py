"""Validity of one completion as a format reward and a penalty; the reference memory plays no part.

Source: specification §4, R_valid and P.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from writer_rl.data.actions import GROUP, ActionReport, normalise_content, shape_errors
from writer_rl.data.memory import MemoryState
from writer_rl.rewards.similarity import RuleSet

JSON_WEIGHT = 0.25
SCHEMA_WEIGHT = 0.35
DUP_WEIGHT = 0.25
STOP_WEIGHT = 0.15

INVALID_JSON_PENALTY = 0.25
ERROR_PENALTY = 0.15
BUDGET_PENALTY = 0.10
LIMIT_PENALTY = 0.10

ActionKey = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ValidityReward:
    """R_valid with its parts, and the penalty.

    Args:
        json: 1 if the completion parsed and attempts an action, else 0.
        schema: Share of actions of the right shape.
        dup: Share of distinct actions; 1 means no repetition.
        stop: 1 if the list ends with its last novel action, else 0.
        total: R_valid, 0 to 1.
        penalty: P, from -0.60 to 0; added to the return as it is.
    """

    json: float
    schema: float
    dup: float
    stop: float
    total: float
    penalty: float


def action_key(item: Any, memory: MemoryState, rules: RuleSet) -> ActionKey:
    """Key under which two attempted actions count as the same, malformed ones included.

    ADD: owner, source, layer and normalised content. UPDATE: id and normalised content. NOOP: nothing. Anything else:
    its whole text. *fixed* resolves names to members first, as validation does.

    Source: specification §4, dup.

    Example:
        >>> action_key({"action": "UPDATE", "entry_id": "m1", "content": "In  Leeds"}, MemoryState.empty(), "fixed")
        ('UPDATE', 'm1', 'in leeds')
    """
    name = item.get("action") if isinstance(item, dict) else None
    if name == "NOOP":
        return ("NOOP",)
    if name == "UPDATE":
        return ("UPDATE", _text(item, "entry_id").strip(), normalise_content(_text(item, "content")))
    if name == "ADD":
        owner, source = (_name(_text(item, key), memory, rules) for key in ("owner", "source"))
        return ("ADD", owner, source, _text(item, "layer"), normalise_content(_text(item, "content")))
    return ("?", _dump(item))


def _text(item: dict[str, Any], key: str) -> str:
    value = item.get(key, "")
    return value if isinstance(value, str) else _dump(value)


def _dump(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True)
    except RecursionError:  # nested almost as deep as the parser allows
        return type(value).__name__


def _name(written: str, memory: MemoryState, rules: RuleSet) -> str:
    trimmed = written.strip()
    if rules == "paper" or trimmed == GROUP:
        return trimmed
    return memory.roster.canonical(trimmed) or trimmed


def schema_share(attempted: Sequence[Any]) -> float:
    """Share of attempted actions that pass the shape rules; 0 for an empty list.

    Blind to the memory and to neighbours: unknown ids, duplicates and a NOOP in company pass.

    Source: specification §4, schema.

    Example:
        One NOOP and one string instead of an action: 0.5.
    """
    if not attempted:
        return 0.0
    return sum(not shape_errors(item) for item in attempted) / len(attempted)


def distinct_share(attempted: Sequence[Any], memory: MemoryState, rules: RuleSet) -> float:
    """Number of distinct action keys over number of attempted actions; 0 for an empty list.

    Source: specification §4, dup.

    Example:
        The same UPDATE three times: 1/3.
    """
    if not attempted:
        return 0.0
    return len({action_key(item, memory, rules) for item in attempted}) / len(attempted)


def stops_in_time(attempted: Sequence[Any], memory: MemoryState, rules: RuleSet) -> bool:
    """Whether the last action of the list is its last novel one; a single NOOP stops in time, too.

    An ADD is novel if its key is new in this list and in the memory before, superseded records included. An UPDATE is
    novel if its id is a head that this list has not moved on already and its content changes. Nothing else is novel.

    Args:
        attempted: Raw actions in the order written.
        memory: Memory before the write.
        rules: Rule set of the keys.

    Source: specification §4, stop.

    Example:
        [ADD a, ADD a]: the second adds nothing, so False. [ADD a, ADD b]: True.
    """
    if len(attempted) == 1 and action_key(attempted[0], memory, rules) == ("NOOP",):
        return True
    seen: set[ActionKey] = {
        ("ADD", record.owner, record.source, record.layer, normalise_content(record.content))
        for record in memory.records
    }
    moved_on: set[str] = set()
    last_is_novel = False
    for item in attempted:
        key = action_key(item, memory, rules)
        last_is_novel = False
        if key[0] == "ADD":
            last_is_novel = key not in seen
            seen.add(key)
        elif key[0] == "UPDATE":
            record = memory.find(key[1])
            is_live = record is not None and not record.superseded_by and key[1] not in moved_on
            if is_live and record is not None and normalise_content(record.content) != key[2]:
                last_is_novel = True
                moved_on.add(key[1])
    return last_is_novel


def penalty(report: ActionReport, budget: int, hit_limit: bool) -> float:
    """P: what breaking the contract costs, from -0.60 to 0.

    Args:
        report: Validation of the completion.
        budget: Actions allowed in this segment.
        hit_limit: Whether the completion ended at its token limit.

    Source: specification §4, P. Invalid JSON is always a validation error as well.

    Example:
        Invalid JSON cut off at the token limit: -0.25 - 0.15 - 0.10 = -0.50.
    """
    cost = 0.0
    if not report.json_valid:
        cost += INVALID_JSON_PENALTY
    if not report.valid:
        cost += ERROR_PENALTY
    if report.num_attempted > budget:
        cost += BUDGET_PENALTY
    if hit_limit:
        cost += LIMIT_PENALTY
    return -cost if cost else 0.0


def validity_reward(
    report: ActionReport, memory_before: MemoryState, budget: int, hit_limit: bool, rules: RuleSet = "fixed"
) -> ValidityReward:
    """R_valid and the penalty of one completion.

    Args:
        report: Validation of the completion; `attempted` holds the raw actions.
        memory_before: Memory that the write would change, its roster holding the segment's speakers.
        budget: Actions allowed in this segment.
        hit_limit: Whether the completion ended at its token limit.
        rules: Rule set; *fixed* resolves names before comparing them.

    Returns:
        Parts and total; without any attempted action every part is 0, parsed or not.

    Source: specification §4, R_valid = 0.25·json + 0.35·schema + 0.25·dup + 0.15·stop.

    Example:
        Two valid ADDs with one key: json 1, schema 1, dup 0.5, stop 0, total 0.25 + 0.35 + 0.125 = 0.725, penalty
        -0.15.
    """
    attempted = report.attempted
    json_share = float(report.json_valid and bool(attempted))
    schema = schema_share(attempted)
    dup = distinct_share(attempted, memory_before, rules)
    stop = float(stops_in_time(attempted, memory_before, rules))
    total = JSON_WEIGHT * json_share + SCHEMA_WEIGHT * schema + DUP_WEIGHT * dup + STOP_WEIGHT * stop
    return ValidityReward(json_share, schema, dup, stop, total, penalty(report, budget, hit_limit))
