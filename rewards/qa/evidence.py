"""Evidence as text, by person and update chain: what a language model would read and what evaluation reports."""

from __future__ import annotations

from writer_rl.data.memory import Record
from writer_rl.rewards.qa.types import Evidence


def render_evidence(evidence: Evidence) -> str:
    """Render evidence.

    Rows come first, each with its chains (old → new), then the messages, oldest first. An empty row reads "(none)".

    Example:
        A head record of Ana told by Ben, one empty row and one message::

            Ana:
            - lives in Leeds (said by Ben)
            Ben: (none)
            Messages:
            - Ana: I moved!
    """
    lines = []
    for row in evidence.rows:
        if not row.records:
            lines.append(f"{row.owner}: (none)")
            continue
        lines.append(f"{row.owner}:")
        lines += [f"- {' → '.join(_statement(record, row.owner) for record in chain)}" for chain in row.chains]
        lines += [f"- said about {record.owner}: {_statement(record, row.owner)}" for record in row.said]
    lines.append("Messages:")
    lines += [f"- {f'[{m.sent_at}] ' if m.sent_at else ''}{m.speaker}: {m.text}" for m in evidence.messages]
    return "\n".join(lines)


def _statement(record: Record, owner: str) -> str:
    date = f"[{record.sent_at}] " if record.sent_at else ""
    said = "" if record.source == owner else f" (said by {record.source})"
    return f"{date}{record.content}{said}"
