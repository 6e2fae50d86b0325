"""Entry point `export`: a trained Writer as one self-contained folder that is proven equal to what was trained.

The folder holds `model/` (base and adapter merged: load it like any model), `adapter/` (PEFT), the model that the adapter
belongs to (`sft_merged/` after reinforcement learning, whose base is the merged SFT model; else `base/`), `README.md` (model
card) and `export.json` (the proof's numbers). It appears whole and proven, or not at all.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from writer_rl.configs.errors import InputError
from writer_rl.configs.load import config_hash, load_config
from writer_rl.configs.schema import RunConfig
from writer_rl.data.contract import PROMPT_VERSION
from writer_rl.data.files import write_json
from writer_rl.trainer.base_model import check_model_dir, eos_token_ids, load_tokenizer, prepare_base_model
from writer_rl.trainer.checkpoint import (
    latest_checkpoint,
    require_whole,
    update_directory,
    write_checkpoint,
)
from writer_rl.trainer.cli import command_parser
from writer_rl.trainer.export_card import model_card
from writer_rl.trainer.policy import merge_adapter, merged_state_dict, read_weights
from writer_rl.trainer.progress import say, stage

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")
MAX_LOGIT_FRACTION = 2.0**-15
"""Largest |logit difference| between base + adapter and the float32 merge, both run in float32, as a fraction of the largest
|logit| (of 1 where that is smaller): 256 roundings of the format, spread over the layers. A correct merge into a 135M
model of 30 layers was measured at 1.5e-4 where the adapter moved logits by 2.8; a scale wrong by a thousandth is caught."""
MAX_CAST_FRACTION: dict[Dtype, float] = {"float32": 0.0, "bfloat16": 2.0**-4, "float16": 2.0**-7}
"""Largest |logit difference| of the cast model as a fraction of the largest |logit|: sixteen roundings of the format. It only
guards against a format that the model cannot bear; that the weights are right is shown bit for bit."""
NUM_GREEDY_TOKENS = 12
PROMPTS = (
    "Roster: Ana, Ben\nMemory: none\nMessages:\n[m1] Ana: I moved the bakery order to Friday.\nWrite the actions.",
    "[m7] Chidi: We all agreed on the lake house. [m8] Åsa: fine, but Ben said he cannot drive.",
    "群聊: 小林说她不吃辣, 大家决定周六去爬山。",
    '{"actions": [{"action": "ADD", "owner": "GROUP", "source": "',
)


class ExportMismatch(RuntimeError):
    """What was about to be exported does not compute what was trained; nothing was written."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the parts of an export come from.

    Attributes:
        label: ``sft`` or ``update_000030``.
        base_dir: The model under the adapter.
        base_name: Folder of that model in the export.
        adapter_dir: A PEFT folder.
    """

    label: str
    base_dir: Path
    base_name: str
    adapter_dir: Path


@dataclass(frozen=True, slots=True)
class Proof:
    """The numbers by which an export was found equal to what was trained.

    Attributes:
        num_prompts: Fixed prompts compared.
        num_tokens: Positions whose logits were compared.
        max_logit_difference: Largest |difference|, base + adapter against the merge, float32 on both sides.
        bound: What that difference may be at most, see `MAX_LOGIT_FRACTION`.
        max_abs_logit: Largest |logit|, to judge differences by.
        adapter_effect: Largest |logit difference| that the adapter makes at all: what a forgotten merge would cost.
        greedy_tokens_equal: True when greedy continuations agreed token by token.
        dtype: Number format of the exported model.
        cast_logit_difference: Largest |difference| of the exported folder, loaded and run in `dtype`.
        cast_argmax_frac: Share of positions at which the exported folder's likeliest token is the same.
    """

    num_prompts: int
    num_tokens: int
    max_logit_difference: float
    bound: float
    max_abs_logit: float
    adapter_effect: float
    greedy_tokens_equal: bool
    dtype: Dtype
    cast_logit_difference: float
    cast_argmax_frac: float


@dataclass(frozen=True, slots=True)
class _Behaviour:
    """What a model computes on the fixed prompts: logits (T, V) and greedy continuation per prompt."""

    logits: list[Tensor]
    greedy: list[list[int]]


def find_source(run_dir: Path, config: RunConfig, checkpoint: str) -> Source:
    """Resolve ``latest``, ``sft`` or ``update_N`` to folders.

    Args:
        run_dir: A run directory.
        config: Its configuration (names the base of the SFT stage).
        checkpoint: What to export. ``latest`` is the newest whole GRPO checkpoint, or SFT when there is none.

    Raises:
        InputError: The checkpoint does not exist or is damaged.
    """
    root = run_dir / "grpo" / "checkpoints"
    chosen: Path | None
    if checkpoint == "latest":
        chosen = latest_checkpoint(root)
    elif checkpoint == "sft":
        chosen = None
    else:
        match = re.fullmatch(r"(?:update_)?(\d+)", checkpoint)
        if match is None:
            raise InputError("--checkpoint", f"{checkpoint!r} names no checkpoint", "use latest, sft or update_N")
        chosen = require_whole(update_directory(root, int(match.group(1))))
    merged_sft = run_dir / "sft" / "merged"
    if chosen is not None:
        if merged_sft.is_dir():
            return Source(chosen.name, check_model_dir(merged_sft), "sft_merged", _adapter_dir(chosen / "adapter"))
        return Source(chosen.name, prepare_base_model(config.model.path), "base", _adapter_dir(chosen / "adapter"))
    adapter = _adapter_dir(run_dir / "sft" / "adapter")
    return Source("sft", prepare_base_model(config.model.path), "base", adapter)


def export_run(
    run_dir: Path, out_dir: Path | None = None, *, checkpoint: str = "latest", dtype: Dtype | None = None
) -> Path:
    """Export a run's Writer.

    Args:
        run_dir: A run directory.
        out_dir: Folder to write; ``<run_dir>/export`` if None. An export that stands there is replaced.
        checkpoint: See `find_source`.
        dtype: Number format of `model/`; that of the base if None. The merge itself is computed in float32.

    Returns:
        The folder.

    Raises:
        InputError: Something is missing or does not fit together.
        ExportMismatch: The merged model does not reproduce base + adapter.
    """
    config_file = run_dir / "config.yaml"
    if not config_file.is_file():
        raise InputError(str(config_file), "does not exist", "name a run directory that sft or grpo wrote")
    config = load_config(config_file)
    out_dir = out_dir or run_dir / "export"
    if (
        out_dir.exists()
        and not (out_dir / "export.json").is_file()
        and (not out_dir.is_dir() or any(out_dir.iterdir()))
    ):
        raise InputError(str(out_dir), "exists and is no export", "choose a new folder with --out")
    source = find_source(run_dir, config, checkpoint)
    adapter_config = _read_adapter_config(source.adapter_dir, config)
    chosen_dtype = dtype or _base_dtype(source.base_dir)
    say(f"exporting {source.label} of {run_dir} as {chosen_dtype}")

    def fill(staged: Path) -> None:
        with stage("copy the base and the adapter"):
            _copy_model(source.base_dir, staged / source.base_name)
            _copy_adapter(source, adapter_config, staged / "adapter")
        with stage("merge in float32"):
            adapter = load_file(staged / "adapter" / "adapter_model.safetensors")
            base = staged / source.base_name
            merge_adapter(
                base, adapter, staged / "model", alpha=float(adapter_config["lora_alpha"]), dtype=chosen_dtype
            )
            _write_generation_config(base, staged / "model", config)
        with stage("prove that the merged model computes what was trained"):
            proof = prove(base, staged / "adapter", staged / "model", chosen_dtype)
        facts = {
            "checkpoint": source.label,
            "run": config.name,
            "config_sha256": config_hash(config),
            "base_model": config.model.path,
            "prompt_version": PROMPT_VERSION,
            "lora_alpha": adapter_config["lora_alpha"],
            "lora_r": adapter_config["r"],
            "tolerance": proof.bound,
            "cast_tolerance_frac": MAX_CAST_FRACTION[chosen_dtype],
            "proof": asdict(proof),
        }
        write_json(staged / "export.json", facts)
        card = model_card(run_dir, config, source.label, source.base_name, facts, _licence_files(source.base_dir))
        (staged / "README.md").write_text(card, encoding="utf-8")

    return write_checkpoint(out_dir, fill)


@torch.inference_mode()
def prove(base_dir: Path, adapter_dir: Path, model_dir: Path, dtype: Dtype) -> Proof:
    """Compare base + adapter (PEFT, float32) with the merge on fixed prompts, everything loaded fresh from the folders.

    The float32 merge must agree in logits to `MAX_LOGIT_FRACTION` of the largest one and in greedy tokens. For another `dtype` the weights
    written must in addition be bit for bit the float32 merge, cast, and the logits of the folder run in that format must
    stay within `MAX_CAST_FRACTION` of the largest logit.

    Args:
        base_dir: The model the adapter belongs to.
        adapter_dir: PEFT folder.
        model_dir: The merged model's folder.
        dtype: Its number format.

    Raises:
        ExportMismatch: Naming what differs and by how much.
    """
    tokenizer = load_tokenizer(model_dir)
    prompts = [torch.tensor([ids]) for ids in _prompt_ids(tokenizer)]
    if [ids[0].tolist() for ids in prompts] != _prompt_ids(load_tokenizer(base_dir)):
        raise ExportMismatch("the exported tokenizer splits the fixed prompts differently from the base's")

    policy = PeftModel.from_pretrained(_load(base_dir, "float32"), adapter_dir).eval()
    trained = _behaviour(policy, prompts)
    with policy.disable_adapter():
        effect = _distance(trained.logits, _logits(policy, prompts))
    del policy

    if dtype == "float32":
        merged = exported = _behaviour(_load(model_dir, "float32"), prompts)
    else:
        model = _load(base_dir, "float32")
        state = _require_cast(base_dir, adapter_dir, model_dir, getattr(torch, dtype))
        model.load_state_dict(state, strict=False, assign=True)
        model.tie_weights()
        del state
        merged = _behaviour(model, prompts)
        del model
        exported = _Behaviour(_logits(_load(model_dir, dtype), prompts), [])

    largest = max(float(logits.abs().max()) for logits in trained.logits)
    proof = Proof(
        num_prompts=len(prompts),
        num_tokens=sum(ids.shape[1] for ids in prompts),
        max_logit_difference=_distance(trained.logits, merged.logits),
        bound=MAX_LOGIT_FRACTION * max(1.0, largest),
        max_abs_logit=largest,
        adapter_effect=effect,
        greedy_tokens_equal=trained.greedy == merged.greedy,
        dtype=dtype,
        cast_logit_difference=_distance(trained.logits, exported.logits),
        cast_argmax_frac=_argmax_agreement(trained.logits, exported.logits),
    )
    if not proof.max_logit_difference <= proof.bound:
        raise ExportMismatch(
            f"logits of the merged model differ by {proof.max_logit_difference:.3g} from base + adapter, more than "
            f"{proof.bound:.3g}; the adapter itself changes them by {effect:.3g}"
        )
    if not proof.greedy_tokens_equal:
        raise ExportMismatch("greedy continuations of the merged model differ from those of base + adapter")
    if dtype != "float32" and not proof.cast_logit_difference <= MAX_CAST_FRACTION[dtype] * largest:
        raise ExportMismatch(
            f"logits in {dtype} differ by {proof.cast_logit_difference:.3g}, more than {MAX_CAST_FRACTION[dtype]:.3g} of the "
            f"largest logit {largest:.3g}; export with --dtype float32"
        )
    return proof


def _require_cast(base_dir: Path, adapter_dir: Path, model_dir: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """The float32 merge, made once more; what was written must be its cast, bit for bit."""
    adapter = load_file(adapter_dir / "adapter_model.safetensors")
    alpha = float(json.loads((adapter_dir / "adapter_config.json").read_text(encoding="utf-8"))["lora_alpha"])
    merged = merged_state_dict(read_weights(base_dir), adapter, alpha=alpha, dtype=torch.float32)
    written = read_weights(model_dir)
    if set(merged) != set(written):
        odd = sorted(set(merged) ^ set(written))[0]
        raise ExportMismatch(f"the merged model's file and the base disagree on the weight {odd}")
    for name, weight in merged.items():
        if written[name].dtype != dtype or not torch.equal(written[name], weight.to(dtype)):
            raise ExportMismatch(f"the written weight {name} is not base + adapter in {dtype}")
    return merged


def _load(model_dir: Path, dtype: Dtype) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=getattr(torch, dtype), use_safetensors=True, local_files_only=True, trust_remote_code=False
    )
    return model.eval()


def _prompt_ids(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The fixed prompts as they are, and the first one through the chat template."""
    texts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in PROMPTS]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPTS[0]}], add_generation_prompt=True, tokenize=False
    )
    return [ids for ids in [*texts, tokenizer(chat, add_special_tokens=False)["input_ids"]] if ids]


def _logits(model: Any, prompts: Sequence[Tensor]) -> list[Tensor]:
    return [model(input_ids=ids).logits[0].float() for ids in prompts]


def _behaviour(model: Any, prompts: Sequence[Tensor]) -> _Behaviour:
    greedy = []
    for ids in prompts:
        # A configuration of our own: what the folder says about sampling must not steer the comparison.
        settings = GenerationConfig(
            do_sample=False, max_new_tokens=NUM_GREEDY_TOKENS, pad_token_id=0, eos_token_id=None
        )
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        greedy.append(out[0, ids.shape[1] :].tolist())
    return _Behaviour(_logits(model, prompts), greedy)


def _distance(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Largest |difference|; infinite when a number is not finite, so that no comparison passes by NaN."""
    largest = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    return largest if math.isfinite(largest) else math.inf


def _argmax_agreement(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    same = [(a.argmax(-1) == b.argmax(-1)) for a, b in zip(ours, theirs, strict=True)]
    return float(torch.cat(same).float().mean())


def _adapter_dir(path: Path) -> Path:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (path / name).is_file():
            raise InputError(str(path / name), "does not exist", "finish the stage first, or choose another checkpoint")
    return path


def _read_adapter_config(adapter_dir: Path, config: RunConfig) -> dict[str, Any]:
    """The adapter's own configuration, checked against the run's.

    Raises:
        InputError: Its scale is not the one the run was trained with, or it is more than plain LoRA matrices.
    """
    file = adapter_dir / "adapter_config.json"
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        alpha, rank = found["lora_alpha"], found["r"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(str(file), f"is no adapter configuration ({error!r})", "choose another checkpoint") from None
    if (alpha, rank) != (config.model.lora.alpha, config.model.lora.r):
        wanted = f"alpha {config.model.lora.alpha} and r {config.model.lora.r}"
        raise InputError(
            str(file), f"has lora_alpha {alpha} and r {rank}, the run {wanted}", "use the run's own adapter"
        )
    for key in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out"):
        if found.get(key):
            raise InputError(f"{file}: {key}", f"is {found[key]!r}", "only plain LoRA can be merged; train without it")
    return found


def _copy_model(source: Path, target: Path) -> None:
    """The files of a model folder, without hidden ones and what the checkpoint writer added."""
    target.mkdir()
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.startswith(".") and file.name not in ("manifest.json", "COMPLETE"):
            shutil.copyfile(file, target / file.name)


def _copy_adapter(source: Source, adapter_config: Mapping[str, Any], target: Path) -> None:
    target.mkdir()
    shutil.copyfile(source.adapter_dir / "adapter_model.safetensors", target / "adapter_model.safetensors")
    # The base is named relative to the adapter: an absolute path of this machine would mean nothing elsewhere.
    told = {
        **adapter_config,
        "base_model_name_or_path": f"../{source.base_name}",
        "revision": None,
        "inference_mode": True,
    }
    write_json(target / "adapter_config.json", told)


def _write_generation_config(base_dir: Path, model_dir: Path, config: RunConfig) -> None:
    """Every end-of-text id of the base, greedy decoding as in the evaluation, the trained length."""
    ids = list(eos_token_ids(base_dir))
    tokenizer = load_tokenizer(base_dir)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=config.sampler.max_new_tokens,
        eos_token_id=ids if len(ids) > 1 else ids[0],
        pad_token_id=pad,
        bos_token_id=tokenizer.bos_token_id,
    )
    settings.save_pretrained(model_dir)


def _base_dtype(base_dir: Path) -> Dtype:
    told = json.loads((base_dir / "config.json").read_text(encoding="utf-8"))
    name = str(told.get("dtype") or told.get("torch_dtype") or "float32")
    return next((dtype for dtype in DTYPES if dtype == name), "float32")


def _licence_files(base_dir: Path) -> list[str]:
    return sorted(
        file.name for file in base_dir.iterdir() if re.match(r"(licen[cs]e|notice)", file.name, re.IGNORECASE)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run `export RUN_DIR`.

    Args:
        argv: Arguments after the command's name.

    Returns:
        0 when the folder stands and is proven, 1 when the merged model does not reproduce what was trained.
    """
    parser = command_parser(
        "export",
        "Write a trained Writer as adapter and merged model, proven equal on fixed prompts.",
        "examples:\n  writer-rl export checkpoints/runs/demo\n  writer-rl export checkpoints/runs/demo --checkpoint sft --out writer-sft",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a run directory: <output_dir>/<name>")
    parser.add_argument("--out", metavar="DIR", help="folder to write (default: RUN_DIR/export)")
    parser.add_argument(
        "--checkpoint", default="latest", metavar="latest|sft|update_N", help="what to export (default: latest)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="number format of the merged model (default: the base's)")
    args = parser.parse_args(argv)
    try:
        out = export_run(
            Path(args.run_dir), Path(args.out) if args.out else None, checkpoint=args.checkpoint, dtype=args.dtype
        )
    except ExportMismatch as error:
        say(f"error: {error}; nothing was exported")
        return 1
    proof = json.loads((out / "export.json").read_text(encoding="utf-8"))["proof"]
    print(
        f"proven   logits within {proof['max_logit_difference']:.2g} of base + adapter in float32 "
        f"(largest logit {proof['max_abs_logit']:.3g}), "
        f"the adapter's effect is {proof['adapter_effect']:.2g}; greedy tokens are equal"
    )
    print(f"model    {out / 'model'} ({proof['dtype']})\nadapter  {out / 'adapter'}\ncard     {out / 'README.md'}")
    return 0
