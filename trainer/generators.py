"""The generator a configuration asks for."""

from __future__ import annotations

from pathlib import Path

from writer_rl.configs.errors import InputError
from writer_rl.configs.schema import RunConfig
from writer_rl.rollouts.generator import Generator
from writer_rl.trainer.base_model import eos_token_ids


def make_generator(config: RunConfig, base_dir: Path, *, merged_only: bool = False) -> Generator:
    """Start the engine that `sampler.engine` names on a model folder.

    Args:
        config: The run.
        base_dir: Model the engine is built for; no policy is loaded yet.
        merged_only: Only whole models will be loaded (evaluation), so LoRA support can be left out.

    Raises:
        InputError: vLLM is configured but not installed.
    """
    eos = eos_token_ids(base_dir)
    if config.sampler.engine == "transformers":
        from writer_rl.rollouts.transformers_engine import TransformersGenerator

        return TransformersGenerator(base_dir, config.sampler, eos_token_ids=eos)
    try:
        from writer_rl.rollouts.vllm_engine import VllmGenerator
    except ImportError as error:
        raise InputError(
            "sampler.engine",
            f"is vllm, which cannot be imported ({error})",
            "run `setup`, or set sampler.engine=transformers",
        ) from None
    sampler = config.sampler.model_copy(update={"sync": "merged"}) if merged_only else config.sampler
    return VllmGenerator(base_dir, sampler, eos_token_ids=eos, lora_r=config.model.lora.r, seed=config.seed)
