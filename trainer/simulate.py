"""Write simulated chats with their reference traces as canonical files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from writer_rl.data.dialogues import write_dialogues
from writer_rl.data.files import write_json
from writer_rl.data.simulation.chats import simulate_split
from writer_rl.data.traces import replay, write_traces
from writer_rl.trainer.cli import config_parser, parse_config
from writer_rl.trainer.progress import progress


def main(argv: list[str]) -> int:
    """Entry point of `simulate`."""
    parser = config_parser(
        "simulate", "Write simulated group chats (train and held-out) with true memory, traces and questions.",
        "example: ./launch.sh simulate demo --out chats data.simulation.num_train=100",
        default="demo", output=False,
    )  # fmt: skip
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for train/ and heldout/")
    args = parser.parse_args(argv)
    config = parse_config(args).data.simulation
    out = Path(args.out)
    table = Table(title="simulated chats")
    for column in (
        "split",
        "dialogues",
        "messages",
        "segments",
        "ADD",
        "UPDATE",
        "NOOP",
        "owner ≠ source",
        "questions",
    ):
        table.add_column(column, justify="right" if column != "split" else "left")
    counts: dict[str, dict[str, int]] = {}
    for split, total in (("train", config.num_train), ("heldout", config.num_heldout)):
        chats = []
        seen: Counter[str] = Counter()
        with progress(f"simulate {split}", total) as bar:
            for chat in simulate_split(config, split):
                for step in replay(chat.dialogue, chat.trace, chat.trace.window, rules="fixed"):
                    seen["segments"] += 1
                    seen["messages"] += len(step.segment.messages)
                    for action in step.actions:
                        seen[action.action] += 1
                        seen["told"] += action.action == "ADD" and action.owner != action.source
                seen["questions"] += len(chat.dialogue.questions)
                chats.append(chat)
                bar.advance()
        if not chats:
            continue
        write_dialogues(out / split / "dialogues.json", [chat.dialogue for chat in chats])
        write_traces(out / split / "traces.json", [chat.trace for chat in chats])
        row = [
            len(chats),
            *(seen[key] for key in ("messages", "segments", "ADD", "UPDATE", "NOOP", "told", "questions")),
        ]
        table.add_row(split, *map(str, row))
        counts[split] = {"dialogues": len(chats), **seen}
    write_json(out / "simulation.json", {"settings": json.loads(config.model_dump_json()), "counts": counts})
    Console().print(table)
    print(f"saved: {out}")
    return 0
