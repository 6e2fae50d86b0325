"""The command line: `writer-rl COMMAND …` finds the command's module and hands over.

Modules are imported only when their command runs, so `--help` and `score` start without torch.
"""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence

from writer_rl.configs.errors import InputError

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("writer_rl.trainer.demo", "simulate, SFT, GRPO, evaluate and report in one go, on a small model"),
    "simulate": ("writer_rl.trainer.simulate", "write simulated group chats with true memories, traces and questions"),
    "import": ("writer_rl.trainer.import_data", "convert a foreign data set into canonical dialogue files"),
    "sft": ("writer_rl.trainer.sft", "fine-tune the Writer on teacher traces"),
    "grpo": ("writer_rl.trainer.grpo", "train the Writer by reinforcement learning with sampled rollouts"),
    "evaluate": ("writer_rl.trainer.evaluate", "compare base, SFT and RL Writers on held-out dialogues, one budget"),
    "score": ("writer_rl.trainer.score", "score predicted memories against reference memories, without any model"),
    "report": ("writer_rl.trainer.report", "draw reward curves and result tables of a run"),
    "export": ("writer_rl.trainer.export", "write a trained Writer as a self-contained model directory"),
    "bench": ("writer_rl.trainer.bench", "measure sampling, training and synchronisation speed on this machine"),
}


def usage() -> str:
    """The text of `writer-rl --help`."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items())
    return (
        "usage: writer-rl COMMAND [ARGUMENTS]\n\n"
        "Reinforcement learning for the Writer of a speaker-centred conversation memory.\n\n"
        f"commands:\n{rows}\n\n"
        "`writer-rl COMMAND --help` describes a command. Bad input ends with status 2 and names the fix.\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Command and its arguments; the process's own if None.

    Returns:
        Exit status: 0 done, 1 failed, 2 bad input, 130 interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(), end="", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        fix = f"did you mean {near[0]!r}?" if near else f"commands: {', '.join(COMMANDS)}"
        print(f"writer-rl: unknown command {command!r}; {fix}", file=sys.stderr)
        return 2
    # A polite kill unwinds like an error does, so that engines and half-written folders are cleaned up.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        status = int(importlib.import_module(COMMANDS[command][0]).main(rest))
        sys.stdout.flush()
        return status
    except InputError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nwriter-rl {command}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output went away, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(main())
