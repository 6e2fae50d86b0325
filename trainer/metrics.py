"""Metrics of a run: one JSON line per step that survives crashes and resumes, mirrored to wandb when that works.

The files are the record; wandb is a view. A line is ``{"step": 3, "time_s": 41.2, "reward/return_mean": 0.37, …}``; keys are
``area/quantity`` with the unit in the name. A number that is not finite is written as null and counted, never averaged in
as 0. The rows of an update's sample table lie in their own file, ``samples/update_000003.jsonl``.
"""

from __future__ import annotations

import json
import math
import netrc
import os
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from writer_rl.configs.schema import LoggingConfig
from writer_rl.data.files import write_text_atomic
from writer_rl.trainer.progress import say

SAMPLE_COLUMNS = (
    "dialogue_id",
    "trajectory_index",
    "segment_index",
    "prompt",
    "completion",
    "return",
    "advantage",
    "rewards",
    "errors",
    "reference",
)
TABLE_KEY = "samples/trajectories"
TABLE_ROWS = 200
_SECRET = re.compile(r"(api_?key|secret|passw(or)?d|credential|(^|_)token$|authorization)", re.IGNORECASE)


class MetricLog:
    """Writes `metrics.jsonl` and sample tables below one folder of a run.

    Args:
        directory: The folder, e.g. ``<run>/grpo``.
        settings: The run's logging configuration; None logs to files alone.
        run_name: Name of the wandb run.
        config: The resolved configuration, shown by wandb; values under names like ``api_key`` are masked.
        resume_step: None starts afresh and drops what an earlier run left. A step keeps the lines and sample files up to
            it and drops later ones (an update that is repeated after a crash must not stand twice).
        enabled: False on ranks other than 0: nothing is written.
    """

    def __init__(
        self,
        directory: Path,
        settings: LoggingConfig | None = None,
        *,
        run_name: str = "run",
        config: Mapping[str, Any] | None = None,
        resume_step: int | None = None,
        enabled: bool = True,
    ) -> None:
        self.directory = directory
        self.path = directory / "metrics.jsonl"
        self.samples_directory = directory / "samples"
        self.num_nonfinite = 0
        self._enabled = enabled
        self._mirror: _WandbMirror | None = None
        self._table: deque[list[Any]] = deque(maxlen=TABLE_ROWS)
        self._started = time.monotonic()
        if not enabled:
            return
        self.samples_directory.mkdir(parents=True, exist_ok=True)
        kept = self._keep_until(resume_step)
        self._started -= max((_number(line.get("time_s")) or 0.0 for line in kept), default=0.0)
        self._stream = self.path.open("a", encoding="utf-8")
        if settings is not None and settings.wandb != "disabled":
            self._mirror = _WandbMirror(directory, settings, run_name, config or {}, resumed=resume_step is not None)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line, flushed to disk.

        Args:
            step: The step or update the values belong to. Several lines of one step are merged by the reader.
            metrics: Names to numbers (Python, numpy or one-element tensors), truth values, texts, or None for "not measured".
        """
        if not self._enabled:
            return
        values: dict[str, Any] = {}
        num_bad = 0
        for key, value in metrics.items():
            if key in ("step", "time_s"):
                raise ValueError(f"{key} is written by the log itself; choose another metric name")
            values[key] = plain = _plain(value)
            if isinstance(plain, float) and not math.isfinite(plain):
                values[key] = None
                num_bad += 1
        if num_bad:
            self.num_nonfinite += num_bad
            values["metrics/num_nonfinite"] = num_bad
        line = {"step": int(step), "time_s": round(time.monotonic() - self._started, 3), **values}
        self._stream.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        self._stream.flush()
        if self._mirror:
            self._mirror.log({k: v for k, v in line.items() if v is not None})

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write an update's sample table: its own file, and a fresh wandb table of the last rows of all updates.

        Args:
            step: The update.
            rows: Objects with the keys of `SAMPLE_COLUMNS`; other keys go to the file alone.
        """
        if not self._enabled:
            return
        clean = [_finite(dict(row)) for row in rows]
        text = "".join(json.dumps({"step": int(step), **row}, ensure_ascii=False) + "\n" for row in clean)
        write_text_atomic(self.sample_file(step), text)
        self._table.extend(_table_row(step, row) for row in clean)
        if self._mirror and self._table:
            self._mirror.log_table(int(step), TABLE_KEY, ("step", *SAMPLE_COLUMNS), list(self._table))

    def sample_file(self, step: int) -> Path:
        """Where an update's sample rows lie."""
        return self.samples_directory / f"update_{int(step):06d}.jsonl"

    def close(self) -> None:
        """Close the file and finish the wandb run."""
        if self._enabled:
            self._stream.close()
            if self._mirror:
                self._mirror.close()

    def __enter__(self) -> MetricLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _keep_until(self, resume_step: int | None) -> list[dict[str, Any]]:
        """Rewrite the file without lines after the resumed step and without a line cut short; same for sample files."""
        last = -1 if resume_step is None else resume_step
        kept = [line for line in read_jsonl(self.path) if (_number(line.get("step")) or 0) <= last]
        if self.path.exists():
            write_text_atomic(self.path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))
        for file in sample_files(self.directory):
            step = sample_step(file)
            if step > last:
                file.unlink()
            else:
                self._table.extend(_table_row(step, row) for row in read_jsonl(file))
        return kept


class _WandbMirror:
    """wandb behind one rule: whatever it does, training goes on. Its failure is said once. Imported on first use."""

    def __init__(
        self, directory: Path, settings: LoggingConfig, run_name: str, config: Mapping[str, Any], *, resumed: bool
    ) -> None:
        self._directory, self._settings, self._name, self._config = directory, settings, run_name, config
        self._resumed = resumed
        self._run: Any = None
        self._dead = False

    def log(self, values: Mapping[str, Any]) -> None:
        self._guard(lambda: self._open().log(dict(values)))

    def log_table(self, step: int, key: str, columns: Sequence[str], rows: list[list[Any]]) -> None:
        def send() -> None:
            run = self._open()
            import wandb

            # A fresh object each time: a table that grows after it was logged is not sent again.
            run.log({"step": step, key: wandb.Table(columns=list(columns), data=rows)})

        self._guard(send)

    def close(self) -> None:
        if self._run is not None:
            self._guard(self._run.finish)

    def _guard(self, action: Any) -> None:
        if self._dead:
            return
        try:
            action()
        except Exception as error:  # any failure of a logging service must leave training alone
            self._dead = True
            say(f"wandb stopped working ({type(error).__name__}); metrics go on in {self._directory / 'metrics.jsonl'}")

    def _open(self) -> Any:
        if self._run is not None:
            return self._run
        os.environ.setdefault("WANDB_SILENT", "true")
        for name, folder in (("WANDB_DATA_DIR", "data"), ("WANDB_CACHE_DIR", "cache")):
            os.environ.setdefault(name, str((self._directory / "wandb" / folder).resolve()))
        import wandb

        mode = wandb_mode(self._settings.wandb)
        id_file = self._directory / "wandb_run_id.txt"
        old_id = id_file.read_text(encoding="utf-8").strip() if self._resumed and id_file.exists() else None
        options = {
            "project": self._settings.wandb_project,
            "name": self._name,
            "dir": str(self._directory),
            "config": mask_secrets(dict(self._config)),
            "id": old_id,
            "resume": "allow" if old_id else None,
        }

        def start(chosen: str) -> Any:
            settings = wandb.Settings(
                silent=True, console="off", init_timeout=60, disable_git=True, disable_code=True, save_code=False
            )
            return wandb.init(mode=chosen, settings=settings, **options)

        try:
            self._run = start(mode)
        except Exception as error:
            if mode != "online":
                raise
            say(f"wandb cannot go online ({type(error).__name__}); this run is logged offline")
            self._run = start("offline")
        # Own step axis: wandb refuses to go back in its own, which a resumed run would have to.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        id_file.write_text(str(self._run.id) + "\n", encoding="utf-8")
        return self._run


def wandb_mode(setting: str) -> str:
    """The mode to start wandb in.

    Args:
        setting: ``auto``, ``online``, ``offline`` or ``disabled``. ``auto`` obeys `WANDB_MODE`, else is online when a key is
            at hand (`WANDB_API_KEY`, or an entry of the netrc file for the server), else offline.
    """
    if setting != "auto":
        return setting
    forced = os.environ.get("WANDB_MODE", "")
    if forced in ("online", "offline", "disabled"):
        return forced
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or "api.wandb.ai"
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        known = host in netrc.netrc(str(file)).hosts
    except (OSError, netrc.NetrcParseError):
        known = False
    return "online" if known else "offline"


def mask_secrets(value: Any, key: str = "") -> Any:
    """A copy of nested settings in which texts under names like ``api_key`` or ``token`` read ``***``.

    Example:
        >>> mask_secrets({"judge": {"api_key": "abc", "max_new_tokens": 8}})
        {'judge': {'api_key': '***', 'max_new_tokens': 8}}
    """
    if isinstance(value, Mapping):
        return {name: mask_secrets(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [mask_secrets(item, key) for item in value]
    return "***" if isinstance(value, str) and value and _SECRET.search(key) else value


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a missing file has none, and a line cut short or damaged is left out.

    Numbers that are not finite come back as None.
    """
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError:
        return []
    rows = []
    for line in text.split("\n"):
        try:
            value = json.loads(line, parse_constant=lambda _: None)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            rows.append(value)
    return rows


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, those of one step merged, by rising step. Lines without a whole step are left out."""
    by_step: dict[int, dict[str, Any]] = {}
    for row in read_jsonl(path):
        step = row.get("step")
        if isinstance(step, int) and not isinstance(step, bool):
            by_step.setdefault(step, {}).update(row)
    return [by_step[step] for step in sorted(by_step)]


def sample_files(directory: Path) -> list[Path]:
    """The sample tables below a stage's folder, by rising update."""
    return sorted((directory / "samples").glob("update_*.jsonl"), key=sample_step)


def sample_step(file: Path) -> int:
    """The update of a sample file's name; 0 for a foreign name."""
    match = re.fullmatch(r"update_(\d+)", file.stem)
    return int(match.group(1)) if match else 0


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as Python's own; everything else that JSON has no word for as text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "item"):
        return _plain(value.item())
    return str(value)


def _finite(value: Any) -> Any:
    """A nested copy that JSON can hold: numbers that are not finite become None."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    plain = _plain(value)
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _table_row(step: int, row: Mapping[str, Any]) -> list[Any]:
    """One row with one type a column, as wandb tables want it."""
    cells: list[Any] = [int(step)]
    for column in SAMPLE_COLUMNS:
        value = row.get(column)
        if column in ("return", "advantage"):
            cells.append(_number(value))
        elif column in ("trajectory_index", "segment_index"):
            cells.append(None if _number(value) is None else int(value))  # type: ignore[arg-type]
        else:
            cells.append(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return cells
