"""The policy: a frozen base with a LoRA adapter. The reference policy is the same base with the adapter disabled."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from writer_rl.configs.errors import InputError
from writer_rl.configs.schema import ModelConfig
from writer_rl.trainer.base_model import new_directory

_ADAPTER_KEY = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight$")
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf)$|.*\.index\.json$")


def load_policy(
    base_dir: Path, config: ModelConfig, *, gradient_checkpointing: bool = False, seed: int = 0
) -> PeftModel:
    """Load the base, freeze it and put a fresh adapter on it.

    The adapter starts as the identity (B = 0) with A drawn from `seed`, so two processes with one seed agree and no
    global random state moves. Base weights are `train_dtype`; adapter weights are always float32.

    Args:
        base_dir: Checked model folder, see `prepare_base_model`.
        config: Number formats, attention kernel and LoRA settings.
        gradient_checkpointing: Recompute layers in the backward pass; prefix sharing is then not possible.
        seed: Seed of the adapter's initial values.

    Raises:
        InputError: `target_modules` names no linear layer of this model.
    """
    base = AutoModelForCausalLM.from_pretrained(
        base_dir,
        dtype=getattr(torch, config.train_dtype),
        attn_implementation=config.attention,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
    )
    targets = config.lora.target_modules
    lora = LoraConfig(
        r=config.lora.r,
        lora_alpha=config.lora.alpha,
        lora_dropout=config.lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            policy = get_peft_model(base, lora)
        except ValueError as error:
            raise InputError("model.lora.target_modules", str(error), "name linear layers, or all-linear") from None
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    policy.base_model.model.config.use_cache = False
    if gradient_checkpointing:
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return policy


@contextmanager
def reference(policy: PeftModel) -> Iterator[PeftModel]:
    """The reference policy for the length of the block: adapter disabled, no gradient, no second model.

    Example:
        >>> with reference(policy) as ref:  # doctest: +SKIP
        ...     ref_logprobs_BT = completion_logprobs(ref, batch)
    """
    with policy.disable_adapter(), torch.no_grad():
        yield policy


def adapter_state(policy: PeftModel) -> dict[str, Tensor]:
    """Detached copies of the adapter's tensors on the CPU, under PEFT's file names."""
    return {key: value.detach().cpu().clone() for key, value in get_peft_model_state_dict(policy).items()}


def _pairs(state: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Adapter tensors by base weight name: {"model.layers.0.mlp.up_proj.weight": (A, B), …}."""
    sides: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        match = _ADAPTER_KEY.match(key)
        if match is None:
            raise ValueError(f"{key} is no plain LoRA matrix; only A and B of linear layers can be merged")
        sides.setdefault(f"{match['module']}.weight", {})[match["side"]] = value
    broken = [name for name, pair in sides.items() if set(pair) != {"A", "B"}]
    if broken:
        raise ValueError(f"the adapter of {broken[0]} has only one of A and B; give the whole adapter state")
    return {name: (pair["A"], pair["B"]) for name, pair in sides.items()}


def merged_state_dict(
    base_state: Mapping[str, Tensor], adapter: Mapping[str, Tensor], *, alpha: float, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Base weights with the adapter added, in fresh tensors: W + (alpha / r)·B·A, computed in float32, then cast.

    Args:
        base_state: Weights by name, (out, in) for linear layers. They are only read.
        adapter: `adapter_state` of the policy; A is (r, in), B is (out, r).
        alpha: `lora_alpha`; the scale is alpha / r, with r from the shape of A.
        dtype: Number format of every returned tensor.

    Returns:
        The same names; tensors without an adapter are cast copies, or the base's own where the format is the same.

    Raises:
        ValueError: The adapter names a weight that the base does not have (a tied output layer, for example).

    Example: W = [[1]], A = [[2]], B = [[3]], alpha 2, r 1 give 1 + 2·3·2 = 13.
    """
    pairs = _pairs(adapter)
    missing = sorted(set(pairs) - set(base_state))
    if missing:
        raise ValueError(f"the base has no weight {missing[0]} to merge into (is it tied to another?)")
    merged: dict[str, Tensor] = {}
    for name, weight in base_state.items():
        if name not in pairs:
            merged[name] = weight.to(dtype)
            continue
        a, b = (side.to(device=weight.device, dtype=torch.float32) for side in pairs[name])
        merged[name] = torch.addmm(weight.float(), b, a, alpha=alpha / a.shape[0]).to(dtype)
    return merged


def read_weights(base_dir: Path) -> dict[str, Tensor]:
    """All tensors of a model folder's safetensors files, by name.

    Raises:
        InputError: There is none.
    """
    files = sorted(base_dir.glob("*.safetensors"))
    if not files:
        raise InputError(str(base_dir), "has no *.safetensors", "give a model folder")
    state: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            state.update({key: opened.get_tensor(key) for key in opened.keys()})  # noqa: SIM118 - not a mapping
    return state


def merge_adapter(
    base_dir: Path,
    adapter: Mapping[str, Tensor],
    out_dir: Path,
    *,
    alpha: float,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    base_state: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write base + adapter as a model folder of its own: one safetensors file beside the base's other files.

    The folder appears whole or not at all and replaces one of the same name. Weights that the base ties stay tied:
    they are absent from the file and `config.json` keeps saying so.

    Args:
        base_dir: Model folder of the base; it is only read.
        adapter: `adapter_state` of the policy.
        out_dir: Folder to write.
        alpha: `lora_alpha`.
        dtype: Number format of the written weights; `config.json` is told.
        base_state: `read_weights(base_dir)` when the caller keeps it, to save reading it at every sync.

    Returns:
        `out_dir`.
    """
    state = merged_state_dict(
        read_weights(base_dir) if base_state is None else base_state, adapter, alpha=alpha, dtype=getattr(torch, dtype)
    )
    with new_directory(out_dir) as staged:
        for file in base_dir.iterdir():
            if file.is_file() and not file.name.startswith(".") and not _WEIGHTS.match(file.name):
                shutil.copyfile(file, staged / file.name)
        config = json.loads((base_dir / "config.json").read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)
        (staged / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n", encoding="utf-8")
        save_file(
            {k: v.contiguous() for k, v in state.items()}, staged / "model.safetensors", metadata={"format": "pt"}
        )
    return out_dir
