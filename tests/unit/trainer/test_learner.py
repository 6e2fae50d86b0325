"""The learner end to end on a tiny random model: what is divided by what, when a step is made, and what is saved."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from writer_rl.configs.schema import ContractConfig, GrpoConfig, LoraSettings, ModelConfig, RunConfig, SamplerConfig
from writer_rl.rollouts.generator import SamplingSpec, StalePolicyError
from writer_rl.rollouts.replay import ReplayGenerator
from writer_rl.rollouts.transformers_engine import TransformersGenerator
from writer_rl.trainer.adapter_sync import AdapterSync
from writer_rl.trainer.advantages import normalise_group
from writer_rl.trainer.batching import TrainSample
from writer_rl.trainer.learner import Learner, NonFiniteLossError, split_minibatches
from writer_rl.trainer.policy import read_weights

SAMPLER = SamplerConfig(
    engine="transformers",
    sync="merged",
    dtype="float32",
    temperature=1.0,
    top_p=1.0,
    max_new_tokens=16,
    max_model_len=512,
)
LORA = LoraSettings(r=4, alpha=8)


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> Iterator[None]:
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture
def make(tiny_chat_dir):
    def learner(**grpo) -> Learner:
        settings = {"epochs": 1, "minibatches": 1, "learning_rate": 1e-2, "beta": 0.0, "loss": "completion_mean"} | grpo
        config = RunConfig(
            model=ModelConfig(path="unused", lora=LORA), grpo=GrpoConfig(**settings), sampler=SAMPLER, seed=1,
            contract=ContractConfig(max_prompt_tokens=256),
        )  # fmt: skip
        return Learner(config, tiny_chat_dir)

    return learner


def sample(
    length: int, advantage: float, dialogue: str = "d", index: int = 0, prompt: int = 30, segment: int = 0
) -> TrainSample:
    draw = random.Random(f"{dialogue}{segment}")
    own = random.Random(f"{dialogue}{segment}/{index}")
    ids = tuple(own.randrange(256) for _ in range(length))
    return TrainSample(
        tuple(draw.randrange(256) for _ in range(prompt)), ids, (-5.0,) * length, advantage, dialogue, index, segment
    )


def batch(num: int = 6, seed: int = 0, prompt: int = 30) -> list[TrainSample]:
    draw = random.Random(seed)
    return [sample(draw.randrange(1, 9), draw.uniform(-2, 2), f"d{i % 3}", i, prompt) for i in range(num)]


@torch.no_grad()
def set_adapter(learner: Learner, scale: float) -> None:
    draw = torch.Generator().manual_seed(0)
    for name, parameter in learner.policy.named_parameters():
        if "lora_B" in name:
            parameter.copy_(scale * torch.randn(parameter.shape, generator=draw))


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([t.flatten() for t in learner.adapter().values()])


ONE_AND_THREE = [sample(1, 1.0, "a"), sample(3, -1.0, "b")]


@pytest.mark.parametrize(("loss", "value"), [("token_mean", 0.5), ("completion_mean", 0.0), ("dr_grpo", 2 / 32)])
@pytest.mark.parametrize("micro_batch_tokens", [64, 4096])
def test_loss_of_lengths_one_and_three(make, loss, value, micro_batch_tokens):
    """Fault 1: token mean (−1 + 3) / 4 = 0.5 however the rows are cut; Dr. GRPO (−1 + 3) / (2 · 16); mean per completion 0."""
    learner = make(loss=loss, micro_batch_tokens=micro_batch_tokens)
    assert len(learner._pack(ONE_AND_THREE)) == (2 if micro_batch_tokens == 64 else 1)
    metrics = learner.update(ONE_AND_THREE, 0)
    assert metrics["policy/loss"] == pytest.approx(value, abs=1e-6)
    assert metrics["group/num_trained_samples"] == 2.0


@pytest.mark.parametrize("loss", ["token_mean", "completion_mean"])
def test_gradient_does_not_depend_on_micro_batches_or_row_order(make, loss):
    """Fault 1 for the gradient: its norm, and every entry of the gradient that the optimiser would be given."""
    samples = batch(8, prompt=64)
    found = []
    for rows, tokens in ((samples, 4096), (samples[::-1], 4096), (samples, 64)):
        learner = make(loss=loss, micro_batch_tokens=tokens, max_grad_norm=1e9, beta=0.1)
        set_adapter(learner, 0.05)
        part = learner._prepare(rows)
        _, sums, norm = learner._accumulate(part)
        gradient = torch.cat([p.grad.flatten() for p in learner.policy.parameters() if p.requires_grad])
        found.append((len(part), sums["num_tokens"], norm, gradient))
    (whole, tokens, norm, gradient), *others = found
    assert (whole, others[-1][0]) == (3, 8)  # one micro-batch a prompt, and one a row
    assert norm > 0.1
    for _, other_tokens, other_norm, other in others:
        assert other_tokens == tokens
        assert other_norm == pytest.approx(norm, rel=1e-5)
        torch.testing.assert_close(other, gradient, rtol=1e-4, atol=1e-6)


def test_advantage_zero_changes_nothing(make):
    """Fault 4, at the other end: samples of a constant group (advantage 0) move no weight."""
    learner = make()
    set_adapter(learner, 0.05)
    before = weights(learner)
    metrics = learner.update([sample(4, 0.0), sample(2, 0.0, index=1)], 0)
    assert metrics["policy/loss"] == metrics["policy/grad_norm"] == 0.0
    assert torch.equal(weights(learner), before)


def test_number_of_steps_follows_from_the_configuration(make):
    """Fault 6: 2 epochs × 2 minibatches are 4 steps for 2 rows and for 40, and the rate follows the update's number."""
    rates = []
    for num_rows in (2, 7, 40):
        learner = make(epochs=2, minibatches=2, kl_guard="off", schedule="linear", num_updates=10)
        metrics = learner.update([sample(3, (-1.0) ** i, f"d{i}", i) for i in range(num_rows)], 5)
        assert learner.num_optimiser_steps == metrics["policy/optimiser_steps"] == 4
        assert metrics["policy/skipped_steps"] == 0
        rates.append(metrics["policy/learning_rate"])
    assert rates == [pytest.approx(0.005)] * 3


def test_empty_minibatches_are_counted_as_skipped(make):
    learner = make(epochs=2, minibatches=4, kl_guard="off")
    metrics = learner.update([sample(3, 1.0, "a"), sample(3, -1.0, "a", 1)], 0)
    assert (metrics["policy/optimiser_steps"], metrics["policy/skipped_steps"]) == (2, 6)
    assert learner.num_skipped_steps == 6


def test_learning_rate_schedules(make):
    warm = make(warmup_updates=4, num_updates=12)
    assert [warm._learning_rate(u) for u in (0, 1, 3, 4, 11)] == pytest.approx([0.0025, 0.005, 0.01, 0.01, 0.01])
    line = make(schedule="linear", num_updates=10)
    assert [line._learning_rate(u) for u in (0, 5, 9, 10)] == pytest.approx([0.01, 0.005, 0.001, 0.001])


def test_the_first_step_is_on_policy(make):
    """Fault 10: nothing has moved, so the ratio is 1 and the KL to the SFT policy 0, exactly."""
    metrics = make(beta=0.1).update(batch(), 0)
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-7)
    assert metrics["policy/kl_ref_nats"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["policy/kl_old_nats"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["policy/clip_low_frac"] == metrics["policy/clip_high_frac"] == 0.0


@pytest.mark.parametrize("importance_cap", [0.0, 2.0])
def test_a_single_step_saves_the_pass_for_old_logprobs_and_changes_nothing(make, importance_cap):
    """With one step per update π_old is the policy of that step: two forward passes a micro-batch instead of three."""
    found = []
    for single_step in (True, False):
        learner = make(beta=0.1, importance_cap=importance_cap)
        assert learner._single_step
        learner._single_step = single_step
        set_adapter(learner, 0.05)
        calls = []
        learner._scorer.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        metrics = learner.update(batch(), 0)
        steady = {key: value for key, value in metrics.items() if not key.startswith(("time/", "throughput/"))}
        found.append((len(calls), steady, weights(learner)))
    (calls, metrics, moved), (other_calls, other_metrics, other_moved) = found
    assert 3 * calls == 2 * other_calls
    assert metrics == pytest.approx(other_metrics, rel=1e-6, abs=1e-9)
    assert torch.equal(moved, other_moved)
    assert not make(minibatches=2)._single_step
    assert not make(epochs=2)._single_step


def test_later_updates_are_on_policy_again_but_no_longer_at_the_reference(make):
    learner = make(beta=0.1, learning_rate=5e-2)
    learner.update(batch(), 0)
    metrics = learner.update(batch(seed=1), 1)
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["policy/kl_old_nats"] == pytest.approx(0.0, abs=1e-7)
    assert metrics["policy/kl_ref_nats"] > 1e-4


def test_beta_changes_the_gradient_and_pulls_to_the_reference(make):
    """Fault 9: with advantage 0 the penalty alone acts; its step brings the policy nearer to the reference."""
    rows = [sample(6, 0.0, f"d{i}") for i in range(4)]
    still = make(beta=0.0)
    set_adapter(still, 0.1)
    assert still.update(rows, 0)["policy/grad_norm"] == 0.0
    learner = make(beta=0.1, learning_rate=5e-3)
    set_adapter(learner, 0.1)
    first, second = (learner.update(rows, update) for update in range(2))
    assert first["policy/grad_norm"] > 0
    assert 0 < second["policy/kl_ref_nats"] < first["policy/kl_ref_nats"]
    assert first["policy/loss"] == pytest.approx(0.1 * fmean(_kl_per_row(make, rows)), rel=1e-5)


def _kl_per_row(make, rows) -> list[float]:
    """mean_tok of e^(−x) + x − 1 per row, from log-probs of the adapted and of the plain model."""
    plain, moved = make(), make()
    set_adapter(moved, 0.1)
    pairs = zip(moved.logprobs(rows), plain.logprobs(rows), strict=True)
    return [
        fmean(
            float(torch.expm1(torch.tensor(r - p, dtype=torch.float64))) + p - r for p, r in zip(ours, ref, strict=True)
        )
        for ours, ref in pairs
    ]


def test_logprobs_come_back_in_the_samples_order(make):
    learner = make(micro_batch_tokens=80)
    rows = batch(7)
    found = learner.logprobs(rows)
    assert [len(values) for values in found] == [len(row.completion_ids) for row in rows]
    single = [learner.logprobs([row])[0] for row in rows]
    assert [v for row in found for v in row] == pytest.approx([v for row in single for v in row], abs=1e-5)


def test_steps_raise_what_was_good_and_lower_what_was_bad(make):
    learner = make(learning_rate=5e-3)
    rows = [sample(5, 1.0, index=0), sample(5, -1.0, index=1)]
    before = [sum(values) for values in learner.logprobs(rows)]
    learner.update(rows, 0)
    after = [sum(values) for values in learner.logprobs(rows)]
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_the_version_always_rises(make, tiny_chat_dir):
    """Fault 14: after a whole update, after one that the guard stopped, and after one without a sample; so do the syncs."""
    generator = ReplayGenerator(lambda prompt_ids, seed: "x")
    with AdapterSync(tiny_chat_dir, SAMPLER, LORA, device="cpu") as sync:
        learner = make(epochs=3, learning_rate=0.2, kl_guard="old", kl_guard_nats=1e-4)
        sync.push(learner.adapter(), learner.policy_version, generator)
        assert generator.policy_version == 0
        for update, rows in enumerate((batch(), [], batch(seed=2))):
            metrics = learner.update(rows, update)
            sync.push(learner.adapter(), learner.policy_version, generator)
            assert learner.policy_version == update + 1 == generator.policy_version
            assert metrics["policy/skipped_steps"] == (3 if not rows else 2)
        assert sync.num_syncs == len({w.version for w in generator.loaded}) == 4
        with pytest.raises(StalePolicyError):  # fault 17: who asks for an older version is refused
            generator.submit([1], SamplingSpec(), 0, expected_version=2)


def test_a_stopped_update_keeps_its_first_step(make):
    learner = make(epochs=3, learning_rate=0.2, kl_guard="old", kl_guard_nats=1e-4)
    before = weights(learner)
    metrics = learner.update(batch(), 0)
    assert (metrics["policy/optimiser_steps"], learner.num_optimiser_steps, learner.num_skipped_steps) == (1, 1, 2)
    assert metrics["policy/kl_old_last_nats"] > 1e-4
    assert metrics["policy/kl_old_nats"] == pytest.approx(0.0, abs=1e-9)  # of the step that was made
    assert not torch.equal(weights(learner), before)
    assert all(p.grad is None for p in learner.policy.parameters())


def test_guards_on_old_policy_and_on_reference(make):
    """The paper's guard on the reference stops every step of a policy that has drifted; the fixed one does not."""
    for guard, steps in (("old", 1), ("off", 1), ("reference", 0)):
        learner = make(kl_guard=guard, kl_guard_nats=0.02)
        set_adapter(learner, 0.2)
        before = weights(learner)
        metrics = learner.update(batch(), 0)
        assert metrics["policy/optimiser_steps"] == steps, guard
        assert metrics["policy/skipped_steps"] == 1 - steps
        assert torch.equal(weights(learner), before) == (steps == 0)
        if not steps:
            # Fault 32: nothing was stepped, so no loss, norm or ratio is reported, not even as 0.
            assert not {"policy/loss", "policy/grad_norm", "policy/ratio_mean", "policy/kl_ref_nats"} & set(metrics)


def test_an_update_without_samples_reports_nothing_it_did_not_measure(make):
    metrics = make().update([], 0)
    assert not [key for key in metrics if "loss" in key or "nats" in key or "ratio" in key or "grad_norm" in key]
    assert metrics["policy/skipped_steps"] == 1.0


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_before_the_step(make, poison):
    learner = make(minibatches=1)
    learner.update(batch(), 0)
    before, version, steps = weights(learner), learner.policy_version, learner.num_optimiser_steps
    with pytest.raises(NonFiniteLossError, match="nothing was stepped"):
        learner.update([sample(3, poison), sample(3, -1.0, index=1)], 1)
    assert torch.equal(weights(learner), before)
    assert (learner.policy_version, learner.num_optimiser_steps) == (version, steps)


def test_mismatch_to_the_sampler_is_reported(make):
    """Faults 11 and 16: Σ/Σ over all tokens. The engine claims 0.25 nats less than the learner finds, everywhere."""
    learner = make(micro_batch_tokens=80)
    rows = batch(5)
    shifted = [
        TrainSample(
            r.prompt_ids,
            r.completion_ids,
            tuple(v - 0.25 for v in values),
            r.advantage,
            r.dialogue_id,
            r.trajectory_index,
        )
        for r, values in zip(rows, learner.logprobs(rows), strict=True)
    ]
    metrics = learner.update(shifted, 0)
    assert metrics["sampler/mismatch_abs_nats"] == pytest.approx(0.25, abs=1e-5)
    assert metrics["sampler/ratio_mean"] == pytest.approx(torch.tensor(0.25).exp().item(), abs=1e-4)


def test_importance_weights_scale_the_policy_term(make):
    """A cap of 1 holds every weight e^0.25 at 1; a cap of 10 lets it through: the loss grows by that factor."""
    rows = batch(5)
    reference = make().logprobs(rows)
    shifted = [
        TrainSample(
            r.prompt_ids,
            r.completion_ids,
            tuple(v - 0.25 for v in values),
            r.advantage,
            r.dialogue_id,
            r.trajectory_index,
        )
        for r, values in zip(rows, reference, strict=True)
    ]
    losses = [make(importance_cap=cap).update(shifted, 0)["policy/loss"] for cap in (0.0, 1.0, 10.0)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0] * torch.tensor(0.25).exp().item(), rel=1e-4)


def test_save_and_load_continue_bit_for_bit(make, tmp_path: Path):
    """Fault 24 for the learner's part: k updates + save + load + k updates = 2k updates, the optimiser's state included."""
    settings = {"epochs": 2, "minibatches": 2, "beta": 0.1, "kl_guard": "off"}
    straight = make(**settings)
    for update in range(4):
        straight.update(batch(8, seed=update), update)
    first = make(**settings)
    for update in range(2):
        first.update(batch(8, seed=update), update)
    first.save(tmp_path)
    resumed = make(**settings)
    resumed.load(tmp_path, policy_version=2, num_optimiser_steps=first.num_optimiser_steps)
    assert torch.equal(weights(resumed), weights(first))
    for update in range(2, 4):
        resumed.update(batch(8, seed=update), update)
    assert torch.equal(weights(resumed), weights(straight))
    assert (resumed.policy_version, resumed.num_optimiser_steps) == (4, 16)
    straight.save(tmp_path / "straight")
    resumed.save(tmp_path / "resumed")
    ours, theirs = (load_file(tmp_path / name / "optimiser.safetensors") for name in ("straight", "resumed"))
    assert {key.rpartition("|")[2] for key in ours} == {"step", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert set(ours) == set(theirs)


def test_forgetting_the_optimiser_would_be_seen(make, tmp_path: Path):
    learner = make()
    learner.update(batch(), 0)
    learner.save(tmp_path)
    whole, forgetful = make(), make()
    for other in (whole, forgetful):
        other.load(tmp_path, policy_version=1, num_optimiser_steps=1)
    forgetful._optimiser.state.clear()
    for other in (whole, forgetful):
        other.update(batch(seed=1), 1)
    assert (weights(whole) - weights(forgetful)).abs().max() > 1e-4


def test_a_learner_that_never_stepped_can_be_saved(make, tmp_path: Path):
    learner = make()
    learner.save(tmp_path)
    other = make()
    other.load(tmp_path, policy_version=0, num_optimiser_steps=0)
    rows = batch()
    learner.update(rows, 0)
    other.update(rows, 0)
    assert torch.equal(weights(learner), weights(other))


def test_the_base_is_never_touched(make, tiny_chat_dir):
    learner = make()
    learner.update(batch(), 0)
    held = {k.replace(".base_layer", ""): v for k, v in learner.policy.base_model.model.state_dict().items()}
    for name, weight in read_weights(tiny_chat_dir).items():
        assert torch.equal(held[name], weight), name


def test_minibatches_keep_the_samples_of_a_position_together():
    rows = [sample(2, 1.0, f"d{i % 5}", i, segment=i % 2) for i in range(40)]
    parts = split_minibatches(rows, 4, seed=3)
    assert len(parts) == 4
    assert sorted((r.dialogue_id, r.trajectory_index) for part in parts for r in part) == sorted(
        (r.dialogue_id, r.trajectory_index) for r in rows
    )
    homes: dict[tuple[str, int], set[int]] = {}
    for number, part in enumerate(parts):
        for row in part:
            homes.setdefault((row.dialogue_id, row.segment_index), set()).add(number)
    assert all(len(found) == 1 for found in homes.values())
    assert max(map(len, parts)) - min(map(len, parts)) <= 4  # one position of four samples
    assert split_minibatches(rows[::-1], 4, seed=3) != split_minibatches(rows, 4, seed=4)
    assert [len(part) for part in split_minibatches([], 3, 0)] == [0, 0, 0]


def test_minibatches_depend_on_the_seed_alone():
    rows = [sample(2, 1.0, f"d{i}", 0) for i in range(12)]
    assert split_minibatches(rows, 3, 7) == split_minibatches(rows, 3, 7)
    assert split_minibatches(rows, 3, 7) != split_minibatches(rows, 3, 8)


def test_a_toy_reward_rises(make, tiny_chat_dir):
    """Fault 13: "longer is better" through sampling, learning and syncing; a sync that did nothing would leave it flat."""
    learner = make(learning_rate=3e-2, epochs=2, kl_guard="off")
    spec = SamplingSpec(1.0, 1.0, SAMPLER.max_new_tokens)
    prompts = [[10 + i, 20, 30, 40] for i in range(4)]
    lengths = []
    with (
        TransformersGenerator(tiny_chat_dir, SAMPLER, eos_token_ids=tuple(range(230, 258)), device="cpu") as generator,
        AdapterSync(tiny_chat_dir, SAMPLER, LORA, device="cpu") as sync,
    ):
        with pytest.raises(StalePolicyError, match="no policy"):  # fault 17
            generator.submit(prompts[0], spec, 0)
        sync.push(learner.adapter(), learner.policy_version, generator)
        for update in range(12):
            futures = [
                (g, generator.submit(prompt, spec, 1000 * update + 10 * g + i, expected_version=update))
                for g, prompt in enumerate(prompts)
                for i in range(8)
            ]
            done = [(g, future.result(60)) for g, future in futures]
            lengths.append(fmean(len(c.token_ids) for _, c in done))
            samples = []
            for g, prompt in enumerate(prompts):
                group = [c for place, c in done if place == g]
                advantages = normalise_group([float(len(c.token_ids)) for c in group]) or [0.0] * len(group)
                samples += [
                    TrainSample(tuple(prompt), c.token_ids, c.sampling_logprobs, a, f"d{g}", i)
                    for i, (c, a) in enumerate(zip(group, advantages, strict=True))
                    if a
                ]
            metrics = learner.update(samples, update)
            assert metrics["sampler/mismatch_abs_nats"] < 1e-4
            sync.push(learner.adapter(), learner.policy_version, generator)
    assert fmean(lengths[-3:]) > 1.5 * fmean(lengths[:2]), lengths


def test_the_generator_holds_the_learners_policy_after_each_push(make, tiny_chat_dir):
    """A stale or missing version is refused; a fresh one samples under its own number."""
    learner = make()
    with (
        TransformersGenerator(tiny_chat_dir, SAMPLER, eos_token_ids=(257,), device="cpu") as generator,
        AdapterSync(tiny_chat_dir, SAMPLER, LORA, device="cpu") as sync,
    ):
        sync.push(learner.adapter(), learner.policy_version, generator)
        learner.update(batch(), 0)
        with pytest.raises(StalePolicyError, match="version 0, not 1"):
            generator.submit([1, 2], SamplingSpec(), 0, expected_version=learner.policy_version)
        sync.push(learner.adapter(), learner.policy_version, generator)
        done = generator.submit([1, 2], SamplingSpec(1.0, 1.0, 8), 0, expected_version=1).result(60)
        assert done.policy_version == 1
        row = TrainSample((1, 2), done.token_ids, done.sampling_logprobs, 1.0)
        assert learner.logprobs([row])[0] == pytest.approx(list(done.sampling_logprobs), abs=1e-4)
