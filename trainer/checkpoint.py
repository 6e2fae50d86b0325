"""Directories that are whole or absent: staged beside their place, synced, described by a manifest, renamed.

A whole directory holds `manifest.json` (size and SHA-256 of every file) and `COMPLETE` (the SHA-256 of the manifest), written
last. A process killed at any point therefore leaves either no directory of that name, or a whole one; what bit rot or a
careless copy cuts short later is found by the manifest. One writer per root is assumed (rank 0).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from writer_rl.configs.errors import InputError
from writer_rl.trainer.progress import say

MANIFEST = "manifest.json"
MARKER = "COMPLETE"
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def update_directory(root: Path, update: int) -> Path:
    """Where the checkpoint after an update lies.

    Example:
        >>> str(update_directory(Path("run/grpo/checkpoints"), 10))
        'run/grpo/checkpoints/update_000010'
    """
    return root / f"update_{update:06d}"


def update_number(directory: Path) -> int | None:
    """The update a checkpoint directory is named after; None for any other name."""
    match = re.fullmatch(r"update_(\d+)", directory.name)
    return int(match.group(1)) if match else None


def write_checkpoint(directory: Path, fill: Callable[[Path], None]) -> Path:
    """Write a directory whole or not at all.

    Args:
        directory: Where it shall stand. One that stands there already is replaced in a single exchange where the file system
            can do that, else by two renames.
        fill: Writes the content into the (empty, existing) folder it is given. What it raises is passed on, and nothing stays.

    Returns:
        `directory`.

    Raises:
        ValueError: `fill` wrote no file, or a name that the manifest needs.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(directory.parent, directory.name)
    staged = directory.parent / f".{directory.name}.staged-{os.getpid()}-{secrets.token_hex(4)}"
    staged.mkdir()
    try:
        fill(staged)
        _seal(staged)
        _put_in_place(staged, directory)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    return directory


def damage(directory: Path, *, hashes: bool = True) -> str:
    """Why a directory is not whole; empty when it is.

    Args:
        directory: A directory written by `write_checkpoint`.
        hashes: False compares names and sizes alone, without reading the files.
    """
    manifest_file, marker = directory / MANIFEST, directory / MARKER
    if not directory.is_dir():
        return "it is not a directory"
    try:
        content = manifest_file.read_bytes()
        wanted = marker.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return f"{MARKER} or {MANIFEST} is missing"
    if hashlib.sha256(content).hexdigest() != wanted:
        return f"{MANIFEST} does not agree with {MARKER}"
    for name, entry in json.loads(content)["files"].items():
        file = directory / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["bytes"]:
            return f"{name} has {file.stat().st_size} bytes, not {entry['bytes']}"
        if hashes and _sha256(file) != entry["sha256"]:
            return f"{name} has other content than was written"
    return ""


def require_whole(directory: Path) -> Path:
    """The directory itself.

    Raises:
        InputError: It is missing or damaged.
    """
    problem = damage(directory)
    if problem:
        raise InputError(str(directory), f"is no whole checkpoint ({problem})", "choose another checkpoint")
    return directory


def checkpoints(root: Path) -> list[Path]:
    """The `update_N` directories below a root, oldest first, whole or not."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if path.is_dir() and update_number(path) is not None]
    return sorted(found, key=lambda path: update_number(path) or 0)


def latest_checkpoint(root: Path) -> Path | None:
    """The newest whole checkpoint below a root; damaged ones are named and passed over.

    Returns:
        Its directory, or None when there is no whole one.
    """
    for candidate in reversed(checkpoints(root)):
        problem = damage(candidate)
        if not problem:
            return candidate
        say(f"checkpoint {candidate.name} is passed over: {problem}")
    return None


def prune(root: Path, keep: int) -> list[Path]:
    """Delete old checkpoints, but only behind a newest one whose every byte was verified.

    Args:
        root: Folder of `update_N` directories.
        keep: Whole checkpoints to keep, at least 1.

    Returns:
        The directories that were deleted. Damaged ones older than the newest whole one are deleted too.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least one checkpoint must stay")
    found = checkpoints(root)
    if not found or damage(found[-1]):
        return []
    remove_leftovers(root)
    whole = [path for path in found if not damage(path, hashes=False)]
    doomed = [path for path in found if path not in whole[-keep:]]
    for path in doomed:
        _delete(path)
    return doomed


def remove_leftovers(root: Path, name: str = "") -> None:
    """Remove what a killed writer left: staged and doomed folders below a root, of one name or of all."""
    for path in root.glob(f".{name or '*'}.*"):
        if re.search(r"\.(staged|doomed)-[0-9a-f-]+$", path.name):
            shutil.rmtree(path, ignore_errors=True)


def _seal(staged: Path) -> None:
    """Sync every file, write the manifest over them, and the marker over the manifest."""
    files = sorted(path for path in staged.rglob("*") if path.is_file())
    if not files:
        raise ValueError(f"nothing was written into {staged.name}; a checkpoint holds at least one file")
    entries = {}
    for file in files:
        name = file.relative_to(staged).as_posix()
        if name in (MANIFEST, MARKER):
            raise ValueError(f"{name} is written by write_checkpoint; use another name")
        _sync(file)
        entries[name] = {"bytes": file.stat().st_size, "sha256": _sha256(file)}
    manifest = json.dumps({"files": entries}, ensure_ascii=False, indent=1).encode()
    _write_synced(staged / MANIFEST, manifest)
    _write_synced(staged / MARKER, hashlib.sha256(manifest).hexdigest().encode() + b"\n")
    for folder in [path for path in staged.rglob("*") if path.is_dir()] + [staged]:
        _sync(folder)


def _put_in_place(staged: Path, directory: Path) -> None:
    if not directory.exists():
        os.rename(staged, directory)
    elif _exchange(staged, directory):
        shutil.rmtree(staged)
    else:
        doomed = _doomed_name(directory)
        os.rename(directory, doomed)
        os.rename(staged, directory)
        shutil.rmtree(doomed)
    _sync(directory.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two directories in one step (Linux `renameat2`); False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    return renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def _delete(directory: Path) -> None:
    """Rename first: a deletion that is cut short must not look like a damaged checkpoint."""
    doomed = _doomed_name(directory)
    os.rename(directory, doomed)
    shutil.rmtree(doomed)


def _doomed_name(directory: Path) -> Path:
    return directory.parent / f".{directory.name}.doomed-{os.getpid()}-{secrets.token_hex(4)}"


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_synced(file: Path, content: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
