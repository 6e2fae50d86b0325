"""Ratios of ours against a named alternative on the same work, in one run on one machine. Never a test.

`rewards`: the memory reward with its caches against the same sums with plain difflib and no cache.
`learner`: forward and backward with shared prompt starts against whole rows with full-vocabulary logits.
`rollout`: vLLM against `transformers` generation, same model, prompts and token counts.
`sync`: what it costs to carry one policy version to the sampler.
"""

from __future__ import annotations

import difflib
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from writer_rl.configs.errors import InputError
from writer_rl.configs.load import load_config
from writer_rl.configs.schema import RunConfig
from writer_rl.data.files import write_json
from writer_rl.trainer.cli import command_parser
from writer_rl.trainer.progress import progress

Row = dict[str, Any]


def compare(
    name: str, ours: Callable[[], Any], other: Callable[[], Any], repeats: int, unit: str, amount: float
) -> Row:
    """Run both in turn after one warm-up each; the ratio is taken pair by pair.

    Args:
        name: What is compared.
        ours: Our side.
        other: The alternative.
        repeats: Counted pairs, 1 or more.
        unit: What `amount` counts.
        amount: Work of one call.

    Returns:
        Medians of both rates and of the ratio, with the ratio's range.
    """
    times: list[tuple[float, float]] = []
    with progress(f"bench {name}", repeats + 1) as bar:
        for turn in range(repeats + 1):
            pair = []
            for work in (ours, other):
                began = time.perf_counter()
                work()
                pair.append(time.perf_counter() - began)
            if turn:
                times.append((pair[0], pair[1]))
            bar.advance()
    ratios = sorted(b / a for a, b in times)
    return {
        "name": name, "unit": f"{unit}/s", "ours": amount / statistics.median(a for a, _ in times),
        "other": amount / statistics.median(b for _, b in times), "ratio": statistics.median(ratios),
        "ratio_low": ratios[0], "ratio_high": ratios[-1], "repeats": repeats,
    }  # fmt: skip


def bench_rewards(config: RunConfig, repeats: int) -> list[Row]:
    """Memory reward over a G = 8 group of 10 segments, states growing to about 200 records."""
    from writer_rl.data.memory import MemoryState
    from writer_rl.data.simulation.chats import simulate_split
    from writer_rl.data.traces import replay
    from writer_rl.rewards import similarity as ours
    from writer_rl.rewards.update_chain import memory_reward

    big = config.data.simulation.model_copy(update={
        "num_train": 9, "members": (8, 8), "sessions": (10, 10), "messages": (24, 24), "matters": (16, 20),
    })  # fmt: skip
    states = [[step.after for step in replay(c.dialogue, c.trace, 25)] for c in simulate_split(big, "train")]
    reference, group = states[0], states[1:9]

    def score() -> None:
        for trajectory in group:
            for state, truth in zip(trajectory, reference, strict=True):
                memory_reward(state.records, truth.records, "fixed")

    def plain() -> None:
        import numpy as np
        from scipy.optimize import linear_sum_assignment

        def kappa(a: str, b: str) -> float:
            left, right = ours.tokens(a, "fixed"), ours.tokens(b, "fixed")
            common = len(set(left) & set(right))
            f1 = 2 * common / (len(set(left)) + len(set(right))) if left and right else 0.0
            return (
                0.6 * f1 + 0.4 * difflib.SequenceMatcher(None, " ".join(left), " ".join(right), autojunk=False).ratio()
            )

        def one(state: MemoryState, truth: MemoryState) -> None:
            for owner in {r.owner for r in (*state.records, *truth.records)}:
                mine = [r for r in state.records if r.owner == owner]
                theirs = [r for r in truth.records if r.owner == owner]
                if mine and theirs:
                    weights = np.array([
                        [kappa(p.content, r.content) if (p.source, p.layer) == (r.source, r.layer) else 0.0 for r in theirs]
                        for p in mine
                    ])  # fmt: skip
                    linear_sum_assignment(np.where(weights >= 0.5, weights, 0.0), maximize=True)

        for trajectory in group:
            for state, truth in zip(trajectory, reference, strict=True):
                one(state, truth)

    size = len(reference[-1].records)
    return [compare(f"rewards vs plain difflib + Hungarian, {size} records", score, plain, repeats, "states", 80)]


def bench_learner(config: RunConfig, repeats: int) -> list[Row]:
    """Tokens per second, forward and backward, of 16 samples."""
    import torch

    from writer_rl.rollouts.prompt_tokens import PromptEncoder
    from writer_rl.trainer.base_model import load_tokenizer, prepare_base_model
    from writer_rl.trainer.batching import TrainSample, pack_microbatches
    from writer_rl.trainer.data_sets import load_examples, sft_rows
    from writer_rl.trainer.logprobs import completion_logprobs
    from writer_rl.trainer.policy import load_policy

    base_dir = prepare_base_model(config.model.path)
    encoder = PromptEncoder(load_tokenizer(base_dir))
    small = config.model_copy(update={"data": config.data.model_copy(update={
        "simulation": config.data.simulation.model_copy(update={"num_train": 8})
    })})  # fmt: skip
    rows = sft_rows(load_examples(small, "train"), small, encoder, None)[:16]
    samples = [TrainSample(r.prompt_ids, r.completion_ids, (0.0,) * len(r.completion_ids), 1.0) for r in rows]
    policy = load_policy(base_dir, config.model)
    num_tokens = sum(len(s.prompt_ids) + len(s.completion_ids) for s in samples)

    def autocast() -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=config.model.autocast)

    def ours() -> None:
        for batch in pack_microbatches(samples, config.grpo.micro_batch_tokens, 0):
            with autocast():
                loss = -completion_logprobs(policy, batch).sum()
            loss.backward()
        policy.zero_grad()

    def per_sample() -> None:
        for sample in samples:
            ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
            with autocast():
                logprobs = policy(input_ids=ids[:, :-1]).logits.float().log_softmax(-1)
            first = len(sample.prompt_ids) - 1
            (-logprobs[0, first:].gather(-1, ids[0, first + 1 :, None]).sum()).backward()
        policy.zero_grad()

    return [compare("learner vs per-sample rows with full logits", ours, per_sample, repeats, "tokens", num_tokens)]


def bench_rollout(config: RunConfig, repeats: int) -> list[Row]:
    """Decoded tokens per second of 16 requests, and the cost of a sync."""
    from writer_rl.rollouts.generator import Generator, PolicyWeights, SamplingSpec
    from writer_rl.rollouts.prompt_tokens import PromptEncoder
    from writer_rl.trainer.base_model import load_tokenizer, prepare_base_model
    from writer_rl.trainer.data_sets import load_examples, sft_rows
    from writer_rl.trainer.generators import make_generator

    base_dir = prepare_base_model(config.model.path)
    encoder = PromptEncoder(load_tokenizer(base_dir))
    small = config.model_copy(update={"data": config.data.model_copy(update={
        "simulation": config.data.simulation.model_copy(update={"num_train": 8})
    })})  # fmt: skip
    prompts = [list(row.prompt_ids) for row in sft_rows(load_examples(small, "train"), small, encoder, None)[:16]]
    spec = SamplingSpec(1.0, 1.0, 48)
    engines = [
        config,
        config.model_copy(update={"sampler": config.sampler.model_copy(update={"engine": "transformers"})}),
    ]
    generators = [make_generator(engine, base_dir, merged_only=True) for engine in engines]
    counts: dict[int, int] = {}
    try:
        for generator in generators:
            generator.load_policy(PolicyWeights(0, "merged", base_dir))

        def run(index: int, generator: Generator) -> None:
            futures = [generator.submit(prompt, spec, seed) for seed, prompt in enumerate(prompts)]
            counts[index] = sum(len(future.result().token_ids) for future in futures)

        row = compare(
            f"{config.sampler.engine} vs transformers generation, 16 requests", lambda: run(0, generators[0]),
            lambda: run(1, generators[1]), repeats, "tokens", 1.0,
        )  # fmt: skip
        row["ours"] *= counts[0]
        row["other"] *= counts[1]
        scale = counts[0] / counts[1]
        row |= {
            "ratio": row["ratio"] * scale,
            "ratio_low": row["ratio_low"] * scale,
            "ratio_high": row["ratio_high"] * scale,
        }
        return [row]
    finally:
        for generator in generators:
            generator.close()


def bench_sync(config: RunConfig, repeats: int) -> list[Row]:
    """Seconds to write one policy version in either form (loading excluded)."""
    from writer_rl.trainer.adapter_sync import AdapterSync
    from writer_rl.trainer.base_model import prepare_base_model
    from writer_rl.trainer.policy import adapter_state, load_policy

    base_dir = prepare_base_model(config.model.path)
    state = adapter_state(load_policy(base_dir, config.model))
    forms = [config.sampler.model_copy(update={"sync": form}) for form in ("adapter", "merged")]
    with (
        AdapterSync(base_dir, forms[0], config.model.lora) as adapter,
        AdapterSync(base_dir, forms[1], config.model.lora) as merged,
    ):
        return [
            compare(
                "write an adapter vs write merged weights",
                lambda: adapter.export(state, 0),
                lambda: merged.export(state, 0),
                repeats,
                "syncs",
                1.0,
            )
        ]


BENCHES: dict[str, Callable[[RunConfig, int], list[Row]]] = {
    "rewards": bench_rewards, "learner": bench_learner, "rollout": bench_rollout, "sync": bench_sync,
}  # fmt: skip


def main(argv: list[str]) -> int:
    """Entry point of `bench`."""
    parser = command_parser("bench", "Measure ours against a named alternative on the same work: " + ", ".join(BENCHES) + ".",
                            "example: ./launch.sh bench rewards learner --repeats 5")  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(BENCHES)}; all if none is given")
    parser.add_argument("--config", default="demo", help="configuration that names the model (default: demo)")
    parser.add_argument("--repeats", type=int, default=5, help="counted pairs (default: 5)")
    parser.add_argument("--out", type=Path, help="also write the rows to this JSON file")
    args = parser.parse_args(argv)
    unknown = [name for name in args.names if name not in BENCHES]
    if unknown:
        raise InputError("bench", f"{unknown[0]!r} is no benchmark", f"use {', '.join(BENCHES)}")
    if args.repeats < 1:
        raise InputError("--repeats", f"is {args.repeats}", "give 1 or more")
    config = load_config(args.config, ())
    rows = [row for name in args.names or BENCHES for row in BENCHES[name](config, args.repeats)]
    table = Table(title=f"median of {args.repeats} pairs on {platform.machine()}, {platform.system()}")
    for column in ("comparison", "unit", "ours", "other", "ours / other", "range"):
        table.add_column(column, justify="left" if column == "comparison" else "right")
    for row in rows:
        table.add_row(row["name"], row["unit"], f"{row['ours']:,.1f}", f"{row['other']:,.1f}", f"{row['ratio']:.2f}×",
                      f"{row['ratio_low']:.2f}–{row['ratio_high']:.2f}")  # fmt: skip
    Console().print(table)
    if args.out:
        write_json(args.out, {"rows": rows, "machine": platform.platform(), "python": platform.python_version()})
        print(f"saved: {args.out}")
    return 0
