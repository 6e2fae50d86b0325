"""Speaker-conditioned GRPO: sample, score, learn, sync; one update after the other, straight down.

Source: specification §3 (steps), §4 (rewards), §5 (advantages and loss).
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from writer_rl.configs.errors import InputError
from writer_rl.configs.load import config_hash, dump_resolved
from writer_rl.configs.schema import RunConfig
from writer_rl.data.actions import action_payload
from writer_rl.data.embedding import Embedder, make_embedder
from writer_rl.rewards.qa_gain import QaScorer
from writer_rl.rollouts.collect import collect_groups
from writer_rl.rollouts.environment import Environment
from writer_rl.rollouts.generator import Generator, SamplingSpec
from writer_rl.rollouts.prompt_tokens import PromptEncoder
from writer_rl.trainer.adapter_sync import AdapterSync
from writer_rl.trainer.base_model import load_tokenizer
from writer_rl.trainer.checkpoint import latest_checkpoint, prune, update_directory, write_checkpoint
from writer_rl.trainer.cli import config_parser, parse_config, run_dir
from writer_rl.trainer.data_sets import Example, load_examples
from writer_rl.trainer.generators import make_generator
from writer_rl.trainer.learner import Learner
from writer_rl.trainer.metrics import MetricLog
from writer_rl.trainer.progress import progress, say
from writer_rl.trainer.scoring import ScoredGroup, reward_metrics, score_group, train_samples


@dataclass(frozen=True, slots=True)
class GrpoResult:
    """Where the run stands when the loop ends."""

    checkpoint: Path
    num_updates: int
    metrics: dict[str, float]


def sampling_spec(config: RunConfig) -> SamplingSpec:
    """Sampling settings of rollouts."""
    return SamplingSpec(config.sampler.temperature, config.sampler.top_p, config.sampler.max_new_tokens)


def dialogues_of_update(num_examples: int, per_update: int, seed: int, update: int) -> list[int]:
    """Places of the dialogues of one update: every pass over the data is a fresh seeded shuffle, none is skipped.

    Depends on its arguments alone, so a resumed run goes on where it stopped.

    Example:
        With 4 dialogues and 3 per update, update 1 takes the last of the first pass and the first two of the second.
    """
    chosen = []
    for place in range(update * per_update, (update + 1) * per_update):
        order = list(range(num_examples))
        random.Random(f"{seed}/{place // num_examples}").shuffle(order)
        chosen.append(order[place % num_examples])
    return chosen


def sample_rows(
    groups: Sequence[ScoredGroup], examples: dict[str, Example], encoder: PromptEncoder, limit: int
) -> list[dict[str, Any]]:
    """Rows of the sample table: best and worst steps of each group in turn, with prompt, completion, rewards and reference."""
    rows: list[dict[str, Any]] = []
    for scored in groups:
        ranked = sorted(
            (entry.returns[t], entry.index, t)
            for entry in scored.scored
            if entry is not None
            for t in range(len(entry.returns))
        )
        for value, index, t in {ranked[-1], ranked[0]} if ranked else set():
            trajectory, entry = scored.group.trajectories[index], scored.scored[index]
            assert entry is not None
            step, rewards = trajectory.steps[t], entry.steps[t]
            reference = examples[scored.group.dialogue_id].steps[t].actions
            rows.append(
                {
                    "dialogue_id": scored.group.dialogue_id, "trajectory_index": index, "segment_index": t,
                    "prompt": encoder.text(step.prompt_ids), "completion": step.completion.text, "return": value,
                    "advantage": scored.advantages[index][t],
                    "rewards": {
                        "valid": rewards.valid.total, "memory": rewards.memory.memory, "phi": rewards.memory.phi,
                        "chain": rewards.memory.chain, "penalty": rewards.valid.penalty, "qa_gain": entry.qa_gain,
                    },
                    "errors": [str(error) for error in step.report.errors],
                    "reference": [action_payload(action) for action in reference],
                }
            )  # fmt: skip
    return rows[:limit]


class _Probe:
    """Greedy state score on held-out dialogues, to see learning that is not memorised."""

    def __init__(self, config: RunConfig, examples: Sequence[Example], environments: Sequence[Environment]) -> None:
        self._config, self._examples, self._environments = config, examples, environments

    def __call__(self, generator: Generator) -> dict[str, float]:
        spec = SamplingSpec(0.0, 1.0, self._config.sampler.max_new_tokens)
        groups = collect_groups(
            self._environments, generator, spec, group_size=1, seed=self._config.seed,
            max_prompt_tokens=self._config.contract.max_prompt_tokens, constrain=self._config.sampler.constrained,
        )  # fmt: skip
        scored = [
            score_group(group, example, self._config.reward, self._config.grpo, None)
            for group, example in zip(groups, self._examples, strict=True)
        ]
        found = reward_metrics(scored)
        names = {
            "heldout/memory_mean": "reward/final_memory_mean",
            "heldout/memory_std": "reward/final_memory_std",
            "heldout/valid_frac": "completion/valid_frac",
        }
        # A probe in which nothing could be scored says nothing, not 0.
        return {name: found[key] for name, key in names.items() if key in found}


def make_environments(
    examples: Sequence[Example], config: RunConfig, encoder: PromptEncoder, embedder: Embedder
) -> list[Environment]:
    """One environment per dialogue."""
    return [
        Environment(
            example.dialogue, example.trace.window, config.contract, encoder, embedder, config.data.max_segments
        )
        for example in examples
    ]


def run_grpo(config: RunConfig, directory: Path, *, generator: Generator | None = None, resume: bool = True,
             examples: Sequence[Example] | None = None) -> GrpoResult:  # fmt: skip
    """Run the loop from the newest whole checkpoint, or from the SFT policy.

    Args:
        config: The run.
        directory: Run folder; `sft/merged` in it is the base and the reference policy.
        generator: A running generator to use; one is made, and closed at the end, if None.
        resume: Continue from the newest whole checkpoint of the same configuration.
        examples: Training dialogues with references; loaded from the configuration if None.

    Raises:
        InputError: There is no SFT model, or the checkpoint was made under another configuration.
        NonFiniteLossError: The loss is no longer finite; nothing after the last checkpoint is kept.
    """
    base_dir = directory / "sft" / "merged"
    if not base_dir.is_dir():
        raise InputError(str(base_dir), "does not exist", "run `sft` with the same configuration first")
    grpo, output = config.grpo, directory / "grpo"
    embedder = make_embedder(config.contract.embedder)
    encoder = PromptEncoder(load_tokenizer(base_dir))
    examples = list(examples) if examples is not None else load_examples(config, "train")
    environments = make_environments(examples, config, encoder, embedder)
    by_id = {example.dialogue.dialogue_id: example for example in examples}
    qa = QaScorer(config.reward.qa, embedder) if config.reward.qa.enabled else None
    learner = Learner(config, base_dir)
    if not resume:
        shutil.rmtree(output / "checkpoints", ignore_errors=True)
    newest = latest_checkpoint(output / "checkpoints")
    start = _restore(newest, config, learner, qa) if newest else 0
    spec = sampling_spec(config)
    last: dict[str, float] = {}
    with ExitStack() as stack:
        if generator is None:
            generator = stack.enter_context(make_generator(config, base_dir))
        sync = stack.enter_context(AdapterSync(base_dir, config.sampler, config.model.lora))
        log = stack.enter_context(
            MetricLog(
                output,
                config.logging,
                run_name=f"{config.name}-grpo",
                config=config.model_dump(),
                resume_step=start if newest else None,
            )
        )
        sync.push(learner.adapter(), learner.policy_version, generator)
        probe = _make_probe(config, encoder, embedder)
        if probe is not None and start == 0:
            last = probe(generator)
            log.log(0, last)
            say(f"held-out state score before RL: {last.get('heldout/memory_mean', float('nan')):.3f}")
        bar = stack.enter_context(progress("GRPO updates", grpo.num_updates))
        bar.advance(start)
        for update in range(start, grpo.num_updates):
            began = time.monotonic()
            chosen = dialogues_of_update(len(examples), grpo.dialogues_per_update, config.seed, update)
            groups = collect_groups(
                [environments[i] for i in chosen], generator, spec, group_size=grpo.group_size,
                seed=config.seed * 1_000_003 + update, max_prompt_tokens=config.contract.max_prompt_tokens,
                constrain=config.sampler.constrained, expected_version=learner.policy_version,
            )  # fmt: skip
            sampled = time.monotonic()
            scored = [score_group(group, by_id[group.dialogue_id], config.reward, grpo, qa) for group in groups]
            samples = train_samples(scored)
            rewarded = time.monotonic()
            metrics = reward_metrics(scored) | learner.update(samples, update)
            _check_mismatch(metrics, config)
            learned = time.monotonic()
            sync.push(learner.adapter(), learner.policy_version, generator)
            synced = time.monotonic()
            done = update + 1
            if probe is not None and grpo.eval_every and (done % grpo.eval_every == 0 or done == grpo.num_updates):
                metrics |= probe(generator)
            num_tokens = sum(len(s.completion.token_ids) for g in groups for t in g.trajectories for s in t.steps)
            metrics |= {
                "time/rollout_s": sampled - began, "time/reward_s": rewarded - sampled, "time/sync_s": synced - learned,
                "time/update_s": time.monotonic() - began, "throughput/rollout_tokens_per_s": num_tokens / (sampled - began),
                "policy/version": float(learner.policy_version),
            }  # fmt: skip
            log.log(done, metrics)
            log.log_samples(done, sample_rows(scored, by_id, encoder, grpo.sample_rows))
            if done % grpo.save_every == 0 or done == grpo.num_updates:
                _save(output, config, learner, qa, done)
            last = metrics
            note = f"return {metrics.get('reward/return_mean', float('nan')):.3f} memory {metrics.get('reward/memory_mean', float('nan')):.3f}"
            bar.advance(note=note)
    checkpoint = latest_checkpoint(output / "checkpoints")
    if checkpoint is None:
        checkpoint = _save(output, config, learner, qa, grpo.num_updates)
    return GrpoResult(checkpoint, grpo.num_updates, last)


def _make_probe(config: RunConfig, encoder: PromptEncoder, embedder: Embedder) -> _Probe | None:
    if not config.grpo.eval_every:
        return None
    examples = load_examples(config, "heldout")[: config.grpo.eval_dialogues]
    return _Probe(config, examples, make_environments(examples, config, encoder, embedder))


def _check_mismatch(metrics: dict[str, float], config: RunConfig) -> None:
    """Stop a run whose sampler no longer holds the learner's policy.

    With top-p below 1 the sampler's log-probs are renormalised over the kept mass, which shifts them by less than the bound.
    """
    found = metrics.get("sampler/mismatch_abs_nats")
    if found is not None and found > config.sampler.max_mismatch_nats:
        raise RuntimeError(
            f"sampler and learner differ by {found:.3f} nats per token, above sampler.max_mismatch_nats = "
            f"{config.sampler.max_mismatch_nats}: the engine does not hold the learner's policy, or its number format is too coarse"
        )


def _resume_key(config: RunConfig) -> str:
    """Hash of what a resumed run must share with its checkpoint: everything but names, places and how long it runs."""
    same = config.model_copy(
        update={
            "name": "run", "output_dir": "", "threads": 0, "logging": type(config.logging)(), "evaluation": type(config.evaluation)(),
            "grpo": config.grpo.model_copy(update={"num_updates": 0, "save_every": 1, "keep_checkpoints": 1}),
        }
    )  # fmt: skip
    return config_hash(same)


def _save(output: Path, config: RunConfig, learner: Learner, qa: QaScorer | None, done: int) -> Path:
    def fill(staged: Path) -> None:
        learner.save(staged)
        state = {
            "update": done, "policy_version": learner.policy_version, "num_optimiser_steps": learner.num_optimiser_steps,
            "num_skipped_steps": learner.num_skipped_steps, "config": _resume_key(config),
            "qa_cache": qa.cache.state_dict() if qa is not None else {},
        }  # fmt: skip
        (staged / "state.json").write_text(json.dumps(state), encoding="utf-8")

    root = output / "checkpoints"
    written = write_checkpoint(update_directory(root, done), fill)
    prune(root, config.grpo.keep_checkpoints)
    return written


def _restore(checkpoint: Path, config: RunConfig, learner: Learner, qa: QaScorer | None) -> int:
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    if state["config"] != _resume_key(config):
        raise InputError(
            str(checkpoint), "was made under another configuration",
            "use the configuration of the run, choose another name=…, or start afresh with --resume no",
        )  # fmt: skip
    learner.load(checkpoint, policy_version=state["policy_version"], num_optimiser_steps=state["num_optimiser_steps"])
    learner.num_skipped_steps = state["num_skipped_steps"]
    if qa is not None and state["qa_cache"]:
        qa.cache.load_state_dict(state["qa_cache"])
    say(f"resuming after update {state['update']} from {checkpoint}")
    return int(state["update"])


def main(argv: list[str]) -> int:
    """Entry point of `grpo`."""
    parser = config_parser(
        "grpo", "Train the Writer by GRPO from its SFT model (run `sft` first).",
        "example: ./launch.sh grpo demo grpo.num_updates=5",
    )  # fmt: skip
    parser.add_argument(
        "--resume", choices=("auto", "no"), default="auto", help="auto continues from the newest whole checkpoint"
    )
    args = parser.parse_args(argv)
    config = parse_config(args)
    directory = run_dir(config)
    dump_resolved(config, directory)
    result = run_grpo(config, directory, resume=args.resume == "auto")
    print(f"updates: {result.num_updates}\ncheckpoint: {result.checkpoint}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
