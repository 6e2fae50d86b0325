"""Entry point `report`: one self-contained page of a run, its reward curves as PNG files, and a summary on the terminal.

Whatever a run has not written is named as "not run"; a damaged line costs that line, never the report.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from writer_rl.configs.errors import InputError
from writer_rl.data.files import write_text_atomic
from writer_rl.trainer.cli import command_parser
from writer_rl.trainer.metrics import mask_secrets, read_jsonl, read_metrics, sample_files, sample_step
from writer_rl.trainer.progress import duration
from writer_rl.trainer.report_figures import (
    Curve,
    Drawing,
    Panel,
    interval_bars,
    line_panels,
    number,
    series,
    stacked_times,
)
from writer_rl.trainer.report_page import render_page

ARM_LABELS = {"s1_only": "Raw messages only", "base": "Base", "sft": "SFT", "rl": "SFT + RL", "reference": "Reference"}
STAGES = ("sft", "grpo", "evaluation")
PROMPT_TAIL_CHARS = 1800
NUM_SAMPLES = 6


@dataclass(frozen=True, slots=True)
class Measure:
    """A measured value with its interval, as an evaluation writes it (an object, or a bare number)."""

    mean: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def read(cls, value: Any) -> Measure | None:
        """Read tolerantly; None for anything without a finite mean."""
        if isinstance(value, Mapping):
            mean = number(value.get("mean"))
            return None if mean is None else cls(mean, number(value.get("low")), number(value.get("high")))
        mean = number(value)
        return None if mean is None else cls(mean)

    @property
    def excludes_zero(self) -> bool:
        """True when there is an interval and 0 lies outside it."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def text(self, digits: int = 3, *, sign: bool = False) -> str:
        """Mean and interval.

        Example:
            >>> Measure(0.25, 0.2, 0.3).text()
            '0.250 [0.200, 0.300]'
        """
        plus = "+" if sign else ""
        mean = f"{self.mean:{plus}.{digits}f}"
        if self.low is None or self.high is None:
            return mean
        return f"{mean} [{self.low:{plus}.{digits}f}, {self.high:{plus}.{digits}f}]"


@dataclass(frozen=True, slots=True)
class Column:
    """A metric of the result tables: its key, heading, and which way is better (+1 up, -1 down, 0 neither)."""

    key: str
    label: str
    better: int = 1
    digits: int = 3


HEADLINE = (
    Column("state_score", "State score"),
    Column("owner_error", "Wrong owner", -1),
    Column("source_error", "Wrong source", -1),
    Column("validity", "Valid outputs"),
    Column("qa", "Questions answered"),
)
DETAILS = (
    Column("phi", "Φ (records)"),
    Column("layer_error", "Wrong layer", -1),
    Column("update_precision", "UPDATE precision"),
    Column("update_recall", "UPDATE recall"),
    Column("qa_gain", "QA gain over raw"),
    Column("records_per_segment", "Records per segment", 0, 2),
)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run directory holds, read tolerantly."""

    directory: Path
    config: dict[str, Any]
    config_text: str
    sft_rows: list[dict[str, Any]]
    sft_summary: dict[str, Any]
    grpo_rows: list[dict[str, Any]]
    evaluation: dict[str, Any]
    questions: list[dict[str, Any]]
    sample_rows: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The run's name."""
        return str(self.config.get("name") or self.directory.resolve().name)


@dataclass(frozen=True, slots=True)
class ReportFiles:
    """What `write_report` wrote."""

    page: Path
    images: tuple[Path, ...]


def load_run(run_dir: Path) -> RunRecord:
    """Read a run directory.

    Raises:
        InputError: There is no such directory, or it holds nothing that a run writes.
    """
    if not run_dir.is_dir():
        raise InputError(str(run_dir), "is no directory", "name a run directory such as checkpoints/runs/demo")
    config_file = run_dir / "config.yaml"
    if not config_file.exists() and not any((run_dir / name).is_dir() for name in STAGES):
        raise InputError(
            str(run_dir), "holds no run", "name a directory that sft, grpo or evaluate wrote (with config.yaml)"
        )
    config, config_text = _read_config(config_file)
    files = sample_files(run_dir / "grpo")
    chosen = [files[0], files[len(files) // 2], files[-1]] if len(files) > 2 else files
    return RunRecord(
        directory=run_dir,
        config=config,
        config_text=config_text,
        sft_rows=read_metrics(run_dir / "sft" / "metrics.jsonl"),
        sft_summary=_read_object(run_dir / "sft" / "summary.json"),
        grpo_rows=read_metrics(run_dir / "grpo" / "metrics.jsonl"),
        evaluation=_read_object(run_dir / "evaluation" / "summary.json"),
        questions=read_jsonl(run_dir / "evaluation" / "questions.jsonl"),
        sample_rows={sample_step(file): read_jsonl(file) for file in chosen},
    )


def write_report(run_dir: Path) -> ReportFiles:
    """Write `report/index.html` and the PNG files of a run.

    Args:
        run_dir: A run directory.

    Returns:
        The files written.

    Raises:
        InputError: See `load_run`; or the report folder cannot be written.
    """
    run = load_run(run_dir)
    folder = run_dir / "report"
    sections = figure_sections(run)
    images = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.png"):
            old.unlink()
        for drawing in (drawing for _, drawings in sections.values() for drawing in drawings):
            image = folder / f"{drawing.name}.png"
            image.write_bytes(drawing.png)
            images.append(image)
    except OSError as error:
        raise InputError(
            str(folder), f"cannot be written ({error.strerror})", "make the run directory writable"
        ) from None
    page = folder / "index.html"
    write_text_atomic(page, render_page(page_content(run, sections)))
    return ReportFiles(page, tuple(images))


def figure_sections(run: RunRecord) -> dict[str, tuple[str, list[Drawing]]]:
    """The drawings of a run by section: section id to (heading, drawings); a section without any is kept, empty."""
    rows = run.grpo_rows
    grpo = run.config.get("grpo") if isinstance(run.config.get("grpo"), Mapping) else {}
    bound, guarded = number((grpo or {}).get("kl_guard_nats")), (grpo or {}).get("kl_guard")

    def guard(kind: str) -> dict[str, Any]:
        return {"level": bound, "level_label": "guard"} if bound is not None and guarded == kind else {}

    over = "Line: mean over trajectories; band: ± 1 standard deviation over trajectories."

    def panel(title: str, *curves: Curve, **options: Any) -> Panel:
        return Panel(title, curves, **options)

    rewards = [
        line_panels(
            "reward_return",
            "Return",
            f"Return of a segment, all terms together. {over}",
            rows,
            [panel("return", Curve("reward/return_mean", "return", "reward/return_std"))],
        ),
        line_panels(
            "reward_components",
            "Reward components",
            f"Every term of the return before weighting. {over} Penalties are negative.",
            rows,
            [
                panel(label, Curve(f"reward/{key}_mean", label, f"reward/{key}_std"))
                for key, label in (
                    ("memory", "memory reward"),
                    ("phi", "Φ: records"),
                    ("chain", "update chain"),
                    ("qa_gain", "QA gain"),
                    ("valid", "validity"),
                    ("penalty", "penalty"),
                    ("json", "valid JSON"),
                    ("schema", "schema"),
                    ("dup", "no duplicates"),
                    ("stop", "stops in time"),
                )
            ],
        ),
        line_panels(
            "heldout_memory",
            "Held-out probe",
            "Memory reward on held-out dialogues, greedy decoding; band: ± 1 standard deviation over dialogues.",
            rows,
            [
                panel(
                    "memory reward of the final memory", Curve("heldout/memory_mean", "held-out", "heldout/memory_std")
                ),
                panel("valid outputs (share)", Curve("heldout/valid_frac", "valid"), zero=True),
            ],
        ),
        line_panels(
            "groups",
            "Learning signal",
            "Groups whose returns are all alike give no gradient; the rest is trained.",
            rows,
            [
                panel("groups without spread (share)", Curve("group/zero_variance_frac", "share"), zero=True),
                panel("trained completions", Curve("group/num_trained_samples", "completions"), zero=True),
                panel("failed trajectories", Curve("group/failed_trajectories", "failed"), zero=True),
            ],
        ),
    ]
    policy = [
        line_panels(
            "policy_kl",
            "Distance of the policy",
            "KL divergence in nats per token: to the SFT policy, and to the policy that sampled.",
            rows,
            [
                panel("KL to the SFT reference", Curve("policy/kl_ref_nats", "KL"), unit="nats", **guard("reference")),
                panel(
                    "KL to the old policy",
                    Curve("policy/kl_old_nats", "mean of the steps"),
                    Curve("policy/kl_old_last_nats", "last step"),
                    unit="nats",
                    **guard("old"),
                ),
            ],
        ),
        line_panels(
            "policy_clip",
            "Clipping",
            "Share of trained tokens outside the clip range, and the mean ratio of new to old policy (1 = unchanged).",
            rows,
            [
                panel(
                    "clipped tokens (share)",
                    Curve("policy/clip_low_frac", "below"),
                    Curve("policy/clip_high_frac", "above"),
                    zero=True,
                ),
                panel("ratio to the old policy", Curve("policy/ratio_mean", "ratio"), level=1.0),
            ],
        ),
        line_panels(
            "sampler",
            "Sampler against learner",
            "How far the sampler's log-probabilities lie from the learner's for the same tokens.",
            rows,
            [
                panel(
                    "mismatch",
                    Curve("sampler/mismatch_kl_nats", "KL"),
                    Curve("sampler/mismatch_abs_nats", "mean |difference|"),
                    unit="nats",
                ),
                panel("ratio learner / sampler", Curve("sampler/ratio_mean", "ratio"), level=1.0),
            ],
        ),
        line_panels(
            "optimiser",
            "Optimiser",
            "Gradient norm before clipping, loss, learning rate, and steps left out by the KL guard.",
            rows,
            [
                panel("gradient norm", Curve("policy/grad_norm", "norm"), zero=True),
                panel("loss", Curve("policy/loss", "loss")),
                panel("learning rate", Curve("policy/learning_rate", "rate"), zero=True),
                panel("skipped optimiser steps", Curve("policy/skipped_steps", "skipped"), zero=True),
            ],
        ),
        line_panels(
            "completions",
            "Completions",
            "Sampled tokens per completion, completions that hit the token limit, and valid action lists.",
            rows,
            [
                panel("tokens per completion", Curve("completion/tokens_mean", "tokens"), zero=True),
                panel("cut at the limit (share)", Curve("completion/truncated_frac", "share"), zero=True),
                panel("valid action lists (share)", Curve("completion/valid_frac", "share"), zero=True),
            ],
        ),
    ]
    speed = [
        stacked_times(
            "time",
            "Time per update",
            "Seconds of each update by stage.",
            rows,
            [
                Curve(f"time/{key}_s", label)
                for key, label in (
                    ("rollout", "rollouts"),
                    ("reward", "rewards"),
                    ("learn", "learning"),
                    ("sync", "sync"),
                )
            ],
            "time/update_s",
        ),
        line_panels(
            "throughput",
            "Throughput",
            "Tokens per second: sampled in rollouts, and passed through the learner.",
            rows,
            [
                panel("rollout tokens per second", Curve("throughput/rollout_tokens_per_s", "rollout"), zero=True),
                panel("learner tokens per second", Curve("throughput/learn_tokens_per_s", "learn"), zero=True),
            ],
        ),
    ]
    sft = [
        line_panels(
            "sft_loss",
            "Loss",
            "Cross-entropy per completion token, in nats; validation on dialogues that were set aside.",
            run.sft_rows,
            [panel("SFT loss", Curve("loss", "training"), Curve("eval_loss", "validation"), unit="nats", zero=True)],
            x_label="step",
        ),
        line_panels(
            "sft_schedule",
            "Validity and learning rate",
            "Greedy completions on the validation dialogues: valid action lists, and word for word the reference; and the schedule.",
            run.sft_rows,
            [
                panel(
                    "greedy outputs (share)",
                    Curve("eval_valid_frac", "valid"),
                    Curve("eval_exact_frac", "exact"),
                    zero=True,
                ),
                panel("learning rate", Curve("learning_rate", "rate"), zero=True),
            ],
            x_label="step",
        ),
    ]
    arms = _arms(run.evaluation)
    evaluation = [
        interval_bars(
            "evaluation_state",
            "State score",
            "Agreement with the reference memory after the last segment, with 95 % intervals over dialogues.",
            [("state score", _intervals({_label(arm): values.get("state_score") for arm, values in arms.items()}))],
            "state score",
        ),
        interval_bars(
            "evaluation_owners",
            "Score per kind of owner",
            "F1 of the records that belong to persons and to the group, with 95 % intervals.",
            [
                (_label(arm), _intervals(values["per_owner_kind"]))
                for arm, values in arms.items()
                if isinstance(values.get("per_owner_kind"), Mapping)
            ],
            "record F1",
        ),
    ]
    return {
        name: (heading, [drawing for drawing in drawings if drawing])
        for name, heading, drawings in (
            ("evaluation", "Evaluation", evaluation),
            ("rewards", "Reward curves", rewards),
            ("policy", "Policy and sampler", policy),
            ("speed", "Time and throughput", speed),
            ("sft", "Supervised fine-tuning", sft),
        )
    }


def page_content(run: RunRecord, sections: Mapping[str, tuple[str, list[Drawing]]]) -> dict[str, Any]:
    """Everything the page template prints, as plain text and numbers (the template escapes it)."""
    return {
        "name": run.name,
        "made_at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "facts": _facts(run),
        "status": _status(run),
        "headline": result_table(run.evaluation, HEADLINE),
        "details": result_table(run.evaluation, DETAILS),
        "verdict": verdict(run.evaluation),
        "differences": difference_table(run.evaluation),
        "failures": _failure_table(run.questions),
        "budget": _flat(run.evaluation.get("budget")),
        "sections": sections,
        "sft_summary": _flat(run.sft_summary),
        "samples": chosen_samples(run.sample_rows),
        "config_text": run.config_text,
    }


def result_table(evaluation: Mapping[str, Any], columns: Sequence[Column]) -> dict[str, Any] | None:
    """Arms by metrics; columns that no arm measured are left out. None without any arm.

    Returns:
        ``{"columns": [(label, better)], "rows": [{"arm", "num_dialogues", "cells": [(mean, interval)]}]}``, all cells text.
    """
    arms = _arms(evaluation)
    used = [column for column in columns if any(Measure.read(values.get(column.key)) for values in arms.values())]
    if not used:
        return None
    rows = []
    for arm, values in arms.items():
        measures = [(Measure.read(values.get(column.key)), column) for column in used]
        cells = [
            tuple((measure.text(column.digits) if measure else "–").partition(" ")[::2]) for measure, column in measures
        ]
        rows.append({"arm": _label(arm), "num_dialogues": values.get("num_dialogues", "–"), "cells": cells})
    return {"columns": [(column.label, column.better) for column in used], "rows": rows}


def difference_table(evaluation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Paired differences between arms: ``{"pair", "metric", "text", "excludes_zero", "num_dialogues"}`` each.

    `excludes_zero` is True when the 95 % interval leaves out 0.
    """
    labels = {column.key: column.label for column in (*HEADLINE, *DETAILS)}
    found = evaluation.get("differences")
    rows = []
    for item in found if isinstance(found, list) else []:
        measure = Measure.read(item)
        if measure is None or not isinstance(item, Mapping):
            continue
        rows.append(
            {
                "pair": f"{_label(item.get('a'))} − {_label(item.get('b'))}",
                "metric": labels.get(str(item.get("metric")), str(item.get("metric"))),
                "text": measure.text(sign=True),
                "excludes_zero": measure.excludes_zero,
                "num_dialogues": item.get("num_dialogues", "–"),
            }
        )
    return rows


def verdict(evaluation: Mapping[str, Any]) -> str:
    """One sentence on what reinforcement learning changed in the state score, with its interval; empty when not measured."""
    found = evaluation.get("differences")
    for item in found if isinstance(found, list) else []:
        if (
            not isinstance(item, Mapping)
            or item.get("metric") != "state_score"
            or {item.get("a"), item.get("b")} != {"rl", "sft"}
        ):
            continue
        measure = Measure.read(item)
        if measure is None or measure.low is None or measure.high is None:
            continue
        if item.get("a") == "sft":
            measure = Measure(-measure.mean, -measure.high, -measure.low)
        if not measure.excludes_zero:
            reading = "around 0: no difference can be claimed"
        elif measure.mean > 0:
            reading = "above 0: RL improved the memory"
        else:
            reading = "below 0: RL made the memory worse"
        return (
            f"RL − SFT, state score, paired over {item.get('num_dialogues', '?')} held-out dialogues: "
            f"{measure.mean:+.3f}, 95 % interval [{measure.low:+.3f}, {measure.high:+.3f}], {reading}."
        )
    return ""


def chosen_samples(sample_rows: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A few trajectories steps to read: per chosen update the row with the highest and the one with the lowest return."""
    chosen: list[dict[str, Any]] = []
    for step in sorted(sample_rows):
        ranked = sorted(
            (row for row in sample_rows[step] if number(row.get("return")) is not None),
            key=lambda row: float(row["return"]),
        ) or list(sample_rows[step])
        for row in ranked[-1:] + (ranked[:1] if len(ranked) > 1 else []):
            prompt = _prompt_text(row.get("prompt"))
            rewards = row.get("rewards")
            errors = row.get("errors")
            chosen.append(
                {
                    "step": step,
                    "dialogue_id": _text(row.get("dialogue_id")),
                    "trajectory_index": _text(row.get("trajectory_index")),
                    "segment_index": _text(row.get("segment_index")),
                    "return": _short(row.get("return")),
                    "advantage": _short(row.get("advantage")),
                    "rewards": [(str(k), _short(v)) for k, v in rewards.items()]
                    if isinstance(rewards, Mapping)
                    else [],
                    "errors": [_error_text(error) for error in errors] if isinstance(errors, list) else [],
                    "prompt": ("… " if len(prompt) > PROMPT_TAIL_CHARS else "") + prompt[-PROMPT_TAIL_CHARS:],
                    "completion": _actions_text(row.get("completion")),
                    "reference": _actions_text(row.get("reference")),
                }
            )
    return chosen[-NUM_SAMPLES:]


def _arms(evaluation: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    arms = evaluation.get("arms")
    if not isinstance(arms, Mapping):
        return {}
    known = [arm for arm in ARM_LABELS if arm in arms]
    ordered = known + [arm for arm in arms if arm not in known]
    return {str(arm): arms[arm] for arm in ordered if isinstance(arms[arm], Mapping)}


def _label(arm: Any) -> str:
    return ARM_LABELS.get(str(arm), str(arm))


def _intervals(values: Mapping[str, Any]) -> list[tuple[str, float, float | None, float | None]]:
    measures = {str(label): Measure.read(value) for label, value in values.items()}
    return [(label, m.mean, m.low, m.high) for label, m in measures.items() if m is not None]


def _failure_table(questions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where wrong answers went wrong, per arm, from rows with ``arm`` and ``failure``."""
    counts: dict[str, Counter[str]] = {}
    totals: Counter[str] = Counter()
    for row in questions:
        arm = str(row.get("arm", "?"))
        totals[arm] += 1
        if isinstance(row.get("failure"), str) and row["failure"]:
            counts.setdefault(arm, Counter())[row["failure"]] += 1
    return [
        {
            "arm": _label(arm),
            "questions": totals[arm],
            **{kind: found[kind] for kind in ("formation", "retrieval", "answer")},
            "other": sum(found.values()) - sum(found[kind] for kind in ("formation", "retrieval", "answer")),
        }
        for arm, found in counts.items()
    ]


def _facts(run: RunRecord) -> list[tuple[str, str]]:
    config = run.config

    def value(*path: str) -> Any:
        found: Any = config
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    rows = run.grpo_rows
    spent = max((number(row.get("time_s")) or 0.0 for row in rows), default=0.0)
    skipped = sum(series(rows, "policy/skipped_steps")[1])
    broken = sum(series(rows, "metrics/num_nonfinite")[1])
    facts = [
        ("base model", value("model", "path")),
        ("rules", value("reward", "rules")),
        ("seed", value("seed")),
        ("SFT steps", max((row["step"] for row in run.sft_rows), default=None)),
        ("GRPO updates", max((row["step"] for row in rows), default=None)),
        ("group size", value("grpo", "group_size")),
        ("GRPO time", duration(spent) if spent else None),
        ("skipped optimiser steps", f"{skipped:g}" if series(rows, "policy/skipped_steps")[1] else None),
        ("values that were not finite", f"{broken:g}" if broken else None),
    ]
    return [(label, str(found)) for label, found in facts if found not in (None, "")]


def _status(run: RunRecord) -> list[tuple[str, bool]]:
    return [
        ("SFT", bool(run.sft_rows or run.sft_summary)),
        ("GRPO", bool(run.grpo_rows)),
        ("evaluation", bool(_arms(run.evaluation))),
    ]


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as (dotted name, text) pairs."""
    if not isinstance(value, Mapping):
        return []
    pairs: list[tuple[str, str]] = []
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping):
            pairs += _flat(item, f"{name}.")
        else:
            pairs.append((name, f"{item:.4g}" if isinstance(item, float) else _text(item)))
    return pairs


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _short(value: Any) -> str:
    found = number(value)
    return "–" if found is None else f"{found:.3f}"


def _prompt_text(value: Any) -> str:
    """A prompt as one text: a string, or chat messages one below the other."""
    if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
        return "\n\n".join(f"[{item.get('role', '')}]\n{item.get('content', '')}" for item in value)
    return value if isinstance(value, str) else ("" if value is None else _text(value))


def _error_text(value: Any) -> str:
    """An action error as a line: text as it is, an object by its code and message."""
    if isinstance(value, Mapping) and ("code" in value or "message" in value):
        where = "" if value.get("index") is None else f"action {value['index']}: "
        return f"{where}{value.get('code', '')} {value.get('message', '')}".strip()
    return _text(value)


def _actions_text(value: Any) -> str:
    """An action list one action a line; whatever is no action list is shown as it is."""
    parsed = value
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return value
    items = parsed.get("actions") if isinstance(parsed, Mapping) else parsed
    if not isinstance(items, list) or (isinstance(parsed, Mapping) and len(parsed) > 1):
        return _text(value) if value is not None else ""
    return "\n".join(json.dumps(item, ensure_ascii=False, default=str) for item in items) if items else "[]"


def _read_config(path: Path) -> tuple[dict[str, Any], str]:
    """The resolved configuration and its text with masked secrets; empty when there is none that can be read."""
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}, ""
    if not isinstance(value, dict):
        return {}, ""
    masked = mask_secrets(value)
    return masked, yaml.safe_dump(masked, sort_keys=False, allow_unicode=True)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def print_summary(run: RunRecord, files: ReportFiles, out: Console | None = None) -> None:
    """The result tables and the paths, on standard output."""
    out = out or Console(highlight=False)
    table = result_table(run.evaluation, HEADLINE)
    if table:
        view = Table(title=escape(f"{run.name}: held-out evaluation"), title_justify="left", box=SIMPLE_HEAD)
        view.add_column("arm", no_wrap=True)
        for label, better in table["columns"]:
            view.add_column(label + {1: " ↑", -1: " ↓", 0: ""}[better], justify="right")
        for row in table["rows"]:
            view.add_row(
                escape(row["arm"]), *(" ".join(cell) if out.width >= 120 else cell[0] for cell in row["cells"])
            )
        out.print(view)
        if line := verdict(run.evaluation):
            out.print(line, markup=False)
    _, returns = series(run.grpo_rows, "reward/return_mean")
    if returns:
        width = max(1, math.ceil(len(returns) * 0.2))
        first, last = sum(returns[:width]) / width, sum(returns[-width:]) / width
        out.print(
            f"GRPO return over {len(returns)} updates: {first:.3f} (first fifth) → {last:.3f} (last fifth)",
            markup=False,
        )
    for name, done in _status(run):
        if not done:
            out.print(f"{name}: not run", markup=False)
    out.print(f"report  {files.page}", markup=False, soft_wrap=True)
    out.print(f"images  {files.page.parent} ({len(files.images)} PNG files)", markup=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `report RUN_DIR`.

    Args:
        argv: Arguments after the command's name.

    Returns:
        0 when the page was written.
    """
    parser = command_parser(
        "report",
        "Draw the reward curves and result tables of a run as one self-contained HTML page and PNG files.",
        "example:\n  writer-rl report checkpoints/runs/demo",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a run directory: <output_dir>/<name>")
    run_dir = Path(parser.parse_args(argv).run_dir)
    files = write_report(run_dir)
    print_summary(load_run(run_dir), files)
    return 0
