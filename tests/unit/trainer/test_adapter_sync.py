"""Syncs: exact weights, untouched base, no leftovers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from writer_rl.configs.schema import LoraSettings, SamplerConfig
from writer_rl.rollouts.generator import PolicyWeights
from writer_rl.rollouts.replay import ReplayGenerator
from writer_rl.trainer.adapter_sync import AdapterSync

LORA = LoraSettings(r=2, alpha=6)
NAMES = ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")


@pytest.fixture
def base_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    torch.manual_seed(0)
    weights = {f"{name}.weight": torch.randn(5, 3, dtype=torch.bfloat16) for name in (*NAMES, "model.embed_tokens")}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def adapter(seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    state = {}
    for name in NAMES:
        state[f"base_model.model.{name}.lora_A.weight"] = torch.randn(2, 3, generator=draw)
        state[f"base_model.model.{name}.lora_B.weight"] = scale * torch.randn(5, 2, generator=draw)
    return state


def digests(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir())}


class Reading(ReplayGenerator):
    """Notes the weights that it is told to load, as they are at that moment."""

    def load_policy(self, weights: PolicyWeights) -> float:
        file = "model.safetensors" if weights.kind == "merged" else "adapter_model.safetensors"
        self.weights = load_file(weights.path / file)
        self.folder = weights.path
        return super().load_policy(weights)


def test_base_is_bit_identical_after_100_syncs_and_each_sync_is_exact(base_dir, tmp_path):
    """Faults 12 and 14: no drift in what is written after 100 versions, versions counted one by one."""
    before, base = digests(base_dir), load_file(base_dir / "model.safetensors")
    config = SamplerConfig(sync="merged", dtype="bfloat16")
    with Reading({}) as generator, AdapterSync(base_dir, config, LORA, directory=tmp_path, device="cpu") as sync:
        for version in range(100):
            times = sync.push(adapter(version, scale=100.0), version, generator)
            assert generator.policy_version == version == times.version
            assert sync.num_syncs == version + 1
        zero = {key: torch.zeros_like(value) for key, value in adapter(0).items()}
        sync.push(zero, 100, generator)
        for name, weight in base.items():
            assert torch.equal(generator.weights[name], weight), name
        sync.push(adapter(5), 101, generator)
        for name in NAMES:
            a, b = (adapter(5)[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
            expected = (base[f"{name}.weight"].float() + 3.0 * b @ a).bfloat16()
            torch.testing.assert_close(generator.weights[f"{name}.weight"], expected, atol=0, rtol=2**-8)
        assert [w.version for w in generator.loaded] == list(range(102))
    assert digests(base_dir) == before


def test_only_the_newest_version_stays_and_nothing_after_close(base_dir, tmp_path):
    """Fault 27."""
    with Reading({}) as generator:
        sync = AdapterSync(base_dir, SamplerConfig(sync="adapter"), LORA, directory=tmp_path, device="cpu")
        for version in range(5):
            sync.push(adapter(version), version, generator)
            folders = [p.name for p in generator.folder.parent.iterdir() if not p.name.startswith(".")]
            assert folders == [f"version_{version:06d}"]
        sync.close()
        sync.close()
    assert [p.name for p in tmp_path.iterdir()] == ["base"]


def test_adapter_folder_is_pefts_own(base_dir, tmp_path):
    """Fault 26: the scale survives; module names are spelt out."""
    with AdapterSync(base_dir, SamplerConfig(sync="adapter"), LORA, directory=tmp_path, device="cpu") as sync:
        weights = sync.export(adapter(1), 4)
        config = json.loads((weights.path / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"], config["peft_type"]) == (2, 6, "LORA")
        assert config["target_modules"] == ["gate_proj", "up_proj"]
        stored = load_file(weights.path / "adapter_model.safetensors")
        assert all(torch.equal(stored[key], value) for key, value in adapter(1).items())
        with pytest.raises(ValueError, match="rank 2"):
            sync.export({key: value.repeat(2, 1) for key, value in adapter(1).items()}, 5)


def test_merged_folder_says_its_format(base_dir, tmp_path):
    with AdapterSync(
        base_dir, SamplerConfig(sync="merged", dtype="float32"), LORA, directory=tmp_path, device="cpu"
    ) as sync:
        weights = sync.export(adapter(1), 1)
        assert json.loads((weights.path / "config.json").read_text())["dtype"] == "float32"
        assert {t.dtype for t in load_file(weights.path / "model.safetensors").values()} == {torch.float32}


def test_folders_of_killed_processes_are_removed_but_not_those_in_use(base_dir, tmp_path):
    abandoned = tmp_path / "writer-rl-sync-dead"
    abandoned.mkdir()
    (abandoned / ".lock").touch()
    config = SamplerConfig(sync="adapter")
    with AdapterSync(base_dir, config, LORA, directory=tmp_path, device="cpu") as first:
        kept = first.export(adapter(0), 0).path
        assert not abandoned.exists()
        with AdapterSync(base_dir, config, LORA, directory=tmp_path, device="cpu"):
            assert kept.exists()


def test_auto_follows_the_device(base_dir, tmp_path):
    for device, form in (("cpu", "merged"), ("cuda", "adapter")):
        with AdapterSync(base_dir, SamplerConfig(), LORA, directory=tmp_path, device=device) as sync:
            assert sync.form == form
