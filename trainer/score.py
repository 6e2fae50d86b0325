"""Entry point `score`: the memory reward of pairs of memories in a JSON file, without any model.

Reads `{"memory": [{"predicted": [entry, …], "reference": [entry, …]}, …]}` and prints a JSON array with one object per
pair.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from writer_rl.configs.errors import InputError
from writer_rl.data.actions import LAYERS
from writer_rl.rewards.similarity import RULE_SETS, RuleSet
from writer_rl.rewards.update_chain import memory_reward

SCORE_KEYS = ("phi", "macro", "worst", "chain", "memory")
TEXT_FIELDS = ("entry_id", "owner", "source", "layer", "content", "superseded_by")
MAY_BE_BLANK = ("content", "superseded_by")


@dataclass(frozen=True, slots=True)
class Entry:
    """One record as it stands in a score file; further keys of a full record are passed over."""

    entry_id: str
    owner: str
    source: str
    layer: str
    content: str
    superseded_by: str


@dataclass(frozen=True, slots=True)
class Case:
    """A memory and what it should have been."""

    predicted: tuple[Entry, ...]
    reference: tuple[Entry, ...]


class _RepeatedKey(dict[str, Any]):
    """A JSON object that gives one key twice; it is refused where it is met, with its position."""

    key: str = ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) == len(pairs):
        return value
    repeated = _RepeatedKey(value)
    names = [name for name, _ in pairs]
    repeated.key = next(name for name in names if names.count(name) > 1)
    return repeated


def parse_cases(text: str, where: str) -> tuple[Case, ...]:
    """Read the pairs of a score file.

    Args:
        text: Content of the file.
        where: Name of the file for messages.

    Raises:
        InputError: The text is not such a file; the message gives the position, for example
        `memory[3].predicted[0].owner`.

    Example:
        `{"memory": [{"predicted": [], "reference": []}]}` gives one case with two empty memories.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        what = "the file is empty" if not text.strip() else f"not valid JSON: {error.msg}"
        raise InputError(
            f"{where}: line {error.lineno} column {error.colno}", what, 'write one JSON object with a list "memory"'
        ) from None
    except (RecursionError, ValueError) as error:
        raise InputError(
            f"{where}: top level", f"cannot be read as JSON: {error}", "write plain nested lists of entries"
        ) from None
    cases = _list(_mapping(value, where, "top level"), "memory", where, "")
    return tuple(_case(case, where, f"memory[{number}]") for number, case in enumerate(cases))


def _mapping(value: Any, where: str, position: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{where}: {position}", f"is {_kind(value)}, not an object", "put an object { … } here")
    if isinstance(value, _RepeatedKey):
        raise InputError(f"{where}: {position}", f"the key {value.key!r} is given twice", "keep one of the two")
    return value


def _list(value: dict[str, Any], key: str, where: str, position: str) -> list[Any]:
    place = f"{where}: {position}{'.' if position else ''}{key}"
    if key not in value:
        raise InputError(place, "is missing", f'add the key "{key}" with a list')
    if not isinstance(value[key], list):
        raise InputError(
            place, f"is {_kind(value[key])}, not a list", "put a list [ … ] here, empty if there is nothing"
        )
    found: list[Any] = value[key]
    return found


def _case(value: Any, where: str, position: str) -> Case:
    case = _mapping(value, where, position)
    return Case(_memory(case, "predicted", where, position), _memory(case, "reference", where, position))


def _memory(case: dict[str, Any], side: str, where: str, position: str) -> tuple[Entry, ...]:
    place = f"{position}.{side}"
    entries = [
        _entry(value, where, f"{place}[{number}]") for number, value in enumerate(_list(case, side, where, position))
    ]
    first: dict[str, int] = {}
    for number, entry in enumerate(entries):
        if first.setdefault(entry.entry_id, number) != number:
            raise InputError(
                f"{where}: {place}[{number}].entry_id",
                f"{entry.entry_id!r} is the id of {place}[{first[entry.entry_id]}] already",
                "give every entry of a memory its own id",
            )
    for number, entry in enumerate(entries):
        if entry.superseded_by and (entry.superseded_by not in first or entry.superseded_by == entry.entry_id):
            what = "the entry itself" if entry.superseded_by == entry.entry_id else "no entry of this memory"
            raise InputError(
                f"{where}: {place}[{number}].superseded_by",
                f"{entry.superseded_by!r} is {what}",
                "name the entry_id of the newer entry and include that entry, or leave it empty",
            )
    return tuple(entries)


def _entry(value: Any, where: str, position: str) -> Entry:
    entry = _mapping(value, where, position)
    for name in TEXT_FIELDS:
        place = f"{where}: {position}.{name}"
        if name not in entry:
            raise InputError(place, "is missing", f"an entry needs {', '.join(TEXT_FIELDS)}")
        if not isinstance(entry[name], str):
            fix = 'use "" for an entry that is not superseded' if name == "superseded_by" else "put it in quotes"
            raise InputError(place, f"is {_kind(entry[name])}, not text", fix)
        if name not in MAY_BE_BLANK and not entry[name].strip():
            raise InputError(place, "is blank", "fill it in")
    if entry["layer"] not in LAYERS:
        raise InputError(
            f"{where}: {position}.layer", f"{entry['layer']!r} is no layer", f"use one of {', '.join(LAYERS)}"
        )
    return Entry(*(entry[name] for name in TEXT_FIELDS))


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list"}
    return kinds.get(type(value), "an object")


def read_cases(path: str) -> tuple[Case, ...]:
    """Read a score file, or standard input if the path is `-`.

    Raises:
        InputError: The file cannot be read, is not UTF-8, or is no score file.
    """
    where = "standard input" if path == "-" else path
    try:
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"{where}: file", f"cannot be read ({reason})", "give the path of a JSON file, or - for standard input"
        ) from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: byte {error.start}", "is not UTF-8", "save the file as UTF-8") from None
    return parse_cases(text, where)


def score_cases(cases: Sequence[Case], rules: RuleSet) -> list[dict[str, float | None]]:
    """Memory reward of every case, as printed.

    Returns:
        One object per case with `phi`, `macro`, `worst`, `chain` (None where the term is dropped) and `memory`.
    """
    scores = (memory_reward(case.predicted, case.reference, rules) for case in cases)
    return [{key: getattr(score, key) for key in SCORE_KEYS} for score in scores]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="score",
        description="Compare predicted with reference memories; print the memory reward of each pair as a JSON array.",
        epilog='The file holds {"memory": [{"predicted": [...], "reference": [...]}, ...]}; an entry has the texts '
        + ", ".join(TEXT_FIELDS)
        + ". chain is null where the rules drop it.",
    )
    parser.add_argument(
        "--cases", required=True, metavar="FILE", help="JSON file with the pairs; - reads standard input"
    )
    parser.add_argument(
        "--rules",
        choices=RULE_SETS,
        default="fixed",
        help="paper: scoring as published; fixed: every script, no junk heuristic, no chain without reference updates",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `score`.

    Args:
        argv: Arguments after the command's name; None takes them from the command line.

    Returns:
        0, or 2 if the arguments or the file are bad (the reason is on standard error).
    """
    try:
        arguments = _parser().parse_args(argv)
        scores = score_cases(read_cases(arguments.cases), arguments.rules)
    except SystemExit as stop:  # argparse has printed help or its complaint
        return int(stop.code or 0)
    except InputError as error:
        print(f"score: {error}", file=sys.stderr)
        return 2
    print(json.dumps(scores, indent=1, allow_nan=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
