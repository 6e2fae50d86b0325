"""Export on a tiny random model: equality is proven (fault 26), broken merges are caught, and nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from writer_rl.configs.errors import InputError
from writer_rl.configs.load import dump_resolved
from writer_rl.configs.schema import LoraSettings, ModelConfig, RunConfig
from writer_rl.trainer import export
from writer_rl.trainer.checkpoint import damage, update_directory, write_checkpoint
from writer_rl.trainer.policy import merge_adapter

TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
ALPHA, RANK = 12, 4


def write_model(folder: Path, *, tied: bool = False, seed: int = 0) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
            initializer_range=0.2,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, 7], do_sample=True, temperature=0.6, top_p=0.9
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_adapter(base: Path, folder: Path, *, seed: int = 1, alpha: int = ALPHA) -> None:
    torch.manual_seed(seed)
    lora = LoraConfig(r=RANK, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), lora)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    policy.save_pretrained(folder)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with an SFT stage and two GRPO checkpoints on a tiny model."""
    run = tmp_path / "runs" / "tiny"
    base = write_model(tmp_path / "base")
    config = RunConfig(name="tiny", model=ModelConfig(path=str(base), lora=LoraSettings(r=RANK, alpha=ALPHA)))
    dump_resolved(config, run)
    write_adapter(base, run / "sft" / "adapter")
    merge_adapter(
        base, load_file(run / "sft" / "adapter" / "adapter_model.safetensors"), run / "sft" / "merged", alpha=ALPHA
    )
    for update in (1, 2):

        def fill(folder: Path, seed: int = update) -> None:
            write_adapter(run / "sft" / "merged", folder / "adapter", seed=10 + seed)

        write_checkpoint(update_directory(run / "grpo" / "checkpoints", update), fill)
    return run


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.arange(40)[None]).logits


def test_latest_is_the_newest_update_on_the_merged_sft_model(run: Path) -> None:
    out = export.export_run(run)
    assert out == run / "export"
    assert {path.name for path in out.iterdir()} == {
        "model",
        "adapter",
        "sft_merged",
        "README.md",
        "export.json",
        "manifest.json",
        "COMPLETE",
    }
    assert damage(out) == ""
    facts = json.loads((out / "export.json").read_text())
    assert facts["checkpoint"] == "update_000002"
    assert facts["lora_alpha"] == ALPHA
    assert facts["proof"]["max_logit_difference"] <= 1e-4
    assert facts["proof"]["bound"] < 1e-3
    assert facts["proof"]["adapter_effect"] > 0.1, "the comparison can tell a forgotten adapter"
    adapter_config = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert (adapter_config["lora_alpha"], adapter_config["base_model_name_or_path"]) == (ALPHA, "../sft_merged")
    merged = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32).eval()
    policy = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(out / "sft_merged", dtype=torch.float32), out / "adapter"
    ).eval()
    source = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(run / "sft" / "merged", dtype=torch.float32),
        run / "grpo/checkpoints/update_000002/adapter",
    ).eval()
    torch.testing.assert_close(logits(merged), logits(policy), atol=1e-4, rtol=0)
    assert torch.equal(logits(policy), logits(source))


def test_other_checkpoints_by_name(run: Path, tmp_path: Path) -> None:
    sft = export.export_run(run, tmp_path / "sft", checkpoint="sft")
    assert json.loads((sft / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == "../base"
    merged = AutoModelForCausalLM.from_pretrained(sft / "model", dtype=torch.float32).eval()
    assert torch.equal(
        logits(merged), logits(AutoModelForCausalLM.from_pretrained(run / "sft" / "merged", dtype=torch.float32).eval())
    )
    first = export.export_run(run, tmp_path / "first", checkpoint="update_1")
    assert json.loads((first / "export.json").read_text())["checkpoint"] == "update_000001"
    for name, message in (("update_9", "no whole checkpoint"), ("best", "names no checkpoint")):
        with pytest.raises(InputError, match=message):
            export.export_run(run, tmp_path / "none", checkpoint=name)
    assert not (tmp_path / "none").exists()


def test_generation_settings_and_tokenizer_come_along(run: Path) -> None:
    out = export.export_run(run)
    settings = GenerationConfig.from_pretrained(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    assert set(settings.eos_token_id) == {7, tokenizer.eos_token_id}
    assert settings.pad_token_id == tokenizer.pad_token_id
    assert not settings.do_sample
    assert settings.max_new_tokens == 2048
    assert tokenizer.chat_template == TEMPLATE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cast_model_is_the_float32_merge_cast(run: Path, dtype: Any) -> None:
    out = export.export_run(run, dtype=dtype)
    written = load_file(out / "model" / "model.safetensors")
    assert {weight.dtype for weight in written.values()} == {getattr(torch, dtype)}
    proof = json.loads((out / "export.json").read_text())["proof"]
    assert proof["max_logit_difference"] <= 1e-4
    assert 0 < proof["cast_logit_difference"] <= export.MAX_CAST_FRACTION[dtype] * proof["max_abs_logit"]
    assert "bit for bit" in (out / "README.md").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(out / "model", dtype="auto")
    assert loaded.dtype == getattr(torch, dtype)


def test_tied_output_weights_stay_tied(run: Path, tmp_path: Path) -> None:
    base = write_model(tmp_path / "tied", tied=True)
    write_adapter(base, tmp_path / "adapter")
    state = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    merge_adapter(base, state, tmp_path / "merged", alpha=ALPHA)
    proof = export.prove(base, tmp_path / "adapter", tmp_path / "merged", "float32")
    assert proof.greedy_tokens_equal
    assert "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")


def _unscaled(base: Path, adapter: Any, out: Path, *, alpha: float, dtype: Any) -> Path:
    return merge_adapter(base, adapter, out, alpha=float(RANK), dtype=dtype)


def _scale_off_by_a_thousandth(base: Path, adapter: Any, out: Path, *, alpha: float, dtype: Any) -> Path:
    return merge_adapter(base, adapter, out, alpha=alpha * 1.001, dtype=dtype)


def _forgotten(base: Path, adapter: Any, out: Path, *, alpha: float, dtype: Any) -> Path:
    return merge_adapter(base, {k: v * 0 for k, v in adapter.items()}, out, alpha=alpha, dtype=dtype)


def _one_module_missing(base: Path, adapter: Any, out: Path, *, alpha: float, dtype: Any) -> Path:
    return merge_adapter(
        base, {k: v for k, v in adapter.items() if "layers.1.mlp.up_proj" not in k}, out, alpha=alpha, dtype=dtype
    )


def _not_a_number(base: Path, adapter: Any, out: Path, *, alpha: float, dtype: Any) -> Path:
    merge_adapter(base, adapter, out, alpha=alpha, dtype=dtype)
    state = load_file(out / "model.safetensors")
    state["model.norm.weight"][0] = float("nan")
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize(
    "broken", [_unscaled, _scale_off_by_a_thousandth, _forgotten, _one_module_missing, _not_a_number]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_broken_merge_is_caught_and_leaves_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: Any, dtype: str
) -> None:
    monkeypatch.setattr(export, "merge_adapter", broken)
    before = sorted(path.name for path in run.iterdir())
    assert export.main([str(run), "--dtype", dtype]) == 1
    assert sorted(path.name for path in run.iterdir()) == before
    assert "nothing was exported" in capsys.readouterr().err


def test_a_changed_alpha_is_refused(run: Path) -> None:
    file = run / "sft" / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "lora_alpha": 32}))
    with pytest.raises(InputError, match="has lora_alpha 32 and r 4, the run alpha 12 and r 4"):
        export.export_run(run, checkpoint="sft")


def test_an_adapter_that_is_more_than_lora_is_refused(run: Path) -> None:
    file = run / "sft" / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "use_rslora": True}))
    with pytest.raises(InputError, match="use_rslora"):
        export.export_run(run, checkpoint="sft")


def test_a_damaged_checkpoint_is_not_exported(run: Path) -> None:
    weights = run / "grpo/checkpoints/update_000002/adapter/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(InputError, match="no whole checkpoint"):
        export.export_run(run, checkpoint="update_2")
    out = export.export_run(run)
    assert json.loads((out / "export.json").read_text())["checkpoint"] == "update_000001"


def test_a_foreign_folder_is_not_overwritten_but_an_export_is(run: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(InputError, match="exists and is no export"):
        export.export_run(run, tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter.txt").exists()
    export.export_run(run, checkpoint="sft")
    out = export.export_run(run)
    assert json.loads((out / "export.json").read_text())["checkpoint"] == "update_000002"
    assert not (out / "base").exists()


def test_the_card_says_what_was_measured(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "evaluation").mkdir()
    (run / "evaluation" / "summary.json").write_text(
        json.dumps(
            {
                "arms": {"sft": {"state_score": {"mean": 0.5, "low": 0.4, "high": 0.6}}, "rl": {"state_score": 0.6}},
                "differences": [
                    {
                        "a": "rl",
                        "b": "sft",
                        "metric": "state_score",
                        "mean": 0.1,
                        "low": 0.05,
                        "high": 0.15,
                        "num_dialogues": 9,
                    }
                ],
            }
        )
    )
    assert export.main([str(run)]) == 0
    card = (run / "export" / "README.md").read_text()
    for part in (
        "0.500 [0.400, 0.600]",
        "| SFT + RL | 0.600 |",
        "RL improved the memory",
        "../sft_merged" not in card and "`sft_merged/`",
        "update 2",
        "simulated group chats",
        "alpha = 12",
        "licence",
        str(run.parent.parent / "base"),
    ):
        assert part, part
        assert part is True or part in card
    assert "proven   logits within" in capsys.readouterr().out


def test_without_evaluation_the_card_claims_nothing(run: Path) -> None:
    assert "nothing is known about the quality" in (export.export_run(run) / "README.md").read_text()


def test_no_run_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        export.export_run(tmp_path)
