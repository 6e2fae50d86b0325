"""Held-out evaluation of every arm under one budget: S1-only, base, SFT, RL, and the reference memory itself.

All Writers read the same prompts, decode with the same settings and are judged by the same frozen reader on the same questions;
what differs is the policy alone. Differences are paired over dialogues, with bootstrap intervals.

Source: specification §7.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from writer_rl.configs.errors import InputError
from writer_rl.configs.load import dump_resolved
from writer_rl.configs.schema import RunConfig
from writer_rl.data.actions import GROUP
from writer_rl.data.embedding import make_embedder
from writer_rl.data.files import write_json, write_text_atomic
from writer_rl.data.memory import MemoryState, Record
from writer_rl.rewards.qa_gain import QaScorer, QuestionResult
from writer_rl.rewards.similarity import GATE, similarity
from writer_rl.rewards.update_chain import memory_reward
from writer_rl.rollouts.collect import Trajectory, collect_groups
from writer_rl.rollouts.generator import Generator, PolicyWeights, SamplingSpec
from writer_rl.rollouts.prompt_tokens import PromptEncoder
from writer_rl.trainer.base_model import load_tokenizer, prepare_base_model
from writer_rl.trainer.checkpoint import latest_checkpoint
from writer_rl.trainer.cli import config_parser, parse_config, run_dir
from writer_rl.trainer.data_sets import Example, load_examples
from writer_rl.trainer.generators import make_generator
from writer_rl.trainer.grpo import make_environments
from writer_rl.trainer.policy import merge_adapter
from writer_rl.trainer.progress import progress, say, stage

METRICS = {
    "state_score": "state score (R_mem of the final memory)",
    "phi": "SpeakerLevenshtein of the final memory",
    "owner_error": "wrong owner among content-matched records",
    "source_error": "wrong source among content-matched records",
    "layer_error": "wrong layer among content-matched records",
    "validity": "share of valid completions",
    "qa": "QA (token-F1) with S1 + S2",
    "qa_gain": "QA minus S1-only",
    "update_precision": "UPDATEs that match a reference UPDATE",
    "update_recall": "reference UPDATEs that were made",
    "records_per_segment": "records written per segment",
}  # fmt: skip


def coordinate_errors(predicted: Sequence[Record], reference: Sequence[Record]) -> dict[str, tuple[int, int]]:
    """(wrong, matched) of owner, source and layer among records matched by content alone.

    Contents are matched one to one, best pairs first, from similarity 0.50 upward; coordinates play no part in the matching.

    Example:
        "Ana lives in Leeds" filed under Ben, everything else right: owner (1, 1), source (0, 1), layer (0, 1).
    """
    pairs = sorted(
        (
            (-similarity(p.content, r.content, "fixed"), i, j)
            for i, p in enumerate(predicted)
            for j, r in enumerate(reference)
        )
    )
    used_i: set[int] = set()
    used_j: set[int] = set()
    wrong = {"owner": 0, "source": 0, "layer": 0}
    matched = 0
    for value, i, j in pairs:
        if -value < GATE:
            break
        if i in used_i or j in used_j:
            continue
        used_i.add(i)
        used_j.add(j)
        matched += 1
        for key in wrong:
            wrong[key] += getattr(predicted[i], key) != getattr(reference[j], key)
    return {key: (count, matched) for key, count in wrong.items()}


def update_counts(predicted: MemoryState, reference: MemoryState) -> tuple[int, int, int]:
    """(matching, predicted, reference) UPDATE edges; an edge matches if owner agrees and both ends are similar (0.50)."""

    def edges(memory: MemoryState) -> list[tuple[Record, Record]]:
        found = []
        for old_id, new_id in memory.update_edges():
            old, new = memory.find(old_id), memory.find(new_id)
            assert old is not None
            assert new is not None
            found.append((old, new))
        return found

    ours, theirs = edges(predicted), edges(reference)
    free = list(theirs)
    matching = 0
    for old, new in ours:
        hit = next(
            (
                edge for edge in free
                if edge[0].owner == old.owner and similarity(old.content, edge[0].content, "fixed") >= GATE
                and similarity(new.content, edge[1].content, "fixed") >= GATE
            ),
            None,
        )  # fmt: skip
        if hit is not None:
            free.remove(hit)
            matching += 1
    return matching, len(ours), len(theirs)


@dataclass(frozen=True, slots=True)
class DialogueResult:
    """One arm on one dialogue. `values` may lack a metric that this dialogue cannot measure (a rate over nothing)."""

    arm: str
    dialogue_id: str
    values: Mapping[str, float]
    owners: Mapping[str, float]
    questions: tuple[QuestionResult, ...]


def measure_dialogue(
    arm: str, example: Example, memory: MemoryState | None, trajectory: Trajectory | None, qa: QaScorer
) -> DialogueResult:
    """All metrics of one arm on one dialogue; `memory` None is the S1-only arm."""
    answers = qa.answer_questions(example.dialogue, memory)
    baseline = qa.answer_questions(example.dialogue, None)
    both = [
        (with_memory.score, without.score) for with_memory, without in zip(answers, baseline, strict=True)
        if with_memory.score is not None and without.score is not None
    ]  # fmt: skip
    values: dict[str, float] = {}
    owners: dict[str, float] = {}
    if both:
        values["qa"] = sum(a for a, _ in both) / len(both)
        values["qa_gain"] = sum(a - b for a, b in both) / len(both)
    if memory is not None:
        truth = example.references[-1]
        reward = memory_reward(memory.records, truth.records, "fixed")
        values["state_score"], values["phi"] = reward.memory, reward.phi
        owners = {("GROUP" if owner == GROUP else "person"): 0.0 for owner in reward.buckets}
        for kind in owners:
            scores = [v for owner, v in reward.buckets.items() if (owner == GROUP) == (kind == "GROUP")]
            owners[kind] = sum(scores) / len(scores)
        for key, (wrong, matched) in coordinate_errors(memory.records, truth.records).items():
            if matched:
                values[f"{key}_error"] = wrong / matched
        matching, ours, theirs = update_counts(memory, truth)
        if ours:
            values["update_precision"] = matching / ours
        if theirs:
            values["update_recall"] = matching / theirs
        values["records_per_segment"] = len(memory.records) / len(example.steps)
    if trajectory is not None and trajectory.steps:
        values["validity"] = sum(step.report.valid for step in trajectory.steps) / len(trajectory.steps)
    return DialogueResult(arm, example.dialogue.dialogue_id, values, owners, tuple(answers))


def bootstrap_interval(values: Sequence[float], draws: int, seed: int) -> dict[str, float]:
    """Mean over dialogues with its 95 % percentile bootstrap interval.

    Args:
        values: One number per dialogue, at least one.
        draws: Bootstrap draws.
        seed: Seeds the draws.

    Example:
        [1, 1, 1] gives mean 1 and interval [1, 1].
    """
    array_N = np.asarray(values, np.float64)
    picks_DN = np.random.default_rng(seed).integers(0, len(array_N), (draws, len(array_N)))
    low, high = np.quantile(array_N[picks_DN].mean(1), [0.025, 0.975])
    return {"mean": float(array_N.mean()), "low": float(low), "high": float(high)}


def summarise(results: Sequence[DialogueResult], config: RunConfig) -> dict[str, Any]:
    """Means per arm and paired differences between arms, each with a 95 % interval over dialogues."""
    arms: dict[str, dict[str, DialogueResult]] = {}
    for result in results:
        arms.setdefault(result.arm, {})[result.dialogue_id] = result
    draws, seed = config.evaluation.bootstrap_draws, config.seed
    summary: dict[str, Any] = {"arms": {}, "differences": []}
    for arm, by_id in arms.items():
        entry: dict[str, Any] = {"num_dialogues": len(by_id)}
        for metric in METRICS:
            values = [r.values[metric] for r in by_id.values() if metric in r.values]
            if values:
                entry[metric] = bootstrap_interval(values, draws, seed) | {"num_dialogues": len(values)}
        for kind in ("person", "GROUP"):
            values = [r.owners[kind] for r in by_id.values() if kind in r.owners]
            if values:
                entry.setdefault("per_owner_kind", {})[kind] = bootstrap_interval(values, draws, seed)
        summary["arms"][arm] = entry
    for a, b in (
        ("rl", "sft"),
        ("sft", "base"),
        ("rl", "base"),
        ("reference", "rl"),
        ("rl", "s1_only"),
        ("sft", "s1_only"),
    ):
        if a not in arms or b not in arms:
            continue
        for metric in METRICS:
            pairs = [
                arms[a][i].values[metric] - arms[b][i].values[metric]
                for i in arms[a] if i in arms[b] and metric in arms[a][i].values and metric in arms[b][i].values
            ]  # fmt: skip
            if pairs:
                interval = bootstrap_interval(pairs, draws, seed)
                summary["differences"].append(
                    {"a": a, "b": b, "metric": metric, **interval, "num_dialogues": len(pairs)}
                )
    summary["budget"] = json.loads(config.reward.qa.model_dump_json())
    summary["settings"] = json.loads(config.evaluation.model_dump_json())
    summary["metrics"] = METRICS
    return summary


def _arm_weights(config: RunConfig, directory: Path) -> dict[str, Callable[[], Path]]:
    """Where the weights of each Writer arm are, or how to make them."""
    base = prepare_base_model(config.model.path)
    sft = directory / "sft" / "merged"

    def rl() -> Path:
        checkpoint = latest_checkpoint(directory / "grpo" / "checkpoints")
        if checkpoint is None:
            raise InputError(
                str(directory / "grpo"), "holds no whole checkpoint", "run `grpo` first, or leave out the arm rl"
            )
        from safetensors.torch import load_file

        adapter = load_file(checkpoint / "adapter" / "adapter_model.safetensors")
        return merge_adapter(sft, adapter, directory / "grpo" / "merged", alpha=config.model.lora.alpha)

    def sft_dir() -> Path:
        if not sft.is_dir():
            raise InputError(str(sft), "does not exist", "run `sft` first, or leave out the arm sft")
        return sft

    return {"base": lambda: base, "sft": sft_dir, "rl": rl}


def run_evaluation(config: RunConfig, directory: Path, *, generator: Generator | None = None) -> dict[str, Any]:
    """Evaluate the configured arms and write `evaluation/` (summary.json, dialogues.jsonl, questions.jsonl).

    Raises:
        InputError: An arm's weights are missing.
    """
    embedder = make_embedder(config.contract.embedder)
    base_dir = prepare_base_model(config.model.path)
    encoder = PromptEncoder(load_tokenizer(base_dir))
    examples = load_examples(config, "heldout", embedder)
    if config.evaluation.num_dialogues:
        examples = examples[: config.evaluation.num_dialogues]
    environments = make_environments(examples, config, encoder, embedder)
    qa = QaScorer(config.reward.qa, embedder)
    weights = {arm: find for arm, find in _arm_weights(config, directory).items() if arm in config.evaluation.arms}
    paths = {arm: find() for arm, find in weights.items()}
    spec = SamplingSpec(config.evaluation.temperature, 1.0 if config.evaluation.temperature == 0 else config.sampler.top_p,
                        config.evaluation.max_new_tokens or config.sampler.max_new_tokens)  # fmt: skip
    results: list[DialogueResult] = []
    with ExitStack() as stack:
        if generator is None and paths:
            generator = stack.enter_context(make_generator(config, base_dir, merged_only=True))
        for version, arm in enumerate(config.evaluation.arms, start=1_000_000):
            if arm == "s1_only":
                results += [measure_dialogue(arm, example, None, None, qa) for example in examples]
                continue
            if arm == "reference":
                results += [measure_dialogue(arm, e, e.references[-1], None, qa) for e in examples]
                continue
            assert generator is not None
            generator.load_policy(PolicyWeights(version, "merged", paths[arm]))
            num_steps = sum(len(environment.segments) for environment in environments)
            with progress(f"evaluate {arm}", num_steps) as bar:
                groups = collect_groups(
                    environments, generator, spec, group_size=1, seed=config.seed,
                    max_prompt_tokens=config.contract.max_prompt_tokens, constrain=config.sampler.constrained,
                    on_step=lambda _step, bar=bar: bar.advance(),  # type: ignore[misc]
                )  # fmt: skip
            for group, example in zip(groups, examples, strict=True):
                trajectory = group.trajectories[0]
                if trajectory.final_memory is None:
                    say(f"{arm}: {group.dialogue_id} failed ({trajectory.failure}); it is left out of this arm")
                    continue
                results.append(measure_dialogue(arm, example, trajectory.final_memory, trajectory, qa))
    summary = summarise(results, config)
    output = directory / "evaluation"
    write_json(output / "summary.json", summary)
    _write_lines(output / "dialogues.jsonl", [
        {"arm": r.arm, "dialogue_id": r.dialogue_id, **r.values, "owners": dict(r.owners)} for r in results
    ])  # fmt: skip
    _write_lines(output / "questions.jsonl", [
        {
            "arm": r.arm, "dialogue_id": r.dialogue_id, "question_id": q.question_id, "category": q.category,
            "question": q.question, "gold": q.gold, "answer": q.answer, "score": q.score, "evidence": q.evidence,
        }
        for r in results for q in r.questions
    ])  # fmt: skip
    return summary


def _write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    write_text_atomic(path, "".join(json.dumps(row, ensure_ascii=False, default=list) + "\n" for row in rows))


def print_summary(summary: Mapping[str, Any], console: Console | None = None) -> None:
    """The result table and the paired differences on the terminal."""
    console = console or Console()
    shown = ("state_score", "owner_error", "source_error", "validity", "qa")
    table = Table(title="held-out dialogues, one budget (mean and 95 % interval)", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("arm", no_wrap=True)
    for metric in shown:
        table.add_column(metric.replace("_", " "), justify="right", no_wrap=True)
    for arm, entry in summary["arms"].items():
        cells = [
            f"{entry[m]['mean']:.3f}\n{entry[m]['low']:.2f}–{entry[m]['high']:.2f}" if m in entry else "–"
            for m in shown
        ]
        table.add_row(arm, *cells)
    console.print(table)
    differences = Table(title="paired differences over dialogues", box=box.SIMPLE_HEAD)
    for column in ("", "metric", "difference", "95 % interval", "dialogues"):
        differences.add_column(column)
    for row in summary["differences"]:
        if row["metric"] in ("state_score", "qa", "owner_error") and (row["a"], row["b"]) in (
            ("rl", "sft"),
            ("sft", "base"),
        ):
            interval = f"[{row['low']:+.3f}, {row['high']:+.3f}]"
            clear = "" if row["low"] <= 0 <= row["high"] else " *"
            differences.add_row(
                f"{row['a']} − {row['b']}",
                row["metric"],
                f"{row['mean']:+.3f}{clear}",
                interval,
                str(row["num_dialogues"]),
            )
    console.print(differences)
    console.print("* the interval excludes 0")


def main(argv: list[str]) -> int:
    """Entry point of `evaluate`."""
    parser = config_parser("evaluate", "Compare S1-only, base, SFT, RL and reference on held-out dialogues under one budget.",
                           "example: ./launch.sh evaluate demo 'evaluation.arms=[s1_only,sft,rl]'")  # fmt: skip
    config = parse_config(parser.parse_args(argv))
    directory = run_dir(config)
    # Beside the results, not over the configuration that the run was trained with.
    dump_resolved(config, directory / "evaluation")
    with stage("evaluate"):
        summary = run_evaluation(config, directory)
    print_summary(summary)
    print(f"saved: {directory / 'evaluation'}")
    return 0 if all(math.isfinite(e.get("qa", {}).get("mean", 0.0)) for e in summary["arms"].values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
