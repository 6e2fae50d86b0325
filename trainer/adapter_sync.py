"""Carries the learner's adapter to the sampler, one policy version at a time.

Two forms. "adapter": the PEFT adapter itself. "merged": base + (alpha/r)·B·A, computed in float32 into fresh tensors
and cast to the sampler's format. In both the base's tensors are only read, so no sync can make them drift (fault 12).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from torch import Tensor

from writer_rl.configs.schema import LoraSettings, SamplerConfig
from writer_rl.rollouts.generator import Generator, PolicyWeights, sync_form
from writer_rl.trainer.base_model import new_directory
from writer_rl.trainer.policy import adapter_state, merge_adapter, read_weights

_PREFIX = "writer-rl-sync-"
_LOCK = ".lock"
_MODULE = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_A\.weight$")


@dataclass(frozen=True, slots=True)
class SyncTimes:
    """What one sync cost: seconds of writing (merging included) and of loading, and bytes written."""

    version: int
    write_s: float
    load_s: float
    num_bytes: int

    @property
    def total_s(self) -> float:
        """Seconds of the whole sync."""
        return self.write_s + self.load_s


class AdapterSync:
    """Writes policy versions into a folder of its own, in memory (tmpfs) where there is room, for the engine to load.

    Args:
        base_dir: Model folder of the base: GRPO's base, which is also the engine's.
        sampler: Form of the sync and number format of the engine.
        lora: Scale and rank of the adapter.
        directory: Parent of the folder; `/dev/shm` if it has room, else the system's temporary folder, if None.
        device: Device of the engine; the GPU where there is one, if None. Decides what `auto` means.
    """

    def __init__(
        self,
        base_dir: Path,
        sampler: SamplerConfig,
        lora: LoraSettings,
        *,
        directory: Path | None = None,
        device: Literal["cpu", "cuda"] | None = None,
    ) -> None:
        self._base_dir, self._lora = base_dir, lora
        self.form = sync_form(sampler.sync, device or ("cuda" if torch.cuda.is_available() else "cpu"))
        # The files are mapped, not copied: the base costs address space here, and page cache while it is read.
        self._base_state: dict[str, Tensor] = read_weights(base_dir) if self.form == "merged" else {}
        base_dtype = next((str(t.dtype).removeprefix("torch.") for t in self._base_state.values()), "bfloat16")
        self._dtype = base_dtype if sampler.dtype == "auto" else sampler.dtype
        parent = directory or _fast_directory(3 * sum(t.numel() * t.element_size() for t in self._base_state.values()))
        _remove_abandoned(parent)
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = os.open(self._folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.num_syncs = 0

    def export(self, adapter: PeftModel | Mapping[str, Tensor], version: int) -> PolicyWeights:
        """Write one version; it appears whole or not at all.

        Args:
            adapter: The learner's policy, or its `adapter_state`.
            version: Policy version.
        """
        state = adapter_state(adapter) if isinstance(adapter, PeftModel) else adapter
        target = self._folder / f"version_{version:06d}"
        if self.form == "merged":
            dtype: Literal["float32", "bfloat16", "float16"] = self._dtype  # type: ignore[assignment]
            merge_adapter(
                self._base_dir, state, target, alpha=float(self._lora.alpha), dtype=dtype, base_state=self._base_state
            )
            return PolicyWeights(version, "merged", target)
        with new_directory(target) as staged:
            write_adapter(state, staged, self._lora, self._base_dir)
        return PolicyWeights(version, "adapter", target)

    def push(self, adapter: PeftModel | Mapping[str, Tensor], version: int, generator: Generator) -> SyncTimes:
        """Write one version, have the generator load it, delete the older ones.

        Raises:
            RuntimeError: The generator has requests in flight.
            GeneratorError: The generator refuses the weights; it holds none afterwards.
        """
        began = time.monotonic()
        weights = self.export(adapter, version)
        written = time.monotonic()
        num_bytes = sum(file.stat().st_size for file in weights.path.iterdir())
        generator.load_policy(weights)
        loaded = time.monotonic()
        # Only now: until the new version is in, the old one may still be needed.
        for old in self._folder.glob("version_*"):
            if old != weights.path:
                shutil.rmtree(old, ignore_errors=True)
        self.num_syncs += 1
        return SyncTimes(version, written - began, loaded - written, num_bytes)

    def close(self) -> None:
        """Remove the folder. Safe to call twice."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_adapter(state: Mapping[str, Tensor], folder: Path, lora: LoraSettings, base_dir: Path) -> None:
    """Write an adapter in PEFT's format (`adapter_model.safetensors`, `adapter_config.json`) into an existing folder.

    The modules are listed by the names that the state has, so "all-linear" need not be resolved again by the reader.

    Raises:
        ValueError: The state's rank is not that of the settings.
    """
    modules = {match["module"].rpartition(".")[2]: state[key] for key in state if (match := _MODULE.match(key))}
    wrong = next((name for name, a in modules.items() if a.shape[0] != lora.r), None)
    if wrong is not None or not modules:
        raise ValueError(f"the adapter of {wrong or 'no module'} does not have the settings' rank {lora.r}")
    config = LoraConfig(
        r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=sorted(modules), bias="none",
        task_type="CAUSAL_LM", inference_mode=True, base_model_name_or_path=str(base_dir),
    )  # fmt: skip
    save_file(
        {key: value.contiguous() for key, value in state.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    config.save_pretrained(str(folder))
    told = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    told["target_modules"] = sorted(modules)  # PEFT holds a set, whose order changes from process to process
    (folder / "adapter_config.json").write_text(json.dumps(told, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _fast_directory(num_bytes: int) -> Path:
    """`/dev/shm` if it can be written and has room, else the system's temporary folder."""
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > num_bytes + 2**26:
        return memory
    return Path(tempfile.gettempdir())


def _remove_abandoned(parent: Path) -> None:
    """Remove folders of processes that were killed: those whose lock nobody holds."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            descriptor = os.open(lock, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(descriptor)
