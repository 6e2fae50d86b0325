"""The command `import`: exit statuses, what is written and what is not, on hand-made files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from writer_rl.configs.errors import InputError
from writer_rl.data.dialogues import read_dialogues
from writer_rl.data.traces import read_traces, replay
from writer_rl.trainer.import_data import main
from writer_rl.trainer.main import main as command_line

OUTPUTS = ["dialogues.json", "import_report.json", "traces.json"]


def network(name: str) -> dict[str, Any]:
    turn = {"turn": f"{name}_t0", "speaker": "Ana", "content": "hello", "ts": "2026-08-10", "reply_to": ""}
    return {
        "schema": "socialmembench-real-v4-source/1", "speakers": ["Ana"], "meta": {"network_id": name}, "qa_pairs": [],
        "sessions": [{"session_id": f"{name}_s01", "session_index": 1, "topic": "t", "ts": "2026-08-10", "turns": [turn]}],
    }  # fmt: skip


def trajectory(name: str, stored_owner: str = "Ana") -> dict[str, Any]:
    add = {
        "action": "ADD",
        "owner": "Ana",
        "source": "Ana",
        "layer": "per_speaker_core",
        "utype": "fact",
        "content": "is here",
    }
    entry = {**add, "owner": stored_owner, "entry_id": "e1", "links": [], "superseded_by": ""}
    message = {"speaker": "Ana", "content": "I am here", "session": f"{name}_s01", "ts": "", "msg_id": "0"}
    return {
        "schema": "speakermem-v4-trajectories/1", "prompt_version": "p", "teacher": {"model": "m"}, "window_size": 5, "network_id": name,
        "transitions": [
            {"session_id": f"{name}_s01", "ts": "2026-08-10", "messages": [message], "actions": [add],
             "report": {"created_ids": ["e1"]}, "post_state": {"entries": [entry], "heads": [entry], "update_edges": []}}
        ],
    }  # fmt: skip


def folder(path: Path, *values: dict[str, Any]) -> Path:
    path.mkdir()
    for number, value in enumerate(values):
        (path / f"{number}.json").write_text(json.dumps(value), encoding="utf-8")
    return path


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def test_trajectories_become_dialogues_traces_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = folder(tmp_path / "in", trajectory("g1"), trajectory("g2")), tmp_path / "deep" / "out"
    assert main(["speakermem-trajectories", str(source), "--out", str(out), "--check"]) == 0
    assert names(out) == OUTPUTS
    dialogues, traces = read_dialogues(out / "dialogues.json"), read_traces(out / "traces.json")
    for dialogue, trace in zip(dialogues, traces, strict=True):
        assert [r.content for r in list(replay(dialogue, trace, trace.window))[-1].after.records] == ["is here"]
    report = json.loads((out / "import_report.json").read_text())
    assert report["totals"] == {
        "sessions": 2, "messages": 2, "questions": 0, "transitions": 2, "replayed": 2, "actions": {"ADD": 2},
        "repairs": {"message_id": 2}, "findings": {}, "files": 2,
    }  # fmt: skip
    assert [entry["differences"] for entry in report["files"]] == [[], []]
    printed = capsys.readouterr().out
    assert "1/1" in printed
    assert "1/0/0" in printed
    assert f"wrote {out / 'traces.json'}" in printed


def test_check_fails_on_a_difference_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = folder(tmp_path / "in", trajectory("g1"), trajectory("g2", stored_owner="Ben")), tmp_path / "out"
    assert main(["speakermem-trajectories", str(source), "--out", str(out), "--check"]) == 1
    assert not out.exists()
    printed = capsys.readouterr().out
    assert (
        f"differs: {source / '1.json'}: transitions[0].post_state.entries[e1].owner: the file has 'Ben', the replay 'Ana'"
        in printed
    )
    assert "0/1" in printed


def test_without_check_a_difference_is_shown_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = folder(tmp_path / "in", trajectory("g", stored_owner="Ben")), tmp_path / "out"
    assert main(["speakermem-trajectories", str(source), "--out", str(out)]) == 0
    assert "differs: " in capsys.readouterr().out
    assert len(json.loads((out / "import_report.json").read_text())["files"][0]["differences"]) == 1


def test_check_alone_writes_nothing(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", trajectory("g"))
    assert main(["speakermem-trajectories", str(source / "0.json"), "--check"]) == 0
    assert names(tmp_path) == ["in"]


def test_networks_have_no_traces(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["speakermem-networks", str(folder(tmp_path / "in", network("g"))), "--out", str(out)]) == 0
    assert names(out) == ["dialogues.json", "import_report.json"]


def test_bad_files_are_all_named_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder(tmp_path / "in", network("g1"), network("g2") | {"schema": "x"}, network("g1"), network("g3"))
    (source / "9.json").write_text("{", encoding="utf-8")
    out = tmp_path / "out"
    assert main(["speakermem-networks", str(source), "--out", str(out)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].strip() for line in lines[:3]] == [str(source / f"{n}.json") for n in (1, 2, 9)]
    assert "'g1' stands in" in lines[1]
    assert lines[3] == "3 of 5 files refused; nothing was written"
    assert not out.exists()


def test_a_refused_import_leaves_an_older_one_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["speakermem-networks", str(folder(tmp_path / "a", network("g"))), "--out", str(out)]) == 0
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    assert main(["speakermem-networks", str(folder(tmp_path / "b", {"schema": "x"})), "--out", str(out)]) == 2
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["speakermem-networks", "IN"], "--out: is missing"),
        (["speakermem-networks", "IN", "--check"], "no states to compare"),
        (["speakermem-networks", "IN/none", "--out", "OUT"], "does not exist"),
        (["speakermem-networks", "EMPTY", "--out", "OUT"], "no .json file"),
        (["speakermem-networks", "IN", "--out", "IN/0.json"], "cannot be written"),
        (["speakermem-networks", "IN", "--out", "TRACES"], "another import"),
    ],
)
def test_unusable_arguments(tmp_path: Path, arguments: list[str], reason: str) -> None:
    places = {"IN": folder(tmp_path / "in", network("g")), "EMPTY": folder(tmp_path / "empty"), "OUT": tmp_path / "out"}
    places["TRACES"] = tmp_path / "traces"
    assert (
        main(["speakermem-trajectories", str(folder(tmp_path / "t", trajectory("g"))), "--out", str(places["TRACES"])])
        == 0
    )
    filled = ["/".join(str(places.get(part, part)) for part in argument.split("/")) for argument in arguments]
    with pytest.raises(InputError) as raised:
        main(filled)
    assert reason in str(raised.value)
    assert not places["OUT"].exists()


def test_the_command_line_reaches_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["import", "speakermem-networks", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    assert "does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit) as raised:
        command_line(["import", "imaginary-format", "x"])
    assert raised.value.code == 2
