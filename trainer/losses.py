"""Policy losses as pure functions on tensors: numbers in, a sum and a count out.

A loss never divides by the number of rows or tokens it happens to see. It returns Σ and the count to divide by, and
the learner divides once by the count over all micro-batches and all ranks. Shapes: B rows, T token positions.
`completion_mask_BT` is True at trained tokens; whatever stands elsewhere, NaN and inf included, has no influence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossTerms:
    """One micro-batch's share of the loss.

    Args:
        loss_sum: Scalar with gradient; Σ over micro-batches and ranks / Σ count is the loss.
        count: Scalar, what `loss_sum` is to be divided by: completions, tokens or token budget.
        num_tokens: Scalar, trained tokens; the denominator of every entry of `metric_sums`.
        metric_sums: Detached scalars, each Σ over trained tokens: `kl_ref` and `kl_old` (k3, nats), `ratio`,
            `clip_low` and `clip_high` (tokens whose gradient the clip removed).
    """

    loss_sum: Tensor
    count: Tensor
    num_tokens: Tensor
    metric_sums: dict[str, Tensor]


def k1(log_ratio: Tensor) -> Tensor:
    """First KL estimator, log π − log π_ref: unbiased, may be negative; its own gradient has mean zero.

    Args:
        log_ratio: x = log π − log π_ref at tokens drawn from π, nats.

    Source: Schulman, "Approximating KL divergence", k1.

    Example: x = 0.1 gives 0.1.
    """
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Second KL estimator, x²/2: biased, low variance, with the gradient of the true KL.

    Args:
        log_ratio: x = log π − log π_ref at tokens drawn from π, nats.

    Source: Schulman, "Approximating KL divergence", k2.

    Example: x = 0.1 gives 0.005.
    """
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """Third KL estimator, e^(−x) + x − 1: unbiased and never negative.

    Args:
        log_ratio: x = log π − log π_ref at tokens drawn from π, nats.

    Source: specification section 5, with d = −x; Schulman, k3.

    Example: x = 0.1 gives 0.0048374, with derivative 1 − e^(−0.1) = 0.0951626.
    """
    return torch.expm1(-log_ratio) + log_ratio


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def truncated_importance_weights(
    old_logprobs_BT: Tensor, sampling_logprobs_BT: Tensor, completion_mask_BT: Tensor, *, cap: float
) -> Tensor:
    """Weights min(π_old / π_sampling, cap) that correct for the engine's sampling policy.

    Args:
        old_logprobs_BT: The trainer's log-probs before this batch's updates, nats.
        sampling_logprobs_BT: The engine's log-probs of the same tokens, nats.
        completion_mask_BT: True at trained tokens.
        cap: Upper bound, above 0.

    Returns:
        (B, T) detached weights; 1 outside the mask.

    Example: log-probs −1 (trainer) and −2 (engine) give e^1 = 2.718, or 2 with a cap of 2.
    """
    if cap <= 0:
        raise ValueError(f"cap is {cap}; give a positive bound, or pass no importance weights")
    log_ratio_BT = _masked(old_logprobs_BT.detach(), completion_mask_BT) - _masked(
        sampling_logprobs_BT.detach(), completion_mask_BT
    )
    return torch.where(completion_mask_BT, log_ratio_BT.exp().clamp(max=cap), 1.0)


def sampler_mismatch_sums(
    old_logprobs_BT: Tensor, sampling_logprobs_BT: Tensor, completion_mask_BT: Tensor
) -> dict[str, Tensor]:
    """How far the engine's log-probs are from the trainer's, each Σ over trained tokens.

    Args:
        old_logprobs_BT: The trainer's log-probs before this batch's updates, nats.
        sampling_logprobs_BT: The engine's log-probs of the same tokens, nats.
        completion_mask_BT: True at trained tokens.

    Returns:
        `mismatch_abs` Σ|difference|, `mismatch_kl` Σ k3 of KL(sampling ‖ old), `mismatch_ratio` Σ π_old / π_sampling
        (its mean is 1 on policy, or the kept mass when top-p < 1), and `num_tokens`.
    """
    x_BT = _masked(sampling_logprobs_BT.detach(), completion_mask_BT) - _masked(
        old_logprobs_BT.detach(), completion_mask_BT
    )
    return {
        "mismatch_abs": x_BT.abs().sum(),
        "mismatch_kl": k3(x_BT).sum(),
        "mismatch_ratio": torch.where(completion_mask_BT, (-x_BT).exp(), 0.0).sum(),
        "num_tokens": completion_mask_BT.sum().to(x_BT.dtype),
    }


class PolicyLoss(Protocol):
    """The shape of every loss in `POLICY_LOSSES`."""

    def __call__(
        self,
        policy_logprobs_BT: Tensor,
        old_logprobs_BT: Tensor,
        ref_logprobs_BT: Tensor | None,
        advantages_B: Tensor,
        completion_mask_BT: Tensor,
        *,
        clip_low: float,
        clip_high: float,
        beta: float,
        kl_estimator: str,
        max_completion_tokens: int,
        importance_weights_BT: Tensor | None = None,
    ) -> LossTerms:
        """Score one micro-batch; see `completion_mean` for the arguments."""
        ...


@dataclass(frozen=True, slots=True)
class _TokenTerms:
    """Per-token pieces that the losses put together; every entry is 0 outside the mask."""

    mask_BT: Tensor
    log_ratio_BT: Tensor
    advantages_B1: Tensor
    weights_BT: Tensor
    penalty_BT: Tensor
    kl_ref_BT: Tensor
    kl_old_BT: Tensor


def _masked(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    # `where` before any arithmetic: 0 · NaN is NaN, in the value and in the gradient.
    return torch.where(mask_BT, values_BT, 0.0)


def _token_terms(
    policy_logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor | None,
    advantages_B: Tensor,
    mask_BT: Tensor,
    beta: float,
    kl_estimator: str,
    importance_weights_BT: Tensor | None,
) -> _TokenTerms:
    if mask_BT.dtype != torch.bool:
        raise ValueError(f"completion_mask_BT is {mask_BT.dtype}; give a bool mask, True at trained tokens")
    if kl_estimator not in KL_ESTIMATORS:
        raise ValueError(f"kl_estimator is {kl_estimator!r}; use one of {', '.join(KL_ESTIMATORS)}")
    if beta != 0 and ref_logprobs_BT is None:
        raise ValueError(f"beta is {beta} but ref_logprobs_BT is None; give the reference's log-probs or beta 0")
    policy_BT = _masked(policy_logprobs_BT, mask_BT)
    log_ratio_BT = policy_BT - _masked(old_logprobs_BT.detach(), mask_BT)
    zeros_BT = torch.zeros_like(policy_BT)
    penalty_BT = kl_ref_BT = zeros_BT
    if ref_logprobs_BT is not None:
        ref_ratio_BT = policy_BT - _masked(ref_logprobs_BT.detach(), mask_BT)
        kl_ref_BT = k3(ref_ratio_BT.detach())
        if beta != 0:
            penalty_BT = beta * KL_ESTIMATORS[kl_estimator](ref_ratio_BT)
    weights_BT = torch.ones_like(zeros_BT)
    if importance_weights_BT is not None:
        weights_BT = torch.where(mask_BT, importance_weights_BT.detach(), 1.0).to(policy_BT.dtype)
    return _TokenTerms(
        mask_BT=mask_BT,
        log_ratio_BT=log_ratio_BT,
        advantages_B1=_masked(advantages_B.to(policy_BT.dtype), mask_BT.any(-1))[:, None],
        weights_BT=weights_BT,
        penalty_BT=penalty_BT,
        kl_ref_BT=kl_ref_BT,
        kl_old_BT=k3(-log_ratio_BT.detach()),
    )


def _clipped_objective(log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """min(ρA, clip(ρ, 1 − clip_low, 1 + clip_high)·A); ρ may stand per token or per sequence."""
    ratio = log_ratio.exp()
    return torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def _terms(
    loss_sum: Tensor, count: Tensor, tokens: _TokenTerms, log_ratio: Tensor, clip_low: float, clip_high: float
) -> LossTerms:
    mask_BT, dtype = tokens.mask_BT, tokens.log_ratio_BT.dtype
    ratio_BT = log_ratio.detach().exp().expand(mask_BT.shape)
    low_BT = mask_BT & (ratio_BT < 1 - clip_low) & (tokens.advantages_B1 < 0)
    high_BT = mask_BT & (ratio_BT > 1 + clip_high) & (tokens.advantages_B1 > 0)
    return LossTerms(
        loss_sum=loss_sum,
        count=count.to(dtype),
        num_tokens=mask_BT.sum().to(dtype),
        metric_sums={
            "kl_ref": tokens.kl_ref_BT.sum(),
            "kl_old": tokens.kl_old_BT.sum(),
            "ratio": _masked(ratio_BT, mask_BT).sum(),
            "clip_low": low_BT.sum().to(dtype),
            "clip_high": high_BT.sum().to(dtype),
        },
    )


def _token_loss(tokens: _TokenTerms, clip_low: float, clip_high: float) -> Tensor:
    objective_BT = _clipped_objective(tokens.log_ratio_BT, tokens.advantages_B1, clip_low, clip_high)
    return _masked(tokens.penalty_BT - tokens.weights_BT * objective_BT, tokens.mask_BT)


def completion_mean(
    policy_logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor | None,
    advantages_B: Tensor,
    completion_mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    beta: float,
    kl_estimator: str,
    max_completion_tokens: int = 0,
    importance_weights_BT: Tensor | None = None,
) -> LossTerms:
    """The paper's loss: mean over the tokens of each completion, then over completions.

    Per completion: −mean_tok[w·min(ρA, clip(ρ)A)] + β·mean_tok[KL].

    Args:
        policy_logprobs_BT: Current log-probs with gradient, nats.
        old_logprobs_BT: The trainer's log-probs before this batch's updates, nats; ρ = exp(policy − old).
        ref_logprobs_BT: Log-probs of the SFT policy, nats; may be None when beta is 0.
        advantages_B: One advantage per completion.
        completion_mask_BT: bool, True at trained tokens. A row without any is no completion and is not counted.
        clip_low: ρ is clipped from below at 1 − clip_low.
        clip_high: ρ is clipped from above at 1 + clip_high.
        beta: Weight of the KL penalty.
        kl_estimator: "k1", "k2" or "k3" of KL(π ‖ π_ref).
        max_completion_tokens: Read by `dr_grpo` alone.
        importance_weights_BT: Weights of the policy term (never of the penalty), see `truncated_importance_weights`.

    Returns:
        `loss_sum` Σ over completions, `count` the number of completions with a trained token.

    Raises:
        ValueError: The mask is not bool, the estimator is unknown, or beta needs a reference that is missing.

    Source: specification section 5 (equals TRL's loss type "grpo").

    Example: completions of 1 and 3 tokens, A = +1 and −1, ρ = 1, beta 0: sum −1 + 1 = 0, count 2.
    """
    tokens = _token_terms(
        policy_logprobs_BT, old_logprobs_BT, ref_logprobs_BT, advantages_B, completion_mask_BT, beta, kl_estimator,
        importance_weights_BT,
    )  # fmt: skip
    lengths_B = completion_mask_BT.sum(-1)
    loss_B = _token_loss(tokens, clip_low, clip_high).sum(-1) / lengths_B.clamp(min=1)
    return _terms(loss_B.sum(), (lengths_B > 0).sum(), tokens, tokens.log_ratio_BT, clip_low, clip_high)


def token_mean(
    policy_logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor | None,
    advantages_B: Tensor,
    completion_mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    beta: float,
    kl_estimator: str,
    max_completion_tokens: int = 0,
    importance_weights_BT: Tensor | None = None,
) -> LossTerms:
    """DAPO's loss: every trained token of the batch weighs the same.

    Args: As for `completion_mean`.

    Returns:
        `loss_sum` Σ over tokens, `count` the number of trained tokens.

    Source: DAPO (arXiv 2503.14476), token-level policy gradient loss; asymmetric clipping through the two bounds.

    Example: completions of 1 and 3 tokens, A = +1 and −1, ρ = 1, beta 0: sum −1 + 3 = 2, count 4, loss 0.5.
    """
    tokens = _token_terms(
        policy_logprobs_BT, old_logprobs_BT, ref_logprobs_BT, advantages_B, completion_mask_BT, beta, kl_estimator,
        importance_weights_BT,
    )  # fmt: skip
    loss_sum = _token_loss(tokens, clip_low, clip_high).sum()
    return _terms(loss_sum, completion_mask_BT.sum(), tokens, tokens.log_ratio_BT, clip_low, clip_high)


def dr_grpo(
    policy_logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor | None,
    advantages_B: Tensor,
    completion_mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    beta: float,
    kl_estimator: str,
    max_completion_tokens: int,
    importance_weights_BT: Tensor | None = None,
) -> LossTerms:
    """Dr. GRPO's loss: token sum over a constant, so that length changes no weight.

    Only the normalisation is decided here; the advantage without division by σ is the caller's choice.

    Args: As for `completion_mean`, and
        max_completion_tokens: The constant, the sampler's limit on new tokens.

    Returns:
        `loss_sum` Σ over tokens, `count` completions × `max_completion_tokens`.

    Raises:
        ValueError: `max_completion_tokens` is below 1, or as for `completion_mean`.

    Source: Dr. GRPO (arXiv 2503.20783), with the constant normaliser of its released code.

    Example: completions of 1 and 3 tokens, A = +1 and −1, ρ = 1, beta 0, limit 4: sum 2, count 8, loss 0.25.
    """
    if max_completion_tokens < 1:
        raise ValueError(f"max_completion_tokens is {max_completion_tokens}; give the sampler's max_new_tokens")
    tokens = _token_terms(
        policy_logprobs_BT, old_logprobs_BT, ref_logprobs_BT, advantages_B, completion_mask_BT, beta, kl_estimator,
        importance_weights_BT,
    )  # fmt: skip
    loss_sum = _token_loss(tokens, clip_low, clip_high).sum()
    count = completion_mask_BT.any(-1).sum() * max_completion_tokens
    return _terms(loss_sum, count, tokens, tokens.log_ratio_BT, clip_low, clip_high)


def gspo(
    policy_logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor | None,
    advantages_B: Tensor,
    completion_mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    beta: float,
    kl_estimator: str,
    max_completion_tokens: int = 0,
    importance_weights_BT: Tensor | None = None,
) -> LossTerms:
    """GSPO's loss: one length-normalised ratio per completion, s = exp(mean_tok(log π − log π_old)).

    Args: As for `completion_mean`; importance weights enter as their mean over the completion's tokens.

    Returns:
        `loss_sum` Σ over completions, `count` completions with a trained token. The metrics `ratio`, `clip_low` and
        `clip_high` count each token with its completion's ratio.

    Source: GSPO (arXiv 2507.18071), equations 5 to 7; the penalty is the token mean of `completion_mean`.

    Example: log-ratios 0.1 and 0.3, A = 1, clip 0.3, beta 0: s = e^0.2, loss −1.2214.
    """
    tokens = _token_terms(
        policy_logprobs_BT, old_logprobs_BT, ref_logprobs_BT, advantages_B, completion_mask_BT, beta, kl_estimator,
        importance_weights_BT,
    )  # fmt: skip
    lengths_B1 = completion_mask_BT.sum(-1, keepdim=True)
    log_ratio_B1 = tokens.log_ratio_BT.sum(-1, keepdim=True) / lengths_B1.clamp(min=1)
    objective_B1 = _clipped_objective(log_ratio_B1, tokens.advantages_B1, clip_low, clip_high)
    loss_BT = _masked(tokens.penalty_BT - tokens.weights_BT * objective_B1, completion_mask_BT)
    loss_sum = (loss_BT.sum(-1, keepdim=True) / lengths_B1.clamp(min=1)).sum()
    return _terms(loss_sum, (lengths_B1 > 0).sum(), tokens, log_ratio_B1, clip_low, clip_high)


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "completion_mean": completion_mean,
    "token_mean": token_mean,
    "dr_grpo": dr_grpo,
    "gspo": gspo,
}
"""Configuration name (`grpo.loss`) to loss."""
