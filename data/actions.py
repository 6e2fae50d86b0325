"""The Writer's actions: strict parsing and validation. Whatever a model writes becomes data, never an exception.

Source: specification §3. Rule set *fixed* adds to *paper* that owners and sources must be members (after canonicalisation).
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from writer_rl.data.memory import MemoryState

GROUP = "GROUP"
PERSON_LAYERS = ("per_speaker_core", "per_speaker_profile")
GROUP_LAYERS = ("group_interaction", "group_insight")
LAYERS = PERSON_LAYERS + GROUP_LAYERS
KINDS = ("fact", "stance", "observation", "decision", "relation")
KIND_KEYS = ("kind", "utype")
ADD_FIELDS = ("owner", "source", "layer", "kind", "content")

ActionName = Literal["ADD", "UPDATE", "NOOP"]


@dataclass(frozen=True, slots=True)
class Action:
    """One valid action. ADD fills all fields but `entry_id`; UPDATE only `entry_id` and `content`; NOOP none."""

    action: ActionName
    owner: str = ""
    source: str = ""
    layer: str = ""
    kind: str = ""
    content: str = ""
    entry_id: str = ""


@dataclass(frozen=True, slots=True)
class ActionError:
    """Why an action list is refused.

    Args:
        index: 0-based position of the offending action; None if the list as a whole is at fault.
        code: Stable word for counting, for example `unknown_entry`.
        message: A sentence for people.
    """

    index: int | None
    code: str
    message: str

    def __str__(self) -> str:
        return self.message if self.index is None else f"actions[{self.index}]: {self.message}"


@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """Outcome of strict parsing. `items` are the raw elements of `actions`, of any JSON type."""

    json_valid: bool
    items: tuple[Any, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class ActionReport:
    """Validation of one completion.

    Args:
        json_valid: Whether the text was one JSON object with a list `actions`.
        attempted: Raw elements of the list, valid or not.
        actions: The actions to apply; empty unless every one of them is valid (application is atomic).
        errors: Everything found wrong.
    """

    json_valid: bool
    attempted: tuple[Any, ...]
    actions: tuple[Action, ...]
    errors: tuple[ActionError, ...]

    @property
    def valid(self) -> bool:
        return self.json_valid and not self.errors

    @property
    def num_attempted(self) -> int:
        return len(self.attempted)


def normalise_content(text: str) -> str:
    """Text under which two contents count as the same: NFKC, case-folded, single spaces, no closing punctuation.

    Example:
        >>> normalise_content("  Lives in  Leeds. ")
        'lives in leeds'
    """
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).rstrip(".!。！ ")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def parse_completion(text: str) -> ParsedCompletion:
    """Parse a completion strictly: one JSON object with a list `actions`, nothing before or after it.

    Code fences, truncated objects and trailing words make the text invalid; surrounding white space does not.

    Example:
        >>> parse_completion('{"actions":[{"action":"NOOP"}]}').items
        ({'action': 'NOOP'},)
        >>> parse_completion('Sure! {"actions":[]}').json_valid
        False
    """
    try:
        value = json.loads(text.strip(" \t\r\n"), parse_constant=_refuse_constant)
    except RecursionError:
        return ParsedCompletion(False, error="nested too deeply")
    except ValueError as error:
        return ParsedCompletion(False, error=f"not valid JSON: {error}")
    if not isinstance(value, dict):
        return ParsedCompletion(False, error=f"the top level is {type(value).__name__}, not an object")
    if not isinstance(value.get("actions"), list):
        return ParsedCompletion(False, error="the object has no list 'actions'")
    return ParsedCompletion(True, tuple(value["actions"]))


def _is_text(value: object) -> bool:
    """Whether a value is a non-blank string that can be stored as UTF-8 (no unpaired surrogate)."""
    if not isinstance(value, str) or not value.strip():
        return False
    return not any(0xD800 <= ord(char) <= 0xDFFF for char in value)


def _kind_of(item: dict[str, Any]) -> object:
    return next((item[key] for key in KIND_KEYS if key in item), None)


def shape_errors(item: object, index: int | None = None) -> tuple[ActionError, ...]:
    """Errors of one raw action that can be seen without the memory and without its neighbours.

    These are the rules of the `schema` share of R_valid: keys, types, non-empty fields, known layer and kind, scope.

    Source: specification §3 (validity) and §4 (schema).
    """

    def error(code: str, message: str) -> tuple[ActionError, ...]:
        return (ActionError(index, code, message),)

    if not isinstance(item, dict):
        return error("not_an_object", f"an action must be an object, not {type(item).__name__}")
    name = item.get("action")
    if name == "NOOP":
        return (
            ()
            if set(item) == {"action"}
            else error("extra_key", f"NOOP takes no other key: {_extra(item, ['action'])}")
        )
    if name == "UPDATE":
        if set(item) != {"action", "entry_id", "content"}:
            return error("keys", f"UPDATE takes exactly action, entry_id, content, not {', '.join(map(str, item))}")
        blank = [key for key in ("entry_id", "content") if not _is_text(item[key])]
        return error("blank", f"UPDATE needs text in {', '.join(blank)}") if blank else ()
    if name != "ADD":
        return error("unknown_action", f"action is {name!r}; it must be ADD, UPDATE or NOOP")
    blank = [key for key in ("owner", "source", "layer", "content") if not _is_text(item.get(key))]
    if not _is_text(_kind_of(item)):
        blank.append("kind")
    if blank:
        return error("blank", f"ADD needs text in {', '.join(blank)}")
    if item["layer"] not in LAYERS:
        return error("unknown_layer", f"layer is {item['layer']!r}; it must be one of {', '.join(LAYERS)}")
    if _kind_of(item) not in KINDS:
        return error("unknown_kind", f"kind is {_kind_of(item)!r}; it must be one of {', '.join(KINDS)}")
    if (item["owner"].strip() == GROUP) != (item["layer"] in GROUP_LAYERS):
        return error(
            "scope", f"owner {item['owner']!r} does not fit layer {item['layer']}: group layers belong to {GROUP}"
        )
    return ()


def _extra(item: dict[str, Any], known: Iterable[str]) -> str:
    return ", ".join(sorted(str(key) for key in set(item) - set(known)))


def to_action(item: dict[str, Any]) -> Action:
    """The action of a raw item without shape errors; names trimmed, not yet canonicalised."""
    name = item["action"]
    if name == "NOOP":
        return Action("NOOP")
    if name == "UPDATE":
        return Action("UPDATE", entry_id=item["entry_id"].strip(), content=item["content"].strip())
    return Action(
        "ADD",
        owner=item["owner"].strip(),
        source=item["source"].strip(),
        layer=item["layer"],
        kind=str(_kind_of(item)),
        content=item["content"].strip(),
    )


def action_key(action: Action) -> tuple[str, ...]:
    """Key under which two actions of one list are duplicates of each other."""
    if action.action == "ADD":
        return ("ADD", action.owner, action.source, action.layer, normalise_content(action.content))
    if action.action == "UPDATE":
        return ("UPDATE", action.entry_id, normalise_content(action.content))
    return ("NOOP",)


def validate(parsed: ParsedCompletion, memory: MemoryState, rules: Literal["paper", "fixed"] = "fixed") -> ActionReport:
    """Check a parsed completion against the memory it would change.

    Args:
        parsed: Outcome of `parse_completion`.
        memory: The memory before the write, its roster already holding the segment's speakers.
        rules: *fixed* requires owner and source to be members; *paper* does not.

    Returns:
        A report; its `actions` are empty if anything at all is wrong.

    Example:
        An UPDATE of an id that memory does not hold gives one error with code `unknown_entry` and no actions.
    """
    if not parsed.json_valid:
        return ActionReport(False, (), (), (ActionError(None, "invalid_json", parsed.error),))
    errors: list[ActionError] = []
    actions: list[Action] = []
    if not parsed.items:
        errors.append(ActionError(None, "empty", "the list is empty; write a single NOOP when nothing changes"))
    seen: dict[tuple[str, ...], int] = {}
    updated: dict[str, int] = {}
    for index, item in enumerate(parsed.items):
        found = shape_errors(item, index)
        if found:
            errors.extend(found)
            continue
        action = to_action(item)
        if action.action == "NOOP" and len(parsed.items) > 1:
            errors.append(ActionError(index, "noop_in_company", "NOOP must be alone in its list"))
            continue
        if action.action == "ADD":
            action, problems = _resolve_names(action, memory, rules, index)
            errors.extend(problems)
            key = action_key(action)
            if key in seen:
                errors.append(ActionError(index, "duplicate", f"repeats actions[{seen[key]}]"))
            seen.setdefault(key, index)
        elif action.action == "UPDATE":
            errors.extend(_update_errors(action, memory, updated, index))
            updated.setdefault(action.entry_id, index)
        actions.append(action)
    return ActionReport(True, parsed.items, () if errors else tuple(actions), tuple(errors))


def _resolve_names(action: Action, memory: MemoryState, rules: str, index: int) -> tuple[Action, list[ActionError]]:
    if rules == "paper":
        return action, []
    problems = []
    owner = GROUP if action.owner == GROUP else memory.roster.canonical(action.owner)
    source = memory.roster.canonical(action.source)
    if owner is None:
        problems.append(ActionError(index, "unknown_owner", f"owner {action.owner!r} is neither a member nor {GROUP}"))
    if source is None:
        problems.append(ActionError(index, "unknown_source", f"source {action.source!r} is not a member"))
    resolved = Action("ADD", owner or action.owner, source or action.source, action.layer, action.kind, action.content)
    return resolved, problems


def _update_errors(action: Action, memory: MemoryState, updated: dict[str, int], index: int) -> list[ActionError]:
    record = memory.find(action.entry_id)
    if record is None:
        return [ActionError(index, "unknown_entry", f"entry {action.entry_id!r} is not in memory")]
    problems = []
    if record.superseded_by:
        problems.append(
            ActionError(index, "not_a_head", f"entry {action.entry_id!r} was superseded by {record.superseded_by!r}")
        )
    if normalise_content(record.content) == normalise_content(action.content):
        problems.append(ActionError(index, "no_change", f"the content of {action.entry_id!r} stays the same"))
    if action.entry_id in updated:
        problems.append(
            ActionError(
                index, "updated_twice", f"entry {action.entry_id!r} is updated by actions[{updated[action.entry_id]}]"
            )
        )
    return problems


def action_payload(action: Action) -> dict[str, str]:
    """The action as a JSON object of the contract, keys in contract order."""
    if action.action == "NOOP":
        return {"action": "NOOP"}
    if action.action == "UPDATE":
        return {"action": "UPDATE", "entry_id": action.entry_id, "content": action.content}
    return {"action": "ADD", **{key: getattr(action, key) for key in ADD_FIELDS}}


def render_actions(actions: Sequence[Action]) -> str:
    """Canonical target text of an action list; an empty list becomes a single NOOP.

    Example:
        >>> render_actions([])
        '{"actions":[{"action":"NOOP"}]}'
    """
    payload = [action_payload(action) for action in actions] or [{"action": "NOOP"}]
    return json.dumps({"actions": payload}, ensure_ascii=False, separators=(",", ":"))


def actions_schema(max_actions: int) -> dict[str, Any]:
    """JSON schema of a completion, for constrained decoding.

    Args:
        max_actions: Upper bound of the list, 1 or more (the action budget).
    """
    text = {"type": "string", "minLength": 1}

    def closed(properties: dict[str, Any]) -> dict[str, Any]:
        return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}

    def add(layers: Sequence[str], owner: dict[str, Any]) -> dict[str, Any]:
        return closed(
            {"action": {"const": "ADD"}, "owner": owner, "source": text, "layer": {"enum": list(layers)},
             "kind": {"enum": list(KINDS)}, "content": text}
        )  # fmt: skip

    change = [
        add(PERSON_LAYERS, text),
        add(GROUP_LAYERS, {"const": GROUP}),
        closed({"action": {"const": "UPDATE"}, "entry_id": text, "content": text}),
    ]
    writes = {"type": "array", "minItems": 1, "maxItems": max_actions, "items": {"anyOf": change}}
    noop = {"type": "array", "minItems": 1, "maxItems": 1, "items": closed({"action": {"const": "NOOP"}})}
    return closed({"actions": {"anyOf": [writes, noop]}})
