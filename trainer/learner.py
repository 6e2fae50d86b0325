"""One update of the policy from a batch of samples: accelerate runs it, the mathematics is elsewhere.

The learner alone divides by counts, and it divides by the count of the whole batch, so that neither micro-batching nor the number
of ranks changes the loss. The number of optimiser steps follows from the configuration, never from the number of rows.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from peft import PeftModel, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

from writer_rl.configs.schema import RunConfig
from writer_rl.trainer.batching import MicroBatch, TrainSample, pack_microbatches
from writer_rl.trainer.logprobs import CompletionScorer
from writer_rl.trainer.losses import POLICY_LOSSES, LossTerms, sampler_mismatch_sums, truncated_importance_weights
from writer_rl.trainer.policy import adapter_state, load_policy, reference


class NonFiniteLossError(FloatingPointError):
    """The loss or its gradient is NaN or infinite: the run stops before the step and before any checkpoint."""


@dataclass(slots=True)
class _Prepared:
    """A micro-batch with the log-probs that stay fixed during an update.

    Where an update is a single step, the old log-probs are those of the step's own forward pass, unknown until then.
    """

    batch: MicroBatch
    ref_logprobs_BT: Tensor
    old_logprobs_BT: Tensor | None = None
    importance_weights_BT: Tensor | None = None


class Learner:
    """Policy, optimiser and their state.

    Args:
        config: The run.
        base_dir: The SFT policy: frozen base of the adapter, and the reference when the adapter is off.
    """

    def __init__(self, config: RunConfig, base_dir: Path) -> None:
        on_gpu = torch.cuda.is_available()
        # Without a GPU the ranks must be told to talk over gloo, or each believes that it is alone; a single process must not.
        alone = int(os.environ.get("WORLD_SIZE") or 1) == 1
        handlers = [] if on_gpu or alone else [InitProcessGroupKwargs(backend="gloo")]
        self._accelerator = Accelerator(
            mixed_precision="bf16" if config.model.autocast else "no", cpu=not on_gpu, kwargs_handlers=handlers
        )
        self._grpo, self._config = config.grpo, config
        # Then the policy of the only step is the old policy, and a forward pass over the whole batch is saved.
        self._single_step = config.grpo.epochs * config.grpo.minibatches == 1
        policy = load_policy(
            base_dir, config.model, gradient_checkpointing=config.grpo.gradient_checkpointing, seed=config.seed
        )
        self.policy: PeftModel = policy
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        optimiser = torch.optim.AdamW(
            trained, lr=self._grpo.learning_rate, betas=self._grpo.adam_betas, weight_decay=self._grpo.weight_decay
        )
        scorer = CompletionScorer(policy, config.sampler.temperature)
        self._scorer, self._optimiser = self._accelerator.prepare(scorer, optimiser)
        self.policy_version = 0
        self.num_optimiser_steps = 0
        self.num_skipped_steps = 0

    @property
    def device(self) -> torch.device:
        """Device of the policy."""
        device: torch.device = self._accelerator.device
        return device

    def adapter(self) -> dict[str, Tensor]:
        """Copies of the adapter's tensors."""
        return adapter_state(self.policy)

    def _learning_rate(self, update: int) -> float:
        grpo = self._grpo
        rate = grpo.learning_rate
        if grpo.warmup_updates and update < grpo.warmup_updates:
            return rate * (update + 1) / grpo.warmup_updates
        if grpo.schedule == "linear":
            span = max(1, grpo.num_updates - grpo.warmup_updates)
            return rate * max(0.1, 1 - (update - grpo.warmup_updates) / span)
        return rate

    def logprobs(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        """Current log-probs of the samples' completion tokens, in the samples' order; for parity checks."""
        found: list[list[float]] = [[] for _ in samples]
        with torch.no_grad():
            for batch in self._pack(samples):
                values_BT = self._scorer(batch).float().cpu()
                for row, index in enumerate(batch.sample_indices):
                    found[index] = values_BT[row][batch.completion_mask_BT[row].cpu()].tolist()
        return found

    def _pack(self, samples: Sequence[TrainSample]) -> list[MicroBatch]:
        return [batch.to(self.device) for batch in pack_microbatches(samples, self._grpo.micro_batch_tokens, pad_id=0)]

    def _prepare(self, samples: Sequence[TrainSample]) -> list[_Prepared]:
        """Pack a minibatch; compute old and reference log-probs before anything is updated."""
        prepared = []
        for batch in self._pack(samples):
            # The reference is recorded even without a penalty: drift from the SFT policy is always shown.
            with reference(self.policy):
                item = _Prepared(batch, self._scorer(batch))
            if not self._single_step:
                with torch.no_grad():
                    self._fix_old(item, self._scorer(batch))
            prepared.append(item)
        return prepared

    def _fix_old(self, item: _Prepared, logprobs_BT: Tensor) -> None:
        item.old_logprobs_BT, batch = logprobs_BT.detach(), item.batch
        if self._grpo.importance_cap:
            item.importance_weights_BT = truncated_importance_weights(
                item.old_logprobs_BT, batch.sampling_logprobs_BT, batch.completion_mask_BT,
                cap=self._grpo.importance_cap,
            )  # fmt: skip

    def _loss(self, policy_logprobs_BT: Tensor, item: _Prepared) -> LossTerms:
        grpo = self._grpo
        old_BT = policy_logprobs_BT.detach() if item.old_logprobs_BT is None else item.old_logprobs_BT
        return POLICY_LOSSES[grpo.loss](
            policy_logprobs_BT, old_BT, item.ref_logprobs_BT, item.batch.advantages_B,
            item.batch.completion_mask_BT, clip_low=grpo.clip_low, clip_high=grpo.clip_high, beta=grpo.beta,
            kl_estimator=grpo.kl_estimator, max_completion_tokens=self._config.sampler.max_new_tokens,
            importance_weights_BT=item.importance_weights_BT,
        )  # fmt: skip

    def _global(self, value: Tensor) -> float:
        """Sum over ranks."""
        return float(self._accelerator.reduce(value.detach().double(), reduction="sum"))

    def update(self, samples: Sequence[TrainSample], update: int) -> dict[str, float]:
        """Make `epochs × minibatches` optimiser steps on one rollout batch and return its metrics.

        A step is skipped, counted and shown if its minibatch is empty or the KL guard speaks; after the guard has spoken the
        rest of the update is skipped too. The policy version always rises, so that the sampler is always synced.

        Raises:
            NonFiniteLossError: Before anything is stepped.

        Source: specification §5.
        """
        started = time.monotonic()
        grpo = self._grpo
        self._scorer.train()
        rate = self._learning_rate(update)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        minibatches = [
            self._prepare(part) for part in split_minibatches(samples, grpo.minibatches, self._config.seed + update)
        ]
        sums: dict[str, float] = {}
        last_kl: float | None = None
        skipped, stopped, grad_norms, losses = 0, False, [], []
        for _ in range(grpo.epochs):
            for part in minibatches:
                if stopped or not part:
                    skipped += 1
                    continue
                loss, terms_sums, grad_norm = self._accumulate(part)
                guard = {"old": terms_sums["kl_old"], "reference": terms_sums["kl_ref"], "off": -math.inf}[
                    grpo.kl_guard
                ]
                last_kl = terms_sums["kl_old"] / terms_sums["num_tokens"]
                if guard / terms_sums["num_tokens"] > grpo.kl_guard_nats:
                    self._optimiser.zero_grad(set_to_none=True)
                    skipped, stopped = skipped + 1, True
                    continue
                self._optimiser.step()
                self._optimiser.zero_grad(set_to_none=True)
                self.num_optimiser_steps += 1
                grad_norms.append(grad_norm)
                losses.append(loss)
                for key, value in terms_sums.items():
                    sums[key] = sums.get(key, 0.0) + value
        mismatch: dict[str, float] = {}
        for item in (item for part in minibatches for item in part):
            assert item.old_logprobs_BT is not None
            found = sampler_mismatch_sums(
                item.old_logprobs_BT, item.batch.sampling_logprobs_BT, item.batch.completion_mask_BT
            )
            for key, tensor in found.items():
                mismatch[key] = mismatch.get(key, 0.0) + self._global(tensor)
        self.policy_version += 1
        self.num_skipped_steps += skipped
        metrics = {
            "policy/learning_rate": rate,
            "policy/skipped_steps": float(skipped),
            "policy/optimiser_steps": float(len(losses)),
            "group/num_trained_samples": float(len(samples)),
            "time/learn_s": time.monotonic() - started,
        }
        if last_kl is not None:
            metrics["policy/kl_old_last_nats"] = last_kl
        if losses:
            tokens = sums["num_tokens"]
            metrics |= {
                "policy/loss": sum(losses) / len(losses),
                "policy/grad_norm": sum(grad_norms) / len(grad_norms),
                "policy/kl_ref_nats": sums["kl_ref"] / tokens,
                "policy/kl_old_nats": sums["kl_old"] / tokens,
                "policy/ratio_mean": sums["ratio"] / tokens,
                "policy/clip_low_frac": sums["clip_low"] / tokens,
                "policy/clip_high_frac": sums["clip_high"] / tokens,
                "throughput/learn_tokens_per_s": sums["computed"] / metrics["time/learn_s"],
            }
        if mismatch:
            tokens = mismatch["num_tokens"]
            metrics |= {
                "sampler/mismatch_abs_nats": mismatch["mismatch_abs"] / tokens,
                "sampler/mismatch_kl_nats": mismatch["mismatch_kl"] / tokens,
                "sampler/ratio_mean": mismatch["mismatch_ratio"] / tokens,
            }
        return metrics

    def _accumulate(self, part: Sequence[_Prepared]) -> tuple[float, dict[str, float], float]:
        """Gradient of one minibatch: loss, metric sums and gradient norm, all over every rank."""
        with torch.no_grad():
            # A count depends on the mask alone, so any log-probs of the right shape serve.
            counts = torch.stack([self._loss(item.batch.sampling_logprobs_BT, item).count for item in part]).sum()
        count = self._global(counts)
        # DDP averages gradients over ranks; the loss is a sum over ranks divided by the global count.
        scale = self._accelerator.num_processes / count
        sums: dict[str, float] = {"num_tokens": 0.0, "computed": 0.0}
        total = 0.0
        for item in part:
            logprobs_BT = self._scorer(item.batch)
            if item.old_logprobs_BT is None:
                self._fix_old(item, logprobs_BT)
            terms = self._loss(logprobs_BT, item)
            self._accelerator.backward(terms.loss_sum * scale)
            total += self._global(terms.loss_sum)
            sums["num_tokens"] += self._global(terms.num_tokens)
            sums["computed"] += item.batch.num_padded_tokens
            for key, value in terms.metric_sums.items():
                sums[key] = sums.get(key, 0.0) + self._global(value)
        norm = float(self._accelerator.clip_grad_norm_(self._scorer.parameters(), self._grpo.max_grad_norm))
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise NonFiniteLossError(
                f"loss is {total / count} and its gradient norm {norm} after {self.num_optimiser_steps} optimiser steps; "
                "nothing was stepped or saved. Lower grpo.learning_rate or look at the last sample table"
            )
        return total / count, sums, norm

    def save(self, directory: Path) -> None:
        """Write adapter and optimiser below a checkpoint that is being staged; safetensors only, no pickle."""
        self.policy.save_pretrained(directory / "adapter", safe_serialization=True)
        names = [name for name, parameter in self.policy.named_parameters() if parameter.requires_grad]
        state = self._optimiser.state_dict()["state"]
        tensors = {
            f"{names[index]}|{key}": torch.as_tensor(value).detach().cpu().contiguous()
            for index, entry in state.items()
            for key, value in entry.items()
        }
        save_file(tensors, directory / "optimiser.safetensors")

    def load(self, directory: Path, *, policy_version: int, num_optimiser_steps: int) -> None:
        """Continue from what `save` wrote."""
        set_peft_model_state_dict(self.policy, load_file(directory / "adapter" / "adapter_model.safetensors"))
        names = [name for name, parameter in self.policy.named_parameters() if parameter.requires_grad]
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in load_file(directory / "optimiser.safetensors").items():
            name, _, field = key.rpartition("|")
            state.setdefault(names.index(name), {})[field] = value
        whole = self._optimiser.state_dict()
        whole["state"] = state
        self._optimiser.load_state_dict(whole)
        self.policy_version, self.num_optimiser_steps = policy_version, num_optimiser_steps


def split_minibatches(samples: Sequence[TrainSample], count: int, seed: int) -> list[list[TrainSample]]:
    """Deal samples to `count` minibatches of similar size, keeping the samples of one prompt position together.

    Samples of the same dialogue and segment compare with each other and share prompt tokens, so they stay in one minibatch.

    Returns:
        Exactly `count` lists; some are empty where there are fewer positions than minibatches.
    """
    clusters: dict[tuple[str, int], list[TrainSample]] = {}
    for sample in samples:
        clusters.setdefault((sample.dialogue_id, sample.segment_index), []).append(sample)
    order = sorted(clusters)
    random.Random(seed).shuffle(order)
    order.sort(key=lambda key: -len(clusters[key]))
    dealt: list[list[TrainSample]] = [[] for _ in range(count)]
    for key in order:
        min(dealt, key=len).extend(clusters[key])
    return dealt
