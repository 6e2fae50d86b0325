"""What a user meets first: help, unknown commands, bad input, and launch.sh before anything is installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from writer_rl.configs.errors import InputError
from writer_rl.trainer import main as command_line
from writer_rl.trainer.cli import config_parser, parse_config, run_dir

ROOT = Path(__file__).resolve().parents[2]


def launch(
    *words: str, cwd: Path | None = None, script: Path = ROOT / "launch.sh", **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(script), *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
        env={**os.environ, **env},
    )


def test_help_lists_every_command_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["--help"]) == 0
    rows = capsys.readouterr().out.splitlines()
    for name, (_, summary) in command_line.COMMANDS.items():
        assert [row for row in rows if row.split()[:1] == [name] and row.endswith(summary)]
    assert max(map(len, rows)) <= 100


def test_no_command_prints_usage_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main([]) == 2
    assert "usage: writer-rl" in capsys.readouterr().err


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["evalute"]) == 2
    assert "did you mean 'evaluate'?" in capsys.readouterr().err
    assert command_line.main(["zzzz"]) == 2
    assert "commands: demo, simulate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "status", "shown"),
    [
        (
            InputError("a.json: members", "the list is empty", "name one"),
            2,
            "error: a.json: members: the list is empty; name one\n",
        ),
        (KeyboardInterrupt(), 130, "\nwriter-rl probe: interrupted\n"),
    ],
)
def test_errors_become_one_line_and_a_status(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    raised: BaseException,
    status: int,
    shown: str,
) -> None:
    (tmp_path / "probe_command.py").write_text("def main(argv):\n    raise argv[0]\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(command_line.COMMANDS, "probe", ("probe_command", "raises"))
    assert command_line.main(["probe", raised]) == status  # type: ignore[list-item]
    assert capsys.readouterr().err == shown


def test_every_command_has_help_that_names_itself() -> None:
    """In one fresh interpreter, so that torch is loaded once at most."""
    code = """
import contextlib, io, json
from writer_rl.trainer.main import COMMANDS, main
shown = {}
for name in COMMANDS:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            status = main([name, "--help"])
        except SystemExit as stop:
            status = stop.code
    shown[name] = [status or 0, out.getvalue()]
print(json.dumps(shown))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for name, (status, text) in json.loads(done.stdout.splitlines()[-1]).items():
        assert status == 0, name
        assert re.match(rf"usage: (writer-rl )?{name}\b", text), text


def test_configuration_arguments_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "lr=1.yaml"
    path.write_text("name: a\n", encoding="utf-8")
    parser = config_parser("probe", "A probe.")
    for words in (
        [str(path), "seed=7", "--output", "it's here"],
        ["--output", "it's here", str(path), "seed=7"],
        ["seed=7", "--output=it's here", str(path)],
    ):
        config = parse_config(parser.parse_args(words))
        assert (config.name, config.seed) == ("a", 7)
        assert run_dir(config) == Path("it's here") / "a"


def test_configuration_arguments_that_do_not_add_up(tmp_path: Path) -> None:
    parser = config_parser("probe", "A probe.")
    with pytest.raises(InputError, match=r"'a\.yaml' and 'seed' are both taken for configurations"):
        parse_config(parser.parse_args(["a.yaml", "seed"]))
    with pytest.raises(InputError, match="no configuration is named"):
        parse_config(parser.parse_args(["seed=3"]))
    with pytest.raises(SystemExit) as caught:
        parser.parse_args([])
    assert caught.value.code == 2


def test_bad_configuration_ends_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("seed: x\ngrop: {}\n", encoding="utf-8")
    assert command_line.main(["simulate", str(path), "--out", str(tmp_path / "chats")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"error: {path}: seed (line 1): ")
    assert lines[1] == f"error: {path}: grop (line 2): unknown key; did you mean grpo?"
    assert list(tmp_path.iterdir()) == [path]


def test_launch_help_needs_nothing_installed(tmp_path: Path) -> None:
    link = tmp_path / "launch"
    link.symlink_to(ROOT / "launch.sh")
    done = launch("help", cwd=tmp_path, script=link, WRITER_RL_VENV=str(tmp_path / "venv"))
    assert done.returncode == 0
    for name in ("test", "setup", *command_line.COMMANDS):
        assert f"\n  {name} " in done.stdout
    assert list(tmp_path.iterdir()) == [link]


def test_launch_and_the_program_say_the_same_about_each_command() -> None:
    shown = launch("help").stdout
    for name, (_, summary) in command_line.COMMANDS.items():
        assert f"  {name:<11}{summary}\n" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["frobnicate"], "unknown command 'frobnicate'"),
        ([], "usage: ./launch.sh"),
        (["setup", "now"], "setup takes no arguments"),
    ],
)
def test_launch_refuses_with_status_2_before_installing(tmp_path: Path, words: list[str], said: str) -> None:
    done = launch(*words, WRITER_RL_VENV=str(tmp_path / "venv"))
    assert done.returncode == 2
    assert said in done.stderr
    assert not list(tmp_path.iterdir())


def test_launch_never_touches_a_folder_that_is_no_environment(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("keep", encoding="utf-8")
    done = launch("setup", WRITER_RL_VENV=str(tmp_path))
    assert done.returncode == 1
    assert "is no virtual environment" in done.stderr
    assert (tmp_path / "precious.txt").read_text(encoding="utf-8") == "keep"


def test_launch_names_the_interpreter_it_misses(tmp_path: Path) -> None:
    done = launch("setup", WRITER_RL_VENV=str(tmp_path / "venv"), WRITER_RL_PYTHON=str(tmp_path / "python9"))
    assert done.returncode == 1
    assert "no Python 3.11 or 3.12 found" in done.stderr
    assert not (tmp_path / "venv").exists()
