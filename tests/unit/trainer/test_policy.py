"""Base folder, policy, reference and merge, on a small random model written to disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from writer_rl.configs.errors import InputError
from writer_rl.configs.schema import LoraSettings, ModelConfig
from writer_rl.trainer.base_model import eos_token_ids, load_tokenizer, new_directory, prepare_base_model
from writer_rl.trainer.batching import TrainSample, make_microbatch
from writer_rl.trainer.logprobs import completion_logprobs
from writer_rl.trainer.policy import (
    adapter_state,
    load_policy,
    merge_adapter,
    merged_state_dict,
    read_weights,
    reference,
)

IDS = torch.tensor([[1, 5, 9, 3, 7, 2]])
CONFIG = ModelConfig(path="unused", lora=LoraSettings(r=4, alpha=10))


def _write_base(path: Path, *, tied: bool) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, initializer_range=0.2, eos_token_id=[2, 4],
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(20)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w3", pad_token="w3")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def base_dir(request, tmp_path_factory) -> Path:
    return _write_base(tmp_path_factory.mktemp("base") / "model", tied=request.param)


def _trained_policy(base_dir: Path):
    policy = load_policy(base_dir, CONFIG, seed=3)
    generator = torch.Generator().manual_seed(9)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3, generator=generator)
    return policy


def _logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_adapter_is_float32_trainable_and_alone(base_dir):
    policy = load_policy(base_dir, CONFIG.model_copy(update={"train_dtype": "bfloat16"}), seed=3)
    for name, parameter in policy.named_parameters():
        assert parameter.requires_grad == ("lora_" in name), name
        assert parameter.dtype == (torch.float32 if "lora_" in name else torch.bfloat16), name
    assert len(adapter_state(policy)) == 2 * 7 * 2  # A and B of seven linear layers in two blocks


def test_initial_values_depend_on_the_seed_alone(base_dir):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = adapter_state(load_policy(base_dir, CONFIG, seed=3))
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(2)
    second, third = (adapter_state(load_policy(base_dir, CONFIG, seed=s)) for s in (3, 4))
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert any(not torch.equal(first[k], third[k]) for k in first)


def test_first_ratio_is_one_and_first_kl_is_zero(base_dir):
    policy = load_policy(base_dir, CONFIG, seed=3)
    policy.train()
    sample = TrainSample((1, 5, 9), (3, 7, 2), (-1.0,) * 3, 1.0)
    batch = make_microbatch([sample], [0], 0)
    logprobs_BT = completion_logprobs(policy, batch)
    with reference(policy) as ref:
        ref_logprobs_BT = completion_logprobs(ref, batch)
    assert torch.equal(logprobs_BT.detach(), ref_logprobs_BT)
    assert not ref_logprobs_BT.requires_grad
    # Leaving the block restores the adapter, its gradient included, also for a graph made before the block.
    logprobs_BT.sum().backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in policy.parameters() if p.requires_grad)


def test_reference_is_the_base_when_the_adapter_is_large(base_dir):
    policy = _trained_policy(base_dir)
    plain = AutoModelForCausalLM.from_pretrained(base_dir)
    moved = _logits(policy)
    with reference(policy) as ref:
        torch.testing.assert_close(_logits(ref), _logits(plain))
    assert (moved - _logits(plain)).abs().max() > 0.1
    torch.testing.assert_close(_logits(policy), moved, rtol=0, atol=0)


def test_merged_value_by_hand():
    base = {"m.weight": torch.tensor([[1.0]]), "norm.weight": torch.tensor([2.0])}
    adapter = {
        "base_model.model.m.lora_A.weight": torch.tensor([[2.0]]),
        "base_model.model.m.lora_B.weight": torch.tensor([[3.0]]),
    }
    merged = merged_state_dict(base, adapter, alpha=2, dtype=torch.float32)
    assert merged["m.weight"].item() == 13.0
    assert base["m.weight"].item() == 1.0
    with pytest.raises(ValueError, match="no weight"):
        merged_state_dict({}, adapter, alpha=2, dtype=torch.float32)
    with pytest.raises(ValueError, match="only one"):
        merged_state_dict(base, dict(list(adapter.items())[:1]), alpha=2, dtype=torch.float32)


def test_merged_folder_reproduces_the_policy(base_dir, tmp_path):
    policy = _trained_policy(base_dir)
    out = merge_adapter(base_dir, adapter_state(policy), tmp_path / "merged", alpha=CONFIG.lora.alpha)
    torch.testing.assert_close(_logits(AutoModelForCausalLM.from_pretrained(out)), _logits(policy), rtol=0, atol=2e-5)
    assert load_tokenizer(out).chat_template
    assert eos_token_ids(out) == eos_token_ids(base_dir) == (2, 3, 4)
    assert {p.name for p in out.iterdir()} == {p.name for p in base_dir.iterdir()}
    # A second merge replaces the folder whole; bfloat16 is told to config.json.
    merge_adapter(base_dir, adapter_state(policy), out, alpha=CONFIG.lora.alpha, dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert [p.name for p in tmp_path.iterdir()] == ["merged"]


def test_a_wrong_scale_would_be_seen(base_dir, tmp_path):
    policy = _trained_policy(base_dir)
    out = merge_adapter(base_dir, adapter_state(policy), tmp_path / "merged", alpha=CONFIG.lora.r)
    assert (_logits(AutoModelForCausalLM.from_pretrained(out)) - _logits(policy)).abs().max() > 0.01


def test_each_target_module_reaches_the_merged_weights(base_dir):
    policy, base = _trained_policy(base_dir), read_weights(base_dir)
    state = adapter_state(policy)
    merged = merged_state_dict(base, state, alpha=CONFIG.lora.alpha, dtype=torch.float32)
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {name for name in base if "_proj" in name}
    assert len(changed) == 14


def test_base_weights_are_bit_identical_after_100_merges(base_dir):
    policy, base = _trained_policy(base_dir), read_weights(base_dir)
    before = {name: weight.clone() for name, weight in base.items()}
    for _ in range(100):
        merged = merged_state_dict(base, adapter_state(policy), alpha=10, dtype=torch.bfloat16)
    with reference(policy) as ref:
        _logits(ref)
    assert all(torch.equal(before[name], base[name]) for name in base)
    in_model = {k.replace(".base_layer", ""): v for k, v in policy.base_model.model.state_dict().items()}
    assert all(torch.equal(before[name], in_model[name]) for name in before)
    assert all(merged[name].data_ptr() != base[name].data_ptr() for name in base)


def test_model_folders_are_checked(base_dir, tmp_path):
    assert prepare_base_model(base_dir) == base_dir
    with pytest.raises(InputError, match="is no model folder"):
        prepare_base_model(tmp_path / "absent")
    with pytest.raises(InputError, match="packaged"):
        prepare_base_model("package:unknown")
    with pytest.raises(InputError, match=r"config\.json: does not exist"):
        prepare_base_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(InputError, match=r"no \*\.safetensors"):
        prepare_base_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match="only pickle"):
        prepare_base_model(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="tokenizer"):
        prepare_base_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": {}}))
    with pytest.raises(InputError, match="auto_map"):
        prepare_base_model(tmp_path)


def test_a_packaged_model_is_unpacked_once(base_dir, tmp_path):
    """A complete folder in the cache is used as it is; unpacking itself is covered by the integration tests."""
    cached = tmp_path / "smollm2-135m"
    cached.symlink_to(base_dir)
    assert prepare_base_model("package:smollm2-135m", tmp_path) == cached


def test_a_failed_write_leaves_the_old_folder(tmp_path):
    target = tmp_path / "out"
    with new_directory(target) as staged:
        (staged / "a").write_text("old")
    with pytest.raises(RuntimeError), new_directory(target) as staged:  # noqa: PT012
        (staged / "a").write_text("half")
        raise RuntimeError
    assert (target / "a").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_unknown_target_modules_are_named(base_dir):
    config = CONFIG.model_copy(update={"lora": LoraSettings(target_modules=("absent_proj",))})
    with pytest.raises(InputError, match="target_modules"):
        load_policy(base_dir, config)


def test_saved_weights_are_plain_tensors(base_dir, tmp_path):
    out = merge_adapter(base_dir, adapter_state(_trained_policy(base_dir)), tmp_path / "m", alpha=10, dtype="bfloat16")
    state = load_file(out / "model.safetensors")
    tied = json.loads((base_dir / "config.json").read_text())["tie_word_embeddings"]
    assert ("lm_head.weight" in state) == (not tied)
    assert {t.dtype for t in state.values()} == {torch.bfloat16}
