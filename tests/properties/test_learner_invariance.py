"""Loss and gradient do not depend on how a batch is cut, padded, ordered or shared: float64, 1e-10.

Everything the learner adds up is checked: the loss sum, the count, every metric sum and the gradient of every adapter
weight, from token ids to the end, on a small model with grouped-query attention.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from writer_rl.trainer.batching import MicroBatch, TrainSample, make_microbatch, pack_microbatches
from writer_rl.trainer.logprobs import completion_logprobs
from writer_rl.trainer.losses import POLICY_LOSSES, truncated_importance_weights

NUM_ROWS, PAD = 8, 0
SETTINGS = {"clip_low": 0.1, "clip_high": 0.15, "beta": 0.1, "kl_estimator": "k3", "max_completion_tokens": 12}


@pytest.fixture(scope="module")
def policy():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=2, lora_alpha=4, target_modules="all-linear"))
    model = model.double()
    for parent in list(model.modules()):  # the norm of transformers rounds to float32 inside
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                norm = torch.nn.RMSNorm(child.weight.numel(), eps=child.variance_epsilon, dtype=torch.float64)
                parent.register_module(name, norm.requires_grad_(False))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture(scope="module")
def samples() -> list[TrainSample]:
    draw = random.Random(4)
    system = [draw.randrange(1, 61) for _ in range(6)]
    rows = []
    for group in range(2):
        prompt = system + [draw.randrange(1, 61) for _ in range(2 + 3 * group)]
        for trajectory in range(NUM_ROWS // 2):
            # Later trajectories have an own memory in their prompt, as from the second segment on.
            own = prompt if trajectory < 2 else [*prompt, trajectory, 5]
            completion = tuple(draw.randrange(0, 61) for _ in range(draw.randrange(1, 9)))
            logprobs = tuple(-4 * draw.random() for _ in completion)
            rows.append(TrainSample(tuple(own), completion, logprobs, draw.uniform(-2, 2), f"d{group}", trajectory))
    return rows


@pytest.fixture(scope="module")
def fixed_logprobs(samples) -> dict[str, list[list[float]]]:
    """Old and reference log-probs per sample, near but not equal to the policy's, so that some ratios are clipped."""
    draw = random.Random(8)
    return {kind: [[-3 - 2 * draw.random() for _ in s.completion_ids] for s in samples] for kind in ("old", "ref")}


def _placed(batch: MicroBatch, per_sample: list[list[float]]) -> torch.Tensor:
    values = [x for index in batch.sample_indices for x in per_sample[index]]
    out_BT = torch.full(batch.ids_BT.shape, float("nan"), dtype=torch.float64)  # NaN: padding must not matter
    out_BT[batch.completion_mask_BT] = torch.tensor(values, dtype=torch.float64)
    return out_BT


def _total(policy, batches: list[MicroBatch], fixed, name: str) -> tuple[Counter, dict[str, torch.Tensor]]:
    """Everything a learner accumulates over micro-batches."""
    policy.zero_grad()
    sums: Counter = Counter()
    for batch in batches:
        policy_BT = completion_logprobs(policy, batch, temperature=0.8, chunk_tokens=7)
        old_BT, mask_BT = _placed(batch, fixed["old"]), batch.completion_mask_BT
        old_BT = policy_BT.detach() * 0.9 + old_BT * 0.1
        weights_BT = truncated_importance_weights(old_BT, batch.sampling_logprobs_BT.double(), mask_BT, cap=2.0)
        terms = POLICY_LOSSES[name](
            policy_BT, old_BT, _placed(batch, fixed["ref"]), batch.advantages_B.double(), mask_BT, **SETTINGS,
            importance_weights_BT=weights_BT,
        )  # fmt: skip
        terms.loss_sum.backward()
        sums.update({"loss_sum": terms.loss_sum.item(), "count": terms.count.item(), "tokens": terms.num_tokens.item()})
        sums.update({k: v.item() for k, v in terms.metric_sums.items()})
    return sums, {n: p.grad.clone() for n, p in policy.named_parameters() if p.requires_grad}


def _assert_same(got, want) -> None:
    assert set(got[0]) == set(want[0])
    for key, value in want[0].items():
        assert got[0][key] == pytest.approx(value, abs=1e-10), key
    for name, gradient in want[1].items():
        torch.testing.assert_close(got[1][name], gradient, rtol=0, atol=1e-10)


@pytest.fixture(scope="module")
def whole_batch(policy, samples, fixed_logprobs) -> dict:
    """One micro-batch with every row, no sharing: the plain computation."""
    batch = make_microbatch(samples, range(NUM_ROWS), PAD, share_prefix=False)
    totals = {name: _total(policy, [batch], fixed_logprobs, name) for name in POLICY_LOSSES}
    assert sum(totals["token_mean"][0][k] for k in ("clip_low", "clip_high")) > 0, "no ratio is clipped: a weak test"
    return totals


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 40, 1000])
def test_packing(policy, samples, fixed_logprobs, whole_batch, name, share_prefix, max_tokens):
    batches = pack_microbatches(samples, max_tokens, PAD, share_prefix=share_prefix, overhead_tokens=0)
    assert max_tokens != 1 or len(batches) == NUM_ROWS
    _assert_same(_total(policy, batches, fixed_logprobs, name), whole_batch[name])


@given(st.permutations(range(NUM_ROWS)), st.sets(st.integers(1, NUM_ROWS - 1)), st.booleans(), st.integers(0, 5))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_cut_order_and_padding(policy, samples, fixed_logprobs, whole_batch, order, cuts, share_prefix, padding):
    edges = [0, *sorted(cuts), NUM_ROWS]
    batches = [
        _padded(make_microbatch(samples, order[a:b], PAD, share_prefix=share_prefix), padding)
        for a, b in itertools.pairwise(edges)
    ]
    for name in ("completion_mean", "gspo"):
        _assert_same(_total(policy, batches, fixed_logprobs, name), whole_batch[name])


def _padded(batch: MicroBatch, columns: int) -> MicroBatch:
    def right(tensor_BT: torch.Tensor, value: float | bool) -> torch.Tensor:
        return torch.nn.functional.pad(tensor_BT, (0, columns), value=value)

    return MicroBatch(
        batch.prefix_ids_P, right(batch.ids_BT, 17), right(batch.attention_mask_BT, False),
        right(batch.completion_mask_BT, False), batch.advantages_B, right(batch.sampling_logprobs_BT, float("nan")),
        batch.sample_indices,
    )  # fmt: skip


def test_ranks_are_summed_like_micro_batches(policy, samples, fixed_logprobs, whole_batch):
    """Two ranks, one of them with a single row, and one with none that is trained: Σ/Σ is the whole batch's."""
    parts = [range(7), [7]]
    totals = [
        _total(policy, [make_microbatch(samples, rows, PAD)], fixed_logprobs, "completion_mean") for rows in parts
    ]
    joint: Counter = Counter()
    for sums, _ in totals:
        joint.update(sums)
    gradient = {n: totals[0][1][n] + totals[1][1][n] for n in totals[0][1]}
    _assert_same((joint, gradient), whole_batch["completion_mean"])


def test_outputs_of_micro_batches_are_not_kept_attached(policy, samples, fixed_logprobs):
    batch = make_microbatch(samples, range(NUM_ROWS), PAD)
    policy_BT = completion_logprobs(policy, batch)
    terms = POLICY_LOSSES["completion_mean"](
        policy_BT, policy_BT, policy_BT, batch.advantages_B.double(), batch.completion_mask_BT, **SETTINGS
    )
    assert terms.loss_sum.requires_grad
    kept = [terms.count, terms.num_tokens, *terms.metric_sums.values()]
    assert not any(value.requires_grad for value in kept)
