"""The transformers generator: its noise, its log-probs, its ends; on a tiny model."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from writer_rl.configs.schema import LoraSettings, SamplerConfig
from writer_rl.rollouts.generator import GeneratorError, PolicyWeights, SamplingSpec, StalePolicyError
from writer_rl.rollouts.transformers_engine import TransformersGenerator, processed_logprobs
from writer_rl.trainer.adapter_sync import AdapterSync

EOS = (0, 1)
CONFIG = SamplerConfig(engine="transformers", dtype="float32", max_model_len=256, max_num_seqs=8)


@pytest.fixture(scope="module")
def generator(tiny_model_dir):
    with TransformersGenerator(tiny_model_dir, CONFIG, eos_token_ids=EOS, device="cpu") as engine:
        with pytest.raises(StalePolicyError):
            engine.submit([3], SamplingSpec(), 0)
        engine.load_policy(PolicyWeights(0, "base", tiny_model_dir))
        yield engine


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


def true_logprobs(model, prompt_ids, completion, temperature=1.0, top_p=1.0):
    """Log-probs of a completion by one plain forward pass over the whole sequence."""
    ids = torch.tensor([[*prompt_ids, *completion.token_ids]])
    with torch.no_grad():
        logits_TV = model(ids).logits[0, len(prompt_ids) - 1 : -1]
    rows = len(completion.token_ids)
    logprobs_TV = processed_logprobs(logits_TV, torch.full((rows,), temperature), torch.full((rows,), top_p))
    return logprobs_TV.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]


def test_processed_logprobs_by_hand():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().repeat(4, 1)
    temperature = torch.tensor([1.0, 1.0, 0.5, 0.0])
    top_p = torch.tensor([0.6, 0.4, 1.0, 0.6])
    expected = torch.tensor(
        [
            [0.5 / 0.8, 0.3 / 0.8, 0.0],  # 0.5 alone does not reach 0.6
            [1.0, 0.0, 0.0],
            [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38],  # temperature 1/2 squares probabilities
            [0.5, 0.3, 0.2],  # greedy: the plain model
        ]
    )
    torch.testing.assert_close(processed_logprobs(logits, temperature, top_p).exp(), expected)


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (1.0, 1.0), (0.8, 0.95), (1.7, 0.5)])
def test_logprobs_equal_those_of_one_forward_pass_in_a_mixed_batch(generator, model, temperature, top_p):
    """Faults 16 and 19: what is reported is the distribution that was drawn from, for the ids that were drawn."""
    spec = SamplingSpec(temperature, top_p, 20)
    prompts = [[5, 6, 7, 8, 9], [3], [10, 11, 12] * 5, [40, 41]]
    futures = [generator.submit(prompt, spec, seed) for seed, prompt in enumerate(prompts)]
    for prompt, future in zip(prompts, futures, strict=True):
        completion = future.result(60)
        expected = true_logprobs(model, prompt, completion, temperature, top_p)
        torch.testing.assert_close(torch.tensor(completion.sampling_logprobs), expected, atol=1e-4, rtol=0)


def test_draws_follow_the_distribution(generator, model):
    """4,000 one-token draws against the exact probabilities: chi-square over tokens expected at least 20 times."""
    prompt = [7, 8, 9]
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[:, -1]
    probs = processed_logprobs(logits, torch.tensor([1.3]), torch.tensor([0.9]))[0].exp()
    spec = SamplingSpec(1.3, 0.9, 1)
    futures = [generator.submit(prompt, spec, seed) for seed in range(4000)]
    counts = Counter(f.result(120).token_ids[0] for f in futures)
    assert all(probs[token] > 0 for token in counts)
    frequent = [t for t in range(64) if probs[t] * 4000 >= 20]
    statistic = sum((counts[t] - 4000 * probs[t].item()) ** 2 / (4000 * probs[t].item()) for t in frequent)
    n = len(frequent)
    assert statistic < n + 5 * (2 * n) ** 0.5, (statistic, n)


def test_a_seed_draws_the_same_alone_and_in_company_and_other_seeds_differ(generator):
    """Fault 18."""
    spec = SamplingSpec(1.0, 1.0, 12)
    alone = generator.submit([5, 6], spec, 3).result(60)
    crowd = [f.result(60) for f in [generator.submit([5, 6], spec, seed) for seed in range(8)]]
    assert crowd[3].token_ids == alone.token_ids
    assert len({c.token_ids for c in crowd}) >= 6


def test_every_eos_ends_a_completion_and_is_kept_once(generator):
    """Fault 20: EOS once, at the end; truncation is its own finish reason."""
    done = [f.result(60) for f in [generator.submit([9], SamplingSpec(1.5, 1.0, 60), s) for s in range(80)]]
    stopped = [c for c in done if c.finish_reason == "stop"]
    assert {c.token_ids[-1] for c in stopped} == set(EOS)
    for completion in stopped:
        assert sum(token in EOS for token in completion.token_ids) == 1
    for completion in done:
        if completion.finish_reason == "length":
            assert len(completion.token_ids) == 60
            assert not set(completion.token_ids) & set(EOS)


def test_limits_and_prompts_that_do_not_fit(generator):
    near = generator.submit([5] * 250, SamplingSpec(1.0, 1.0, 100), 0).result(60)
    assert near.finish_reason == "stop" or len(near.token_ids) == 6
    for prompt in ([], [5] * 256):
        bad = generator.submit(prompt, SamplingSpec(), 0).result(60)
        assert bad.finish_reason == "error"
        assert "does not fit" in bad.error
    with pytest.raises(ValueError, match="JSON schema"):
        generator.submit([5], SamplingSpec(json_schema={"type": "object"}), 0)


@pytest.mark.parametrize("sync", ["adapter", "merged"])
def test_adapters_arrive_and_leave(tiny_model_dir, model, sync):
    """Fault 13 on the tiny model, both forms; the base is bit-identical afterwards (fault 12)."""
    torch.manual_seed(1)
    policy = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False),
    )
    config = CONFIG.model_copy(update={"sync": sync})
    spec = SamplingSpec(1.0, 1.0, 10)
    with (
        TransformersGenerator(tiny_model_dir, config, eos_token_ids=EOS, device="cpu") as engine,
        AdapterSync(tiny_model_dir, config, LoraSettings(r=4, alpha=8), device="cpu") as carrier,
    ):
        carrier.push(policy, 1, engine)
        assert engine.policy_version == 1
        with pytest.raises(StalePolicyError):
            engine.submit([4], spec, 0, expected_version=0)
        with_adapter = engine.submit([4, 5], spec, 0).result(60)
        torch.testing.assert_close(
            torch.tensor(with_adapter.sampling_logprobs),
            true_logprobs(policy.eval(), [4, 5], with_adapter),
            atol=1e-4,
            rtol=0,
        )
        without = true_logprobs(model, [4, 5], with_adapter)
        assert (torch.tensor(with_adapter.sampling_logprobs) - without).abs().mean() > 0.1
        engine.load_policy(PolicyWeights(2, "base", tiny_model_dir))
        back = engine.submit([4, 5], spec, 0).result(60)
        assert back.policy_version == 2
        for name, weight in engine._model.named_parameters():
            assert torch.equal(weight, model.get_parameter(name)), name


def test_around_samples_from_the_model_in_memory(tiny_model_dir, model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    with TransformersGenerator.around(model, tokenizer, eos_token_ids=EOS, version=7) as engine:
        completion = engine.submit([5, 6], SamplingSpec(0.0, 1.0, 8), 0).result(60)
        assert completion.policy_version == 7
        assert completion.text == " ".join(f"w{i}" for i in completion.token_ids if i != 0)
        with pytest.raises(RuntimeError, match="own model"):
            engine.load_policy(PolicyWeights(8, "base", tiny_model_dir))
    with pytest.raises(GeneratorError, match="closed"):
        engine.submit([5], SamplingSpec(), 0)
