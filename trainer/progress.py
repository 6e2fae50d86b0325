"""What a person sees while a stage runs: its name, how far it is, the time left.

On a terminal: one live display, however many bars are open. Elsewhere (a log file, a pipe): one plain line about every ten
seconds. Ranks other than 0 stay silent. Everything goes to standard error, so that standard output stays clean for results.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_EVERY_S = 10.0

_display: Progress | None = None
_open_bars = 0


def is_main_rank() -> bool:
    """True in a single process and on rank 0 of a launched group (`RANK` is set by torchrun and accelerate)."""
    return os.environ.get("RANK", "0") in ("", "0")


def console() -> Console:
    """A console on standard error; made anew so that a redirected stream is honoured."""
    return Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """Print one line on rank 0, above the live bars if there are any. The text is plain: brackets are not markup."""
    if not is_main_rank():
        return
    if _display is not None:
        _display.console.print(text, markup=False, soft_wrap=True)
    else:
        console().print(text, markup=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Seconds for a reader.

    Example:
        >>> duration(8.24), duration(75), duration(7384)
        ('8.2 s', '1 min 15 s', '2 h 03 min')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Bar:
    """Progress of one loop. Made by `progress`.

    Attributes:
        done: Units finished so far.
    """

    def __init__(self, description: str, total: int | None) -> None:
        self.description, self.total, self.done = description, total, 0
        self._started = self._last_line = time.monotonic()
        self._note = ""
        self._task: Any = None

    def advance(self, amount: int = 1, note: str = "") -> None:
        """Count finished units.

        Args:
            amount: Units finished since the last call.
            note: A short state shown beside the bar, such as ``"return 0.41"``; an empty one keeps the last.
        """
        self.done += amount
        self._note = note or self._note
        if self._task is not None and _display is not None:
            _display.update(self._task, completed=self.done, note=self._note)
        elif is_main_rank() and time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            say(self.line())

    def line(self) -> str:
        """The plain line: description, count, elapsed time, time left."""
        elapsed = time.monotonic() - self._started
        parts = [f"{self.done}/{self.total}" if self.total else f"{self.done}", duration(elapsed)]
        if self.total and 0 < self.done < self.total:
            parts.append(f"{duration(elapsed / self.done * (self.total - self.done))} left")
        if self._note:
            parts.append(self._note)
        return f"{self.description}: " + " · ".join(parts)


@contextmanager
def progress(description: str, total: int | None = None) -> Iterator[Bar]:
    """Show a loop's progress with the time left.

    Args:
        description: What is being done, in a few words.
        total: Number of units; None when unknown (no time left is shown).

    Yields:
        The bar; call `advance` on it. Bars may be nested.

    Example:
        >>> with progress("score dialogues", total=3) as bar:
        ...     for _ in range(3):
        ...         bar.advance()
        >>> bar.done
        3
    """
    global _display, _open_bars
    bar = Bar(description, total)
    live = is_main_rank() and sys.stderr.isatty()
    if live:
        if _display is None:
            _display = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=28),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                console=console(),
                transient=True,
            )
            _display.start()
        bar._task = _display.add_task(description, total=total, note="")
        _open_bars += 1
    try:
        yield bar
    finally:
        if live and _display is not None:
            _display.remove_task(bar._task)
            bar._task = None
            _open_bars -= 1
            if _open_bars == 0:
                _display.stop()
                _display = None
        if is_main_rank() and time.monotonic() - bar._started >= 2.0:
            say(bar.line())


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Announce a stage and say how long it took, also when it fails.

    Example:
        >>> with stage("merge the SFT adapter"):
        ...     pass
    """
    say(f"── {name}")
    started = time.monotonic()
    try:
        yield
    except BaseException as error:
        say(f"── {name}: stopped after {duration(time.monotonic() - started)} ({type(error).__name__})")
        raise
    say(f"── {name}: done in {duration(time.monotonic() - started)}")
