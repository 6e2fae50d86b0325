"""Reading and writing JSON files at the boundary: whole or absent, with positions in every complaint."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from writer_rl.configs.errors import InputError


def _no_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"key {key!r} stands twice in one object")
        seen[key] = value
    return seen


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def read_json(path: Path) -> Any:
    """Read one JSON file.

    Raises:
        InputError: The file is missing, a directory, not UTF-8, not JSON, or has a key twice.
    """
    if path.is_dir():
        raise InputError(str(path), "is a directory", "name a JSON file")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(str(path), "does not exist", "check the path") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start}", "is not UTF-8", "save the file as UTF-8") from None
    except OSError as error:
        raise InputError(
            str(path), f"cannot be read ({error.strerror})", "check the path and its permissions"
        ) from None
    if not text.strip():
        raise InputError(str(path), "is empty", "give a file with content")
    try:
        return json.loads(text, object_pairs_hook=_no_duplicate_keys, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        where = f"{path}: line {error.lineno} column {error.colno}"
        raise InputError(where, f"is not valid JSON ({error.msg})", "mend or make the file again") from None
    except (ValueError, RecursionError) as error:
        raise InputError(str(path), f"is not valid JSON ({error})", "mend or make the file again") from None


def write_text_atomic(path: Path, text: str) -> None:
    """Write a text file whole or not at all: a temporary file in the same folder, synced, then renamed.

    Raises:
        InputError: The folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise InputError(
            str(path), f"cannot be written ({error.strerror})", "choose a writable output folder"
        ) from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically, UTF-8, readable."""
    write_text_atomic(path, json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def json_files(path: Path) -> list[Path]:
    """The file itself, or the `*.json` files of a folder in name order.

    Raises:
        InputError: The path does not exist or the folder holds none.
    """
    if path.is_dir():
        found = sorted(p for p in path.glob("*.json") if p.is_file())
        if not found:
            raise InputError(str(path), "holds no .json file", "name a folder with canonical files, or a file")
        return found
    if not path.exists():
        raise InputError(str(path), "does not exist", "check the path")
    return [path]


def _where(file: str, position: str, key: str = "") -> str:
    """File and JSON position; the top of a file has no position."""
    place = f"{position}.{key}" if position and key else position or key
    return f"{file}: {place}" if place else file


def _has_surrogate(text: str) -> bool:
    return any(0xD800 <= ord(char) <= 0xDFFF for char in text)


class Reader:
    """Typed access to one parsed JSON object; every complaint names file and position.

    Example:
        >>> Reader({"a": 1}, "x.json", "top").text("a")
        Traceback (most recent call last):
        writer_rl.configs.errors.InputError: x.json: top.a: is int, not text; give a string
    """

    def __init__(self, value: Any, file: str, position: str) -> None:
        if not isinstance(value, Mapping):
            raise InputError(_where(file, position), f"is {type(value).__name__}, not an object", "give an object")
        self.value, self.file, self.position = value, file, position

    def fail(self, key: str, what: str, fix: str) -> InputError:
        """The error to raise for a key of this object."""
        return InputError(_where(self.file, self.position, key), what, fix)

    def _get(self, key: str, kind: type | tuple[type, ...], name: str, default: Any) -> Any:
        if key not in self.value:
            if default is None:
                raise self.fail(key, "is missing", f"add {name}")
            return default
        found = self.value[key]
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            raise self.fail(key, f"is {type(found).__name__}, not {name}", f"give {_ARTICLE[name]}")
        return found

    def text(self, key: str, default: str | None = None, *, blank: bool = True) -> str:
        """A string; `blank=False` refuses an empty one."""
        found: str = self._get(key, str, "text", default)
        if not blank and not found.strip():
            raise self.fail(key, "is blank", "give a non-empty string")
        if _has_surrogate(found):
            raise self.fail(key, "holds an unpaired surrogate", "save the text as valid Unicode")
        return found

    def number(self, key: str, default: int | None = None) -> int:
        """An integer of 0 or more."""
        found: int = self._get(key, int, "a whole number", default)
        if found < 0:
            raise self.fail(key, f"is {found}", "give 0 or more")
        return found

    def items(self, key: str, default: list[Any] | None = None) -> list[Any]:
        """A list."""
        found: list[Any] = self._get(key, list, "a list", default)
        return found

    def mapping(self, key: str, default: dict[str, Any] | None = None) -> dict[str, Any]:
        """An object."""
        found: dict[str, Any] = self._get(key, dict, "an object", default)
        return found

    def texts(self, key: str, default: list[Any] | None = None) -> tuple[str, ...]:
        """A list of strings."""
        found = self.items(key, default)
        for index, item in enumerate(found):
            if not isinstance(item, str):
                raise self.fail(f"{key}[{index}]", f"is {type(item).__name__}, not text", "give a string")
            if _has_surrogate(item):
                raise self.fail(f"{key}[{index}]", "holds an unpaired surrogate", "save the text as valid Unicode")
        return tuple(found)

    def children(self, key: str, default: list[Any] | None = None) -> Iterable[Reader]:
        """Readers of a list of objects."""
        for index, item in enumerate(self.items(key, default)):
            yield Reader(item, self.file, f"{self.position}.{key}[{index}]" if self.position else f"{key}[{index}]")

    def only(self, *keys: str) -> None:
        """Refuse keys beside these."""
        unknown = sorted(set(self.value) - set(keys))
        if unknown:
            raise self.fail(unknown[0], "is not a known key", f"use {', '.join(keys)}")


_ARTICLE = {"text": "a string", "a whole number": "an integer", "a list": "a list", "an object": "an object"}
