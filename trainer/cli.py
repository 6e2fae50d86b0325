"""Arguments that every command with a configuration shares: CONFIG, `key=value` overrides and `--output`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from writer_rl.configs.errors import InputError
from writer_rl.configs.load import load_config
from writer_rl.configs.schema import RunConfig


class CommandParser(argparse.ArgumentParser):
    """Argument parser that takes options and overrides in any order; a bad argument ends with status 2."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Like `argparse`, but `CONFIG --output DIR grpo.beta=0` works as well as `CONFIG grpo.beta=0 --output DIR`."""
        return self.parse_intermixed_args(args, namespace)


def command_parser(prog: str, description: str, epilog: str = "") -> CommandParser:
    """A parser in the house style, without configuration arguments.

    Args:
        prog: Command name, for example ``"score"``.
        description: What the command does, one or two sentences.
        epilog: Examples, printed as they are.

    Returns:
        The parser.
    """
    return CommandParser(
        prog=f"writer-rl {prog}",
        description=description,
        epilog=epilog or None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def config_parser(
    prog: str, description: str, epilog: str = "", default: str | None = None, output: bool = True
) -> CommandParser:
    """A parser with CONFIG, overrides and ``--output``; the caller may add further options.

    Args:
        prog: Command name, for example ``"grpo"``.
        description: What the command does.
        epilog: Examples, printed as they are.
        default: Configuration used when none is named; None makes CONFIG required.
        output: Offer ``--output``; False for a command that writes no run.

    Returns:
        The parser; pass its result to `parse_config`.
    """
    parser = command_parser(prog, description, epilog)
    named = f" (default: {default})" if default else ""
    parser.add_argument(
        "words",
        nargs="*" if default else "+",
        metavar="CONFIG | key=value",
        help=f"a YAML file or the name of a packaged configuration{named}, then overrides such as grpo.num_updates=5",
    )
    if output:
        parser.add_argument("--output", metavar="DIR", help="write the run to DIR/<name> (short for output_dir=DIR)")
    parser.set_defaults(config_default=default)
    return parser


def parse_config(args: argparse.Namespace) -> RunConfig:
    """The checked configuration behind parsed arguments.

    Args:
        args: Result of a `config_parser`'s ``parse_args``.

    Returns:
        The configuration with all overrides applied.

    Raises:
        InputError: Several or no configurations named, or problems in the one that is.
    """
    named = [word for word in args.words if "=" not in word or "/" in word.partition("=")[0]]
    overrides = [word for word in args.words if word not in named]
    if len(named) > 1:
        raise InputError(
            "command line",
            f"{' and '.join(map(repr, named))} are both taken for configurations",
            "name one, and write overrides as key=value without spaces",
        )
    if not named and args.config_default is None:
        raise InputError(
            "command line", "no configuration is named", "give a YAML file or a packaged name such as demo"
        )
    output = getattr(args, "output", None)
    if output is not None:
        if not output:
            raise InputError("--output", "the directory is empty", "name a directory")
        overrides.append(f"output_dir={json.dumps(output)}")  # JSON's quoting is YAML's
    return load_config(named[0] if named else args.config_default, overrides)


def run_dir(config: RunConfig) -> Path:
    """Folder of a run: ``<output_dir>/<name>``, relative paths taken from the current directory."""
    return Path(config.output_dir).expanduser() / config.name
