"""Checkpoints are whole or absent (fault 25): exceptions, kills, truncation, bit rot, and deletion of old ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from writer_rl.configs.errors import InputError
from writer_rl.trainer import checkpoint
from writer_rl.trainer.checkpoint import (
    damage,
    latest_checkpoint,
    prune,
    require_whole,
    update_directory,
    write_checkpoint,
)


def fill(folder: Path) -> None:
    (folder / "adapter").mkdir()
    (folder / "adapter" / "weights.bin").write_bytes(b"w" * 1000)
    (folder / "state.json").write_text("{}")


def save(root: Path, *updates: int) -> None:
    for update in updates:
        write_checkpoint(update_directory(root, update), fill)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_whole_checkpoint_is_found_and_verified(tmp_path: Path) -> None:
    save(tmp_path, 5, 10)
    assert latest_checkpoint(tmp_path) == tmp_path / "update_000010"
    assert damage(tmp_path / "update_000010") == ""
    assert names(tmp_path / "update_000010") == ["COMPLETE", "adapter", "manifest.json", "state.json"]
    assert latest_checkpoint(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda d: (d / "COMPLETE").unlink(), "COMPLETE or manifest.json is missing"),
        (lambda d: (d / "manifest.json").unlink(), "COMPLETE or manifest.json is missing"),
        (lambda d: (d / "adapter/weights.bin").write_bytes(b"w" * 999), "adapter/weights.bin has 999 bytes, not 1000"),
        (lambda d: (d / "adapter/weights.bin").write_bytes(b"v" + b"w" * 999), "adapter/weights.bin has other content"),
        (lambda d: (d / "state.json").unlink(), "state.json is missing"),
        (lambda d: (d / "manifest.json").write_text("{}"), "does not agree"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: object, reason: str
) -> None:
    save(tmp_path, 5, 10)
    harm(tmp_path / "update_000010")  # type: ignore[operator]
    assert reason in damage(tmp_path / "update_000010")
    assert latest_checkpoint(tmp_path) == tmp_path / "update_000005"
    assert "update_000010 is passed over" in capsys.readouterr().err
    with pytest.raises(InputError, match="is no whole checkpoint"):
        require_whole(tmp_path / "update_000010")


def test_numbers_are_compared_as_numbers(tmp_path: Path) -> None:
    save(tmp_path, 999_999, 1_000_000)
    assert latest_checkpoint(tmp_path) == tmp_path / "update_1000000"


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path, 5)

    def broken(folder: Path) -> None:
        fill(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(update_directory(tmp_path, 10), broken)
    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(update_directory(tmp_path, 5), broken)
    assert names(tmp_path) == ["update_000005"]
    assert latest_checkpoint(tmp_path) == tmp_path / "update_000005"


def test_an_empty_or_clashing_content_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing was written"):
        write_checkpoint(tmp_path / "update_000001", lambda folder: None)
    with pytest.raises(ValueError, match="is written by write_checkpoint"):
        write_checkpoint(tmp_path / "update_000001", lambda folder: (folder / "COMPLETE").touch())
    assert names(tmp_path) == []


@pytest.mark.parametrize("exchange", [True, False])
def test_a_checkpoint_of_the_same_name_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(checkpoint, "_exchange", lambda one, other: False)
    save(tmp_path, 5)
    write_checkpoint(update_directory(tmp_path, 5), lambda folder: (folder / "new.txt").write_text("n"))  # type: ignore[arg-type, return-value]
    assert names(tmp_path) == ["update_000005"]
    assert names(tmp_path / "update_000005") == ["COMPLETE", "manifest.json", "new.txt"]
    assert damage(tmp_path / "update_000005") == ""


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from writer_rl.trainer import checkpoint

    where, root = sys.argv[1], Path(sys.argv[2])

    def die(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    def fill(folder):
        (folder / "weights.bin").write_bytes(b"n" * 1000)
        if where == "fill":
            die()
        (folder / "state.json").write_text("{}")

    if where == "seal":
        checkpoint._write_synced = die
    elif where == "before_rename":
        checkpoint._put_in_place = die
    elif where == "after_rename":
        real = checkpoint._put_in_place
        checkpoint._put_in_place = lambda *args: (real(*args), die())
    elif where == "prune":
        checkpoint.shutil.rmtree = die
    for name in sys.argv[3:]:
        checkpoint.write_checkpoint(root / name, fill)
        checkpoint.prune(root, 1)
"""


@pytest.mark.parametrize(
    ("where", "newest"),
    [("fill", 5), ("seal", 5), ("before_rename", 5), ("after_rename", 10), ("prune", 10)],
)
def test_killed_at_any_point_the_newest_complete_one_loads(tmp_path: Path, where: str, newest: int) -> None:
    save(tmp_path, 5)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), where, str(tmp_path), "update_000010"], check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert latest_checkpoint(tmp_path) == update_directory(tmp_path, newest)
    save(tmp_path, 10)
    prune(tmp_path, 2)
    expected = ["update_000010"] if where == "prune" else ["update_000005", "update_000010"]
    assert names(tmp_path) == expected, "the next save cleans up"


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4)
    assert [path.name for path in prune(tmp_path, 2)] == ["update_000001", "update_000002"]
    assert names(tmp_path) == ["update_000003", "update_000004"]
    with pytest.raises(ValueError, match="at least one"):
        prune(tmp_path, 0)


def test_prune_deletes_nothing_behind_a_damaged_newest(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    (tmp_path / "update_000003" / "state.json").write_text("[]")
    assert prune(tmp_path, 1) == []
    assert names(tmp_path) == ["update_000001", "update_000002", "update_000003"]


def test_a_damaged_old_one_does_not_count_as_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    (tmp_path / "update_000002" / "COMPLETE").unlink()
    prune(tmp_path, 2)
    assert names(tmp_path) == ["update_000001", "update_000003"]


def test_leftovers_of_others_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / ".update_000007.staged-1-ab").mkdir()
    (tmp_path / ".update_000007.notes").mkdir()
    save(tmp_path, 8)
    assert (tmp_path / ".update_000007.staged-1-ab").exists(), "only prune cleans other names"
    prune(tmp_path, 1)
    assert names(tmp_path) == [".update_000007.notes", "update_000008"]
    assert os.access(tmp_path / "update_000008", os.R_OK)
