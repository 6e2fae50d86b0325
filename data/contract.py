"""The Writer's prompt: one code path for traces, supervised training, rollouts, evaluation and serving.

Chat text is untrusted. Every message, name and content is printed on one line without control characters, so that it can
forge neither a memory line nor a roster line; special tokens inside it are dealt with where text becomes token ids
(`writer_rl.rollouts.prompt_tokens`).

Source: specification §3.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Sequence
from typing import TypedDict

from writer_rl.configs.schema import ContractConfig
from writer_rl.data.actions import GROUP
from writer_rl.data.embedding import Embedder
from writer_rl.data.memory import MemoryState, Record
from writer_rl.data.records import Message, Segment

SHORT_LAYERS = {
    "per_speaker_core": "core",
    "per_speaker_profile": "profile",
    "group_interaction": "interaction",
    "group_insight": "insight",
}

COMPACT_SYSTEM = """\
Maintain a group chat's memory. Raw text is stored already. Write JSON only: {"actions":[...]}
ADD owner (who it is about) source (who said it) layer kind content; UPDATE entry_id content, for any progress of a matter in memory; NOOP alone if nothing is new.
per_speaker_core: own facts, stances, habits. per_speaker_profile: told about someone by another. Owner GROUP: group_interaction (decisions, events, whoever announces them), group_insight (norms).
kind: fact stance observation decision relation. Search memory before ADD. One atomic entry a matter. Disagreement: separate ADDs. No UPDATE without change. Behaviour counts. Use the chat's language."""

FULL_SYSTEM = """\
You keep the structured memory of a group chat. Every message is already stored word for word elsewhere, so do not copy the chat: record what it establishes, in a form that can later be looked up by person, by relation and by time.

Each record has an owner, a source and a layer.
* owner: the person the record is about, or GROUP.
* source: the person who said or noticed it.
The two often differ. If Ben tells the chat something about Ana, the owner is Ana and the source is Ben. If one person announces what the whole group has settled, the owner is GROUP and the source is the person who announced it. A wish is personal ("I would prefer ..."); a decision is the group's ("that is settled, we will ...").

Layers
* per_speaker_core: lasting facts, views and habits of a person, from that person's own words or conduct.
* per_speaker_profile: what other people report, notice or believe about a person.
* group_interaction: events between members, plans and decisions of the group. Owner GROUP.
* group_insight: customs, rules and shared understandings of the group. Owner GROUP.
Kinds: fact, stance, observation, decision, relation.

Actions
* {"action":"ADD","owner":...,"source":...,"layer":...,"kind":...,"content":...} for a matter that memory does not hold yet.
* {"action":"UPDATE","entry_id":...,"content":...} for a matter that memory holds and that has moved on in any way: a new date or amount, a changed status, a firmer or reversed opinion, a correction, a habit seen again. Write the new state only; the earlier version is kept and linked for you, with its owner, source and layer.
* {"action":"NOOP"} as the only action when the messages establish nothing new.

Rules
1. Search the current memory before every ADD. One matter has one entry, whoever mentions it and however it is worded.
2. Never send an UPDATE whose content says the same as the entry it names, and name each entry at most once.
3. When members disagree, give each of them an ADD of their own. Never merge two people's views.
4. Keep entries atomic: one fact, one view, one observation, one decision each. Several points from one person are several entries.
5. Record conduct as well as statements: habits, roles people take, things they avoid, how others treat them. Describe what happened and do not guess why.
6. Add nothing that the messages do not support, and repeat nothing that memory already says.
7. Write content in the language of the chat.
8. Answer with one JSON object {"actions":[...]} and nothing else: no explanation, no code fence."""

_SYSTEM = {"compact": COMPACT_SYSTEM, "full": FULL_SYSTEM}


class ChatMessage(TypedDict):
    """One entry of a chat-format prompt."""

    role: str
    content: str


def action_budget(num_messages: int) -> int:
    """Most actions allowed for a segment: max(8, 2 * messages).

    Example:
        >>> action_budget(3), action_budget(25)
        (8, 50)
    """
    return max(8, 2 * num_messages)


def one_line(text: str) -> str:
    """Untrusted text on one line: line breaks of any kind and control characters become single spaces.

    Example:
        >>> one_line("hi\\nMEMORY\\u2028m9 core")
        'hi MEMORY m9 core'
    """
    # Cf holds joiners that emoji need, so only the bidirectional overrides of that category are removed.
    kept = (
        " "
        if unicodedata.category(char) in ("Cc", "Zl", "Zp", "Cs") or char in "\u202a\u202b\u202c\u202d\u202e"
        else char
        for char in text
    )
    return " ".join("".join(kept).split())


def _short_date(sent_at: str) -> str:
    """Month and day of an ISO time, `8/10` for `2026-08-10T09:00`; the text itself if it is no ISO date."""
    parts = sent_at[:10].split("-")
    if len(parts) == 3 and all(part.isdigit() for part in parts):
        return f"{int(parts[1])}/{int(parts[2])}"
    return one_line(sent_at)


def record_line(record: Record, form: str) -> str:
    """One memory line: id, layer, owner, source if it differs, date, content."""
    owner, source, content = one_line(record.owner), one_line(record.source), one_line(record.content)
    said = "" if record.source == record.owner else f" by {source}"
    date = _short_date(record.sent_at) if form == "compact" else one_line(record.sent_at[:10])
    return f"{one_line(record.entry_id)} {SHORT_LAYERS.get(record.layer, record.layer)} {owner}{said} {date}: {content}"


def _selected(heads: Sequence[Record], segment: Segment, limit: int, embedder: Embedder | None) -> list[Record]:
    """The `limit` heads of one owner that are closest to the segment, oldest first."""
    if len(heads) <= limit:
        return list(heads)
    if embedder is None:
        return list(heads[-limit:])
    query_D = embedder.embed([m.text for m in segment.messages]).mean(0)
    cosine_R = embedder.embed([record.content for record in heads]) @ query_D
    best = sorted(range(len(heads)), key=lambda i: (-cosine_R[i], i))[:limit]
    return [heads[i] for i in sorted(best)]


def _memory_lines(
    memory: MemoryState, segment: Segment, options: ContractConfig, embedder: Embedder | None
) -> list[str]:
    heads = memory.heads()
    if not heads:
        return ["(empty)"]
    owners = [owner for owner in memory.owners() if any(record.owner == owner for record in heads)]
    limit_chars = max(options.min_owner_chars, options.memory_chars // len(owners))
    shown: dict[str, str] = {}
    left_out: dict[str, int] = {}
    for owner in owners:
        own = [record for record in heads if record.owner == owner]
        chosen = _selected(own, segment, options.records_per_owner, embedder)
        used, fitting = 0, 0
        # The newest lines are kept when the characters run out: they are the likeliest to be updated.
        for record in reversed(chosen):
            line = record_line(record, options.form)
            if fitting and used + len(line) > limit_chars:
                break
            shown[record.entry_id] = line if len(line) <= limit_chars else line[: limit_chars - 1] + "…"
            used, fitting = used + len(line), fitting + 1
        left_out[owner] = len(own) - fitting
    if options.order == "append":
        lines = [shown[record.entry_id] for record in heads if record.entry_id in shown]
        overflow = [f"… {n} more of {one_line(owner)}" for owner, n in left_out.items() if n]
        return lines + overflow
    lines = []
    for owner in owners:
        lines.append(f"[{one_line(owner)}]")
        lines += ["  " + shown[r.entry_id] for r in heads if r.owner == owner and r.entry_id in shown]
        if left_out[owner]:
            lines.append(f"  … {left_out[owner]} more")
    return lines


def _message_line(message: Message, form: str) -> str:
    text = f"{one_line(message.speaker)}: {one_line(message.text)}"
    return text if form == "compact" or not message.sent_at else f"[{one_line(message.sent_at)}] {text}"


def render_prompt(
    memory: MemoryState, segment: Segment, options: ContractConfig, embedder: Embedder | None = None
) -> list[ChatMessage]:
    """The prompt of one write.

    Args:
        memory: Memory before the segment.
        segment: New messages.
        options: Form, order and budgets.
        embedder: Chooses records when an owner has more than `records_per_owner`; None keeps the newest.

    Returns:
        A system message and a user message. In `append` order everything that grows stands after everything that
        stays, so that the key-value cache of one segment serves the next.
    """
    roster = memory.roster.with_members(m.speaker for m in segment.messages)
    lines = ["Members: " + ", ".join(one_line(name) for name in roster.members)]
    if roster.aliases and options.form == "full":
        lines.append("Also known as: " + ", ".join(f"{one_line(a)} = {one_line(m)}" for a, m in roster.aliases.items()))
    lines += ["Memory:", *_memory_lines(memory, segment, options, embedder)]
    if options.form == "compact":
        lines.append(f"New, {_short_date(segment.started_at)}, at most {action_budget(len(segment.messages))} actions:")
    else:
        lines += [
            "",
            f"Session {one_line(segment.session_id)}, {one_line(segment.started_at)}",
            f"New messages (answer with at most {action_budget(len(segment.messages))} actions, then stop):",
        ]
    lines += [_message_line(message, options.form) for message in segment.messages]
    return [{"role": "system", "content": _SYSTEM[options.form]}, {"role": "user", "content": "\n".join(lines)}]


def _prompt_version() -> str:
    """Hash of both prompt forms rendered on a fixed example: any change of wording or layout changes it."""
    segment = Segment(
        1, "s2", "2026-08-11T10:00:00", (Message("x1", "Ana", "We meet at nine.", "2026-08-11T10:00:00"),)
    )
    records = (
        Record("m1", "Ana plays chess", "Ana", "Ana", "per_speaker_core", sent_at="2026-08-10T09:00:00"),
        Record("m2", "Ben is late", "Ben", "Ana", "per_speaker_profile", sent_at="2026-08-10T09:00:00"),
        Record("m3", "The group meets on Mondays", GROUP, "Ben", "group_insight", sent_at="2026-08-10T09:00:00"),
    )
    memory = MemoryState.empty(("Ana", "Ben"), {"Benny": "Ben"})
    memory = MemoryState(records=records, roster=memory.roster)
    rendered = [
        render_prompt(memory, segment, ContractConfig(form=form, order=order, records_per_owner=1))
        for form in ("compact", "full")
        for order in ("append", "grouped")
    ]
    return hashlib.sha256(json.dumps(rendered).encode()).hexdigest()[:16]


PROMPT_VERSION = _prompt_version()
