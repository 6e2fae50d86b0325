"""Entry point `import`: convert foreign files into canonical dialogues and traces.

Writes `dialogues.json`, `traces.json` (where the source has traces) and `import_report.json`, all of them or none.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from writer_rl.configs.errors import InputError
from writer_rl.data.dialogues import write_dialogues
from writer_rl.data.files import json_files, write_json
from writer_rl.data.sources.speakermem import ImportedNetwork, ImportedTrajectory, import_network, import_trajectory
from writer_rl.data.traces import write_traces
from writer_rl.trainer.cli import command_parser

Imported = ImportedNetwork | ImportedTrajectory

REPORT_SCHEMA = "writer-rl/import-report/1"
SOURCES: dict[str, Callable[[str | Path], Imported]] = {
    "speakermem-networks": import_network,
    "speakermem-trajectories": import_trajectory,
}
WITH_TRACES = ("speakermem-trajectories",)

_EXAMPLES = """\
examples:
  writer-rl import speakermem-trajectories trajectories/ --out data/teacher
  writer-rl import speakermem-trajectories trajectories/ --check
  writer-rl import speakermem-networks networks/ --out data/chats
"""


def main(argv: Sequence[str]) -> int:
    """Import a file or every `*.json` file of a folder.

    Args:
        argv: Source, path and options.

    Returns:
        0 done; 1 with `--check` if a replay differs from the stored states; 2 if a file is refused. Nothing is written
        unless every file is accepted and, with `--check`, agrees.

    Raises:
        InputError: The command line or the path is unusable.
    """
    parser = command_parser("import", "Convert foreign files into canonical dialogues and traces.", _EXAMPLES)
    parser.add_argument("source", choices=sorted(SOURCES), help="format of the files")
    parser.add_argument("path", metavar="PATH", help="a file, or a folder of .json files")
    parser.add_argument("--out", metavar="DIR", help="folder to write to; may be left out with --check")
    parser.add_argument(
        "--check", action="store_true", help="fail unless replaying every trace gives the stored states"
    )
    args = parser.parse_args(argv)
    if args.check and args.source not in WITH_TRACES:
        raise InputError("--check", f"{args.source} has no states to compare", f"use it with {', '.join(WITH_TRACES)}")
    if not args.out and not args.check:
        raise InputError("--out", "is missing", "name a folder to write to")

    files = json_files(Path(args.path))
    imported, refusals = import_files(files, SOURCES[args.source])
    if refusals:
        for refusal in refusals:
            print(f"error: {refusal}", file=sys.stderr)
        print(f"{len(refusals)} of {len(files)} files refused; nothing was written", file=sys.stderr)
        return 2

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(summary_table(imported))
    differences = [f"{item.file}: {text}" for item in imported for text in _differences(item)]
    for line in differences:
        console.print(f"differs: {escape(line)}", soft_wrap=True)
    report = import_report(args.source, imported)
    console.print(escape(summary_line(report["totals"], args.source)), soft_wrap=True)
    if args.check and differences:
        print(f"{len(differences)} differences; nothing was written", file=sys.stderr)
        return 1
    if args.out:
        for name in publish(Path(args.out), imported, report):
            console.print(f"wrote {escape(str(Path(args.out) / name))}", soft_wrap=True)
    return 0


def import_files(
    files: Sequence[Path], importer: Callable[[str | Path], Imported]
) -> tuple[list[Imported], list[InputError]]:
    """Import every file; a refused one does not keep the others from being looked at."""
    imported: list[Imported] = []
    refusals: list[InputError] = []
    origin: dict[str, str] = {}
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        for file in progress.track(files, description="importing"):
            try:
                item = importer(file)
                dialogue_id = item.dialogue.dialogue_id
                if dialogue_id in origin:
                    raise InputError(
                        f"{file}: network_id", f"{dialogue_id!r} stands in {origin[dialogue_id]} already",
                        "keep one file per dialogue",
                    )  # fmt: skip
                origin[dialogue_id] = str(file)
                imported.append(item)
            except InputError as error:
                refusals.append(error)
    return imported, refusals


def import_report(source: str, imported: Sequence[Imported]) -> dict[str, Any]:
    """What was read, repaired and doubted, per file and in total, as a JSON object."""
    files = [_file_report(item) for item in imported]
    counts = ("sessions", "messages", "questions", "transitions", "replayed")
    totals: dict[str, Any] = {key: sum(entry.get(key, 0) for entry in files) for key in counts}
    for key in ("actions", "repairs", "findings"):
        totals[key] = dict(sum((Counter(entry[key]) for entry in files), Counter()))
    return {"schema": REPORT_SCHEMA, "source": source, "files": files, "totals": totals | {"files": len(files)}}


def _file_report(item: Imported) -> dict[str, Any]:
    dialogue = item.dialogue
    entry: dict[str, Any] = {
        "file": Path(item.file).name,
        "dialogue_id": dialogue.dialogue_id,
        "language": dialogue.language,
        "members": len(dialogue.members),
        "sessions": len(dialogue.sessions),
        "messages": sum(len(session.messages) for session in dialogue.sessions),
        "questions": len(dialogue.questions),
        "actions": {},
        "repairs": dict(item.repairs),
        "findings": {},
    }
    if isinstance(item, ImportedTrajectory):
        names = [action.action for step in item.trace.steps for action in step.actions]
        noops = sum(not step.actions for step in item.trace.steps)
        entry |= {
            "teacher": item.trace.teacher,
            "window": item.trace.window,
            "transitions": item.num_transitions,
            "replayed": item.num_replayed,
            "actions": dict(Counter(names) + Counter(NOOP=noops)),
            "findings": dict(Counter(str(finding["code"]) for finding in item.trace.findings)),
            "differences": _differences(item),
        }
    return entry


def _differences(item: Imported) -> list[str]:
    return [str(difference) for difference in item.differences] if isinstance(item, ImportedTrajectory) else []


def _listed(counts: Mapping[str, int], separator: str = "\n") -> str:
    return separator.join(f"{code} {count}" for code, count in sorted(counts.items())) or "–"


def summary_table(imported: Sequence[Imported]) -> Table:
    """One row a file."""
    traced = any(isinstance(item, ImportedTrajectory) for item in imported)
    columns = ["transitions", "ADD/UPDATE/NOOP", "replay ok"] if traced else ["sessions", "messages", "questions"]
    table = Table()
    for column in ["file", *columns, "repairs", *(["findings"] if traced else [])]:
        table.add_column(
            column, justify="right" if column in columns else "left", no_wrap=column != "file", overflow="fold"
        )
    for item in imported:
        entry = _file_report(item)
        if traced:
            actions = "/".join(str(entry["actions"].get(name, 0)) for name in ("ADD", "UPDATE", "NOOP"))
            row = [str(entry["transitions"]), actions, f"{entry['replayed']}/{entry['transitions']}"]
        else:
            row = [str(entry[column]) for column in columns]
        row = [entry["file"], *row, _listed(entry["repairs"]), *([_listed(entry["findings"])] if traced else [])]
        table.add_row(*map(escape, row))
    return table


def summary_line(totals: Mapping[str, Any], source: str) -> str:
    """The totals as one sentence."""
    text = f"{totals['files']} files, {totals['messages']} messages, {totals['questions']} questions"
    if source in WITH_TRACES:
        text += (
            f", {totals['transitions']} transitions of which {totals['replayed']} replay exactly; "
            f"actions: {_listed(totals['actions'], ', ')}; findings: {_listed(totals['findings'], ', ')}"
        )
    return f"{text}; repairs: {_listed(totals['repairs'], ', ')}"


def publish(out: Path, imported: Sequence[Imported], report: Mapping[str, Any]) -> list[str]:
    """Write the canonical files: first all of them to a hidden folder, then each to its name.

    Returns:
        Names of the files.

    Raises:
        InputError: The folder cannot be written.
    """
    traces = [item.trace for item in imported if isinstance(item, ImportedTrajectory)]
    if not traces and (out / "traces.json").exists():
        raise InputError(str(out), "holds the traces.json of another import", "choose another folder")
    existed = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".import-", dir=out))
    except OSError as error:
        raise InputError(str(out), f"cannot be written ({error.strerror})", "choose a writable folder") from None
    try:
        write_dialogues(staging / "dialogues.json", [item.dialogue for item in imported])
        if traces:
            write_traces(staging / "traces.json", traces)
        write_json(staging / "import_report.json", report)
        names = sorted(file.name for file in staging.iterdir())
        for name in names:
            os.replace(staging / name, out / name)
    except BaseException:
        if not existed and not any(file != staging for file in out.iterdir()):
            shutil.rmtree(out)
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return names


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
