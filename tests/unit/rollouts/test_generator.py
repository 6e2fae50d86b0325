"""The promises every generator shares, on the replay generator."""

from __future__ import annotations

from pathlib import Path

import pytest

from writer_rl.rollouts.generator import (
    Completion,
    GeneratorError,
    PolicyGate,
    PolicyWeights,
    SamplingSpec,
    StalePolicyError,
    sync_form,
)
from writer_rl.rollouts.replay import BYTE_EOS, Failure, ReplayGenerator

BASE = PolicyWeights(0, "base", Path())


@pytest.mark.parametrize(
    "bad", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1}, {"max_new_tokens": 0}]
)
def test_spec_refuses_values_out_of_range(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingSpec(**bad)


def test_greedy_is_temperature_zero():
    assert SamplingSpec(temperature=0.0).greedy
    assert not SamplingSpec(temperature=1e-3).greedy


def test_a_completion_has_one_logprob_per_token():
    with pytest.raises(ValueError, match="every token"):
        Completion((1, 2), (-0.1,), "", "stop", 0, 3)


def test_no_policy_and_wrong_version_raise():
    """Fault 17."""
    generator = ReplayGenerator(lambda prompt_ids, seed: "x")
    assert generator.policy_version is None
    with pytest.raises(StalePolicyError, match="holds no policy"):
        generator.submit([1], SamplingSpec(), 0)
    generator.load_policy(BASE)
    with pytest.raises(StalePolicyError, match="version 0, not 1"):
        generator.submit([1], SamplingSpec(), 0, expected_version=1)
    assert generator.submit([1], SamplingSpec(), 0, expected_version=0).result().policy_version == 0


def test_gate_loads_only_between_requests_and_holds_nothing_after_a_failed_load():
    gate = PolicyGate()
    with gate.loading(3):
        assert gate.version is None
    assert gate.enter(None) == 3
    with pytest.raises(RuntimeError, match="1 requests are in flight"), gate.loading(4):
        pass
    assert gate.version == 3
    gate.leave()
    with pytest.raises(OSError, match="disk"), gate.loading(4):
        raise OSError("disk")
    with pytest.raises(StalePolicyError):
        gate.enter(None)


def test_gate_refuses_everything_after_a_breakdown_with_the_first_reason():
    gate = PolicyGate()
    gate.break_down("first")
    gate.break_down("second")
    with pytest.raises(GeneratorError, match="first"):
        gate.enter(None)
    with pytest.raises(GeneratorError, match="first"), gate.loading(1):
        pass


def test_replay_is_deterministic_and_adds_one_eos():
    generator = ReplayGenerator(lambda prompt_ids, seed: f"{len(prompt_ids)}/{seed}")
    generator.load_policy(BASE)
    first, again = (generator.submit([9, 9], SamplingSpec(), 4).result() for _ in range(2))
    assert first == again
    assert first.token_ids == (*b"2/4", BYTE_EOS)
    assert first.token_ids.count(BYTE_EOS) == 1
    assert first.finish_reason == "stop"
    assert first.text == "2/4"
    assert first.num_prompt_tokens == 2


def test_replay_cuts_at_the_limit_and_at_the_first_eos():
    generator = ReplayGenerator({((1,), 0): [5, 6, 7, 8], ((1,), 1): [5, 99, 7]}, eos_token_ids=[98, 99])
    generator.load_policy(BASE)
    cut = generator.submit([1], SamplingSpec(max_new_tokens=2), 0).result()
    assert (cut.token_ids, cut.finish_reason) == ((5, 6), "length")
    stopped = generator.submit([1], SamplingSpec(), 1).result()
    assert (stopped.token_ids, stopped.finish_reason) == ((5, 99), "stop")


def test_replay_failures_are_data():
    generator = ReplayGenerator(lambda prompt_ids, seed: Failure("down"))
    generator.load_policy(BASE)
    completion = generator.submit([1, 2], SamplingSpec(), 0).result()
    assert (completion.finish_reason, completion.error, completion.token_ids) == ("error", "down", ())
    unknown = ReplayGenerator({})
    unknown.load_policy(BASE)
    assert unknown.submit([1], SamplingSpec(), 0).result().finish_reason == "error"


def test_closed_generator_refuses():
    with ReplayGenerator({}) as generator:
        generator.load_policy(BASE)
    with pytest.raises(GeneratorError, match="closed"):
        generator.submit([1], SamplingSpec(), 0)


@pytest.mark.parametrize(
    ("sync", "device", "form"),
    [
        ("auto", "cpu", "merged"),
        ("auto", "cuda", "adapter"),
        ("adapter", "cpu", "adapter"),
        ("merged", "cuda", "merged"),
    ],
)
def test_sync_form(sync, device, form):
    assert sync_form(sync, device) == form
