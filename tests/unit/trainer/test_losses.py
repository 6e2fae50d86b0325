"""The loss functions against hand-derived numbers."""

from __future__ import annotations

import math

import pytest
import torch

from writer_rl.trainer.losses import (
    KL_ESTIMATORS,
    POLICY_LOSSES,
    k3,
    sampler_mismatch_sums,
    truncated_importance_weights,
)

PLAIN = {"clip_low": 0.2, "clip_high": 0.2, "beta": 0.0, "kl_estimator": "k3", "max_completion_tokens": 4}


def _rows(*lengths: int) -> torch.Tensor:
    """Right-padded bool mask with these numbers of trained tokens."""
    return torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]


def _double(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "loss_sum", "count"),
    [
        # Lengths 1 and 3, A = +1 and −1, ratio 1. Per completion: −1 and +1. Per token: −1 and +1, +1, +1.
        ("completion_mean", 0.0, 2.0),
        ("token_mean", 2.0, 4.0),  # 2/4 = 0.5; a mean of per-row means would say 0
        ("dr_grpo", 2.0, 8.0),  # 2 completions × limit 4
        ("gspo", 0.0, 2.0),
    ],
)
def test_sum_and_count_of_lengths_one_and_three(name, loss_sum, count):
    logprobs = torch.zeros(2, 3, dtype=torch.float64)
    terms = POLICY_LOSSES[name](logprobs, logprobs, None, _double([1, -1]), _rows(1, 3), **PLAIN)
    assert terms.loss_sum.item() == pytest.approx(loss_sum, abs=1e-15)
    assert terms.count.item() == count
    assert terms.num_tokens.item() == 4.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.5, 1.0, -1.2, 0.0),  # above, good: held at 1 + ε, no gradient
        (1.5, -1.0, 1.5, 1.5),  # above, bad: not held, gradient −ρA
        (0.5, 1.0, -0.5, -0.5),  # below, good: not held
        (0.5, -1.0, 0.8, 0.0),  # below, bad: held at 1 − ε
        (1.1, 2.0, -2.2, -2.2),  # inside
        (0.9, -2.0, 1.8, 1.8),
    ],
)
@pytest.mark.parametrize("name", ["completion_mean", "token_mean", "gspo"])
def test_clipping(name, ratio, advantage, loss, gradient):
    policy = _double([[math.log(ratio)]]).requires_grad_()
    terms = POLICY_LOSSES[name](policy, _double([[0.0]]), None, _double([advantage]), _rows(1), **PLAIN)
    terms.loss_sum.backward()
    assert terms.loss_sum.item() == pytest.approx(loss, rel=1e-12)
    assert policy.grad.item() == pytest.approx(gradient, rel=1e-12, abs=1e-15)
    assert terms.metric_sums["clip_high"].item() == float(ratio == 1.5 and advantage > 0)
    assert terms.metric_sums["clip_low"].item() == float(ratio == 0.5 and advantage < 0)
    assert terms.metric_sums["ratio"].item() == pytest.approx(ratio)


def test_clip_bounds_are_independent():
    policy = _double([[math.log(1.25), math.log(0.75)]])
    terms = POLICY_LOSSES["token_mean"](
        policy, torch.zeros_like(policy), None, _double([1.0]), _rows(2), **PLAIN | {"clip_high": 0.28}
    )
    assert terms.loss_sum.item() == pytest.approx(-2.0)  # 1.25 is inside 1.28, 0.75 with A > 0 is never held
    assert terms.metric_sums["clip_high"].item() == 0


def test_gradient_at_ratio_one_is_reinforce():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    ids, mask, advantages = torch.tensor([[1, 2, 3], [4, 5, 6]]), _rows(3, 2), _double([0.7, -1.3])
    logprobs = logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
    ours = POLICY_LOSSES["completion_mean"](logprobs, logprobs, None, advantages, mask, **PLAIN)
    plain = -((logprobs * mask).sum(-1) / mask.sum(-1) * advantages).sum()
    (got,) = torch.autograd.grad(ours.loss_sum, logits, retain_graph=True)
    (want,) = torch.autograd.grad(plain, logits)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def test_gspo_uses_one_ratio_per_completion():
    policy = _double([[0.1, 0.3]]).requires_grad_()
    args = (policy, torch.zeros(1, 2), None, _double([1.0]), _rows(2))
    terms = POLICY_LOSSES["gspo"](*args, **PLAIN | {"clip_high": 0.3})
    terms.loss_sum.backward()
    assert terms.loss_sum.item() == pytest.approx(-math.exp(0.2))
    assert policy.grad.tolist() == [pytest.approx([-math.exp(0.2) / 2] * 2)]
    # e^0.2 = 1.2214 is above 1.2: both tokens lose their gradient, though e^0.1 alone would have kept it.
    assert POLICY_LOSSES["gspo"](*args, **PLAIN).metric_sums["clip_high"].item() == 2


@pytest.mark.parametrize(
    ("name", "value", "gradient"), [("k1", 0.1, 1.0), ("k2", 0.005, 0.1), ("k3", 0.0048374, 0.0951626)]
)
def test_kl_estimators(name, value, gradient):
    x = _double([0.1]).requires_grad_()
    estimate = KL_ESTIMATORS[name](x)
    estimate.sum().backward()
    assert estimate.item() == pytest.approx(value, abs=1e-7)
    assert x.grad.item() == pytest.approx(gradient, abs=1e-7)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_beta_changes_value_and_gradient(name):
    # One token, log π − log π_ref = 0.1, ratio 1, A = 0: what is left is β·k3.
    policy = _double([[-1.0]]).requires_grad_()
    terms = POLICY_LOSSES[name](
        policy,
        policy,
        _double([[-1.1]]),
        _double([0.0]),
        _rows(1),
        **PLAIN | {"beta": 10.0, "max_completion_tokens": 1},
    )
    terms.loss_sum.backward()
    assert terms.loss_sum.item() == pytest.approx(0.048374, abs=1e-6)
    assert policy.grad.item() == pytest.approx(0.951626, abs=1e-6)
    assert terms.metric_sums["kl_ref"].item() == pytest.approx(0.0048374, abs=1e-7)


def test_kl_of_the_first_step_is_zero():
    logprobs = -torch.rand(2, 3)
    terms = POLICY_LOSSES["completion_mean"](logprobs, logprobs, logprobs, torch.ones(2), _rows(1, 3), **PLAIN)
    assert terms.metric_sums["kl_ref"].item() == 0
    assert terms.metric_sums["kl_old"].item() == 0
    assert terms.metric_sums["ratio"].item() / terms.num_tokens.item() == 1


def test_kl_old_is_the_divergence_from_old_to_new():
    # Tokens come from the old policy; log old − log new = 0.1.
    terms = POLICY_LOSSES["token_mean"](_double([[-1.1]]), _double([[-1.0]]), None, _double([1.0]), _rows(1), **PLAIN)
    assert terms.metric_sums["kl_old"].item() == pytest.approx(k3(_double([0.1])).item())


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_masked_positions_have_no_influence(name, poison):
    torch.manual_seed(1)
    mask = _rows(1, 3, 2)
    clean = [torch.randn(3, 3, dtype=torch.float64) for _ in range(3)]
    weights = torch.rand(3, 3, dtype=torch.float64)
    results = []
    for filler in (0.0, poison):
        policy, old, ref, weights_BT = (torch.where(mask, x, filler) for x in (*clean, weights))
        policy.requires_grad_()
        terms = POLICY_LOSSES[name](
            policy, old, ref, _double([1, -2, 0.5]), mask, **PLAIN | {"beta": 0.1}, importance_weights_BT=weights_BT
        )
        terms.loss_sum.backward()
        results.append((terms, policy.grad))
    (first, first_grad), (second, second_grad) = results
    assert torch.isfinite(first.loss_sum)
    assert first.loss_sum.item() == second.loss_sum.item()
    assert torch.equal(first_grad, second_grad)
    assert torch.equal(first_grad[~mask], torch.zeros_like(first_grad[~mask]))
    assert {k: v.item() for k, v in first.metric_sums.items()} == {k: v.item() for k, v in second.metric_sums.items()}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_all_masked_batch_is_a_finite_zero_with_gradient(name):
    policy = torch.full((2, 3), math.nan, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    terms = POLICY_LOSSES[name](policy, policy, policy, torch.tensor([math.nan, 1.0]), mask, **PLAIN | {"beta": 0.1})
    terms.loss_sum.backward()
    assert terms.loss_sum.item() == 0
    assert terms.count.item() == 0
    assert torch.equal(policy.grad, torch.zeros(2, 3))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_masked_row_leaves_numerator_and_denominator(name):
    logprobs = torch.zeros(3, 3)
    with_row = POLICY_LOSSES[name](logprobs, logprobs, None, torch.tensor([1.0, -1.0, 5.0]), _rows(1, 3, 0), **PLAIN)
    without = POLICY_LOSSES[name](logprobs[:2], logprobs[:2], None, torch.tensor([1.0, -1.0]), _rows(1, 3), **PLAIN)
    assert with_row.loss_sum.item() == without.loss_sum.item()
    assert with_row.count.item() == without.count.item()


def test_importance_weights_scale_the_policy_term_alone():
    weights = truncated_importance_weights(
        _double([[-1, -1, 0]]), _double([[-2, -1, math.nan]]), _rows(2, 3)[:1], cap=2
    )
    assert weights.tolist() == [[2.0, 1.0, 1.0]]  # e^1 = 2.718 is cut at 2; the masked place says 1
    logprobs = torch.zeros(1, 3, dtype=torch.float64)
    terms = POLICY_LOSSES["token_mean"](
        logprobs, logprobs, logprobs - 0.1, _double([1.0]), _rows(2, 3)[:1], **PLAIN | {"beta": 1.0},
        importance_weights_BT=weights,
    )  # fmt: skip
    assert terms.loss_sum.item() == pytest.approx(-3 + 2 * 0.0048374, abs=1e-6)
    with pytest.raises(ValueError, match="cap"):
        truncated_importance_weights(logprobs, logprobs, _rows(3), cap=0)


def test_mean_sampler_ratio_is_the_mass_that_top_p_kept():
    # π = (.5, .3, .15, .05); top-p .95 keeps the first three and renormalises them by 1/.95.
    policy, kept = _double([0.5, 0.3, 0.15]), 0.95
    engine = policy / kept
    sums = [
        sampler_mismatch_sums(policy.log()[None, [i]], engine.log()[None, [i]], _rows(1))["mismatch_ratio"].item()
        for i in range(3)
    ]
    assert sum(p * s for p, s in zip(engine.tolist(), sums, strict=True)) == pytest.approx(0.95)
    same = sampler_mismatch_sums(policy.log()[None], policy.log()[None], _rows(3))
    assert [same[k].item() for k in ("mismatch_abs", "mismatch_kl", "mismatch_ratio", "num_tokens")] == [0, 0, 3, 3]


def test_bad_arguments_name_the_fix():
    logprobs = torch.zeros(1, 1)
    for changes, mask, message in (
        ({"beta": 0.1}, _rows(1), "reference"),
        ({"kl_estimator": "k4"}, _rows(1), "k1, k2, k3"),
        ({}, torch.ones(1, 1), "bool"),
    ):
        with pytest.raises(ValueError, match=message):
            POLICY_LOSSES["completion_mean"](logprobs, logprobs, None, torch.ones(1), mask, **PLAIN | changes)
    with pytest.raises(ValueError, match="max_new_tokens"):
        POLICY_LOSSES["dr_grpo"](
            logprobs, logprobs, None, torch.ones(1), _rows(1), **PLAIN | {"max_completion_tokens": 0}
        )
