"""TRL's own `_compute_loss` as an oracle: the same log-probs, masks and advantages give the same loss and gradient."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from writer_rl.trainer.losses import POLICY_LOSSES

trl = pytest.importorskip("trl")
from trl import GRPOTrainer  # noqa: E402

B, T, BETA, LOW, HIGH = 5, 7, 0.1, 0.2, 0.28


def _trl_loss(
    loss_type: str, level: str, tensors: dict[str, torch.Tensor], weights: torch.Tensor | None
) -> torch.Tensor:
    """Drive TRL's method with the attributes it reads; log-probs are handed in where TRL would run the model."""
    policy = tensors["policy"]
    trainer = SimpleNamespace(
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=BETA,
        importance_sampling_level=level, loss_type=loss_type, epsilon_low=LOW, epsilon_high=HIGH,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        use_vllm=weights is not None, vllm_importance_sampling_correction=True, model=SimpleNamespace(training=False),
        max_completion_length=9, current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        _metrics={"eval": defaultdict(list)},
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, gather_for_metrics=lambda x: x
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy, torch.zeros_like(policy), None),
    )  # fmt: skip
    mask = tensors["mask"].long()
    ids = torch.zeros(B, T, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids, "completion_mask": mask,
        "advantages": tensors["advantages"], "old_per_token_logps": tensors["old"],
        "ref_per_token_logps": tensors["ref"], "num_items_in_batch": mask.sum(), "importance_sampling_ratio": weights,
    }  # fmt: skip
    loss: torch.Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("ours", "loss_type", "level"),
    [
        ("completion_mean", "grpo", "token"),
        ("token_mean", "dapo", "token"),
        ("token_mean", "bnpo", "token"),
        ("dr_grpo", "dr_grpo", "token"),
        ("gspo", "grpo", "sequence"),
    ],
)
def test_value_and_gradient(ours, loss_type, level, weighted):
    generator = torch.Generator().manual_seed(5)

    def near(base: torch.Tensor, std: float) -> torch.Tensor:
        return base + std * torch.randn(B, T, generator=generator, dtype=torch.float64)

    policy = (-2 * torch.rand(B, T, generator=generator, dtype=torch.float64)).requires_grad_()
    # The first completion drifted up with A > 0, the fourth down with A < 0: also sequence ratios are clipped.
    drift_B1 = torch.tensor([[0.6], [0.0], [0.0], [-0.6], [0.0]], dtype=torch.float64)
    lengths = torch.tensor([7, 1, 4, 6, 2])
    tensors = {
        "policy": policy, "old": near(policy.detach() - drift_B1, 0.4), "ref": near(policy.detach(), 0.3),
        "advantages": torch.tensor([1.5, -0.7, 0.0, -2.0, 0.4], dtype=torch.float64),
        "mask": torch.arange(T)[None] < lengths[:, None],
    }  # fmt: skip
    weights = 0.5 + torch.rand(B, T, generator=generator, dtype=torch.float64) if weighted else None
    oracle = _trl_loss(loss_type, level, tensors, weights)
    terms = POLICY_LOSSES[ours](
        policy, tensors["old"], tensors["ref"], tensors["advantages"], tensors["mask"], clip_low=LOW, clip_high=HIGH,
        beta=BETA, kl_estimator="k3", max_completion_tokens=9, importance_weights_BT=weights,
    )  # fmt: skip
    loss = terms.loss_sum / terms.count
    torch.testing.assert_close(loss, oracle, rtol=0, atol=1e-12)
    (got,), (want,) = torch.autograd.grad(loss, policy), torch.autograd.grad(oracle, policy)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    clipped = terms.metric_sums["clip_low"] + terms.metric_sums["clip_high"]
    assert clipped.item() > 0, "no ratio is clipped: a weak comparison"
