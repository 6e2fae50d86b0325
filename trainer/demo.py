"""The whole job on a small model: simulate → SFT → GRPO → evaluate → export → report, with the time each stage took."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from writer_rl.configs.load import dump_resolved
from writer_rl.configs.schema import RunConfig
from writer_rl.data.files import write_json
from writer_rl.trainer.cli import config_parser, parse_config, run_dir
from writer_rl.trainer.progress import duration, say, stage


class _Stages:
    """Runs stages in order and keeps their times."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        started = time.monotonic()
        with stage(name):
            result = work()
        self.seconds[name] = time.monotonic() - started
        return result


def run_demo(config: RunConfig, directory: Path) -> dict[str, Any]:
    """All stages; returns the evaluation summary.

    A stage whose result is whole already is not repeated, so a demo that was interrupted goes on where it stopped.
    """
    from writer_rl.trainer.base_model import prepare_base_model
    from writer_rl.trainer.data_sets import load_examples
    from writer_rl.trainer.evaluate import run_evaluation
    from writer_rl.trainer.export import export_run
    from writer_rl.trainer.generators import make_generator
    from writer_rl.trainer.grpo import run_grpo
    from writer_rl.trainer.report import write_report
    from writer_rl.trainer.sft import run_sft

    stages = _Stages()
    stages("prepare the model", lambda: prepare_base_model(config.model.path))
    examples = stages("simulate chats", lambda: load_examples(config, "train"))
    if (directory / "sft" / "summary.json").is_file():
        say("SFT is done already; delete the run folder to repeat it")
    else:
        stages("SFT", lambda: run_sft(config, directory, examples))
    # On the SFT model, as in `grpo`: adapters of the policy belong to it, not to the model it was trained from.
    generator = stages("start the sampler", lambda: make_generator(config, directory / "sft" / "merged"))
    try:
        stages("GRPO", lambda: run_grpo(config, directory, generator=generator, examples=examples))
        summary: dict[str, Any] = stages("evaluate", lambda: run_evaluation(config, directory, generator=generator))
    finally:
        generator.close()
    stages("export", lambda: export_run(directory))
    write_json(directory / "stages.json", stages.seconds)
    stages("report", lambda: write_report(directory))
    write_json(directory / "stages.json", stages.seconds)
    return summary


def main(argv: list[str]) -> int:
    """Entry point of `demo`."""
    parser = config_parser("demo", "The whole job on the packaged small model, CPU enough: simulate, SFT, GRPO, evaluate, export, report.",
                           "example: ./launch.sh demo --quick", default="demo")  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help="walk the same stages in a few minutes; too short to learn anything"
    )
    args = parser.parse_args(argv)
    if args.quick and not any("=" not in word for word in args.words):
        args.words = ["demo-quick", *args.words]
    config = parse_config(args)
    directory = run_dir(config)
    dump_resolved(config, directory)
    from writer_rl.trainer.evaluate import print_summary
    from writer_rl.trainer.report import verdict

    started = time.monotonic()
    summary = run_demo(config, directory)
    console = Console()
    print_summary(summary, console)
    times = Table(title="time per stage")
    times.add_column("stage")
    times.add_column("time", justify="right")
    for name, seconds in json.loads((directory / "stages.json").read_text(encoding="utf-8")).items():
        times.add_row(name, duration(seconds))
    times.add_row("total", duration(time.monotonic() - started))
    console.print(times)
    print(f"learned:    {verdict(summary)}" + ("  (--quick is too short to learn.)" if args.quick else ""))
    print(f"checkpoint: {directory / 'export'}")
    print(f"report:     {directory / 'report' / 'index.html'}")
    print(f"run:        {directory}")
    return 0
