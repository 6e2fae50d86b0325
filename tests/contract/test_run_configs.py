"""Every configuration down to the arguments that other libraries are given, and the paper's values one by one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.state import AcceleratorState

from writer_rl.configs.load import CONFIG_DIR, load_config
from writer_rl.configs.schema import LoraSettings, RunConfig
from writer_rl.data.contract import action_budget
from writer_rl.rewards.compose import segment_returns
from writer_rl.trainer.grpo import sampling_spec

pytest.importorskip("vllm", reason="vLLM is not installed")
from writer_rl.rollouts.vllm_engine import _engine_args

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(path.stem for path in CONFIG_DIR.glob("*.yaml"))
GPU_CONFIGS = [name for name in CONFIGS if name.startswith("qwen2.5-3b")]

ENGINE_CHECK = """
import json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
for args in json.load(sys.stdin):
    made = AsyncEngineArgs(**args)
    for key, value in args.items():
        assert getattr(made, key) == value, (key, getattr(made, key), value)
print("accepted")
"""


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> Iterator[None]:
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture(scope="module")
def paper() -> RunConfig:
    return load_config("qwen2.5-3b-paper")


def engine_args(config: RunConfig, device: str) -> dict[str, Any]:
    """What vLLM would be given on a device; the function reads two attributes of the engine's owner."""
    form = "adapter" if device == "cuda" else "merged"
    return _engine_args(
        Path("model"), config.sampler, SimpleNamespace(device=device, form=form), config.model.lora.r, 7
    )  # type: ignore[arg-type]


def test_the_packaged_configurations_are_the_named_ones() -> None:
    assert {"demo", "demo-quick", "qwen2.5-3b", "qwen2.5-3b-paper", "speakermem-smoke"} <= set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_fits_itself(name: str) -> None:
    """Name, lengths, and that a supervised row may be as long as the longest prompt with its answer is at sampling."""
    config = load_config(name)
    assert config.name == name
    assert config.contract.max_prompt_tokens + config.sampler.max_new_tokens <= config.sampler.max_model_len
    assert config.sft.max_length >= config.contract.max_prompt_tokens
    assert config.grpo.micro_batch_tokens >= config.sampler.max_model_len
    assert config.grpo.group_size >= 2
    spec = sampling_spec(config)
    assert (spec.temperature, spec.top_p, spec.max_new_tokens) == (
        config.sampler.temperature, config.sampler.top_p, config.sampler.max_new_tokens
    )  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_rollouts_have_log_probs_that_can_be_compared(name: str) -> None:
    """Adapters start as the identity and without dropout, so that the first ratio is exactly 1."""
    config = load_config(name)
    assert config.model.lora.dropout == 0.0
    for device in ("cpu", "cuda"):
        args = engine_args(config, device)
        assert args["logprobs_mode"] == "processed_logprobs"
        assert args["trust_remote_code"] is False
        assert args["load_format"] == "safetensors"


@pytest.mark.parametrize("name", GPU_CONFIGS)
def test_engine_arguments_on_a_gpu(name: str) -> None:
    config = load_config(name)
    args = engine_args(config, "cuda")
    assert args["dtype"] == "bfloat16"
    assert args["max_model_len"] == 16384
    assert args["max_num_seqs"] == config.sampler.max_num_seqs
    assert args["gpu_memory_utilization"] == 0.45
    assert args["enable_prefix_caching"] is True
    assert args["enforce_eager"] is False
    assert (args["enable_lora"], args["max_lora_rank"], args["max_loras"], args["max_cpu_loras"]) == (True, 16, 1, 1)
    assert args["seed"] == 7
    assert not {"enable_chunked_prefill", "max_num_batched_tokens"} & set(args)


def test_engine_arguments_on_a_cpu() -> None:
    args = engine_args(load_config("demo"), "cpu")
    assert args["enable_chunked_prefill"] is False
    assert args["max_num_batched_tokens"] >= args["max_model_len"]
    assert not {"gpu_memory_utilization", "enable_lora"} & set(args)


@pytest.mark.parametrize(("r", "rank"), [(1, 8), (8, 8), (9, 16), (16, 16), (33, 64), (512, 512)])
def test_ranks_are_rounded_up_to_the_engines(r: int, rank: int) -> None:
    config = load_config("qwen2.5-3b")
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora": LoraSettings(r=r)})})
    assert engine_args(config, "cuda")["max_lora_rank"] == rank


def test_vllm_accepts_the_arguments(tiny_chat_dir: Path) -> None:
    """In a process of its own: importing vLLM changes threads and environment of the one it runs in."""
    given = [
        engine_args(load_config(name), device) | {"model": str(tiny_chat_dir)}
        for name in CONFIGS
        for device in ("cpu", "cuda")
    ]
    done = subprocess.run(
        [sys.executable, "-c", ENGINE_CHECK],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.strip().endswith("accepted"), done.stderr[-2000:]


@pytest.mark.parametrize("name", GPU_CONFIGS)
def test_arguments_of_supervised_training(name: str, tmp_path: Path) -> None:
    from writer_rl.trainer.sft import sft_arguments

    config = load_config(name)
    made = sft_arguments(config, tmp_path, num_rows=73)
    assert made.num_train_epochs == config.sft.epochs
    assert made.learning_rate == config.sft.learning_rate
    assert made.per_device_train_batch_size == config.sft.batch_size == 1
    assert made.gradient_accumulation_steps == config.sft.accumulation
    assert made.gradient_checkpointing is True
    assert made.bf16 is True
    assert made.max_length is None  # nothing may be cut: rows are checked one by one beforehand
    assert made.packing is False
    assert made.seed == made.data_seed == config.seed == 42
    assert made.weight_decay == 0.0
    assert made.max_grad_norm == 1.0
    assert made.report_to == []
    # 73 rows in steps of accumulation: the schedule warms up over warmup_frac of them.
    steps = -(-73 // config.sft.accumulation) * int(config.sft.epochs)
    assert made.get_warmup_steps(steps) == pytest.approx(config.sft.warmup_frac * steps, abs=1)


@pytest.mark.parametrize("name", GPU_CONFIGS)
def test_optimiser_of_reinforcement_learning(name: str, tiny_chat_dir: Path) -> None:
    """The configuration on a tiny model: rate, betas and decay as AdamW holds them, and a float32 adapter."""
    from writer_rl.trainer.learner import Learner

    config = load_config(name)
    model = config.model.model_copy(update={"path": str(tiny_chat_dir), "autocast": False})
    learner = Learner(config.model_copy(update={"model": model}), tiny_chat_dir)
    (group,) = learner._optimiser.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (config.grpo.learning_rate, (0.9, 0.999), 0.0)
    trained = [p for p in learner.policy.parameters() if p.requires_grad]
    assert sum(p.numel() for p in group["params"]) == sum(p.numel() for p in trained)
    assert {str(p.dtype) for p in trained} == {"torch.float32"}
    assert {str(p.dtype) for p in learner.policy.parameters() if not p.requires_grad} == {"torch.bfloat16"}
    assert learner._scorer.temperature == 0.8
    lora = learner.policy.peft_config["default"]
    assert (lora.r, lora.lora_alpha, lora.lora_dropout) == (16, 32, 0.0)


@pytest.mark.parametrize("name", ["cpu", "ddp", "zero2", "zero3"])
def test_accelerate_reads_the_launcher_files(name: str) -> None:
    """Accelerate's own reader refuses unknown keys; number formats are left to the run's configuration."""
    settings = load_config_from_file(str(CONFIG_DIR / "accelerate" / f"{name}.yaml"))
    assert settings.num_machines == 1
    assert settings.num_processes == (2 if name == "cpu" else 8)
    kind = {"cpu": "MULTI_CPU", "ddp": "MULTI_GPU", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}[name]
    assert getattr(settings.distributed_type, "value", settings.distributed_type) == kind
    if name.startswith("zero"):
        file = ROOT / settings.deepspeed_config["deepspeed_config_file"]
        assert json.loads(file.read_text())["zero_optimization"]["stage"] == int(name[-1])
    else:
        assert settings.mixed_precision == "no"


# ---------------------------------------------------------------- specification §6, value by value


def test_paper_model_and_supervised_training(paper: RunConfig) -> None:
    assert paper.model.path.endswith("Qwen2.5-3B-Instruct")
    assert paper.sft.learning_rate == 1e-5
    assert paper.sft.batch_size * paper.sft.accumulation == 8
    assert paper.sft.max_length == 16384
    assert paper.sft.epochs == 10
    assert paper.seed == 42


def test_paper_sampling(paper: RunConfig) -> None:
    assert paper.grpo.group_size == 8
    assert paper.sampler.temperature == 0.8
    assert paper.sampler.top_p == 0.95
    assert paper.sampler.max_new_tokens == 2048
    assert paper.data.window == 25
    assert (action_budget(3), action_budget(25)) == (8, 50)


def test_paper_reinforcement_learning(paper: RunConfig) -> None:
    grpo = paper.grpo
    assert grpo.num_updates == 30
    assert grpo.dialogues_per_update == 1
    assert (grpo.epochs, grpo.minibatches) == (2, 1)  # one optimiser step per epoch, two epochs
    assert grpo.learning_rate == 1e-6
    assert grpo.max_grad_norm == 1.0
    assert (grpo.clip_low, grpo.clip_high) == (0.2, 0.2)
    assert grpo.beta == 0.1
    assert (grpo.loss, grpo.kl_estimator) == ("completion_mean", "k3")
    assert (grpo.kl_guard, grpo.kl_guard_nats) == ("reference", 0.02)
    assert (grpo.min_group_std, grpo.advantage_clip) == (0.02, 3.0)
    assert grpo.importance_cap == 0.0
    assert (grpo.schedule, grpo.warmup_updates, grpo.weight_decay) == ("constant", 0, 0.0)


def test_paper_contract_and_rewards(paper: RunConfig) -> None:
    contract, reward = paper.contract, paper.reward
    assert (contract.rules, reward.rules) == ("paper", "paper")
    assert (contract.form, contract.order) == ("full", "grouped")
    assert (contract.records_per_owner, contract.memory_chars, contract.min_owner_chars) == (40, 60000, 240)
    assert (reward.valid_weight, reward.memory_weight, reward.qa_weight) == (0.20, 0.45, 0.35)
    assert (reward.valid_weight_without_qa, reward.memory_weight_without_qa) == (0.25, 0.75)
    assert reward.gamma == 0.95
    assert reward.memory_return == "state"
    # The first of two segments: 0.20·1 + 0.45·0.5 − 0.15 + 0.35·0.95·0.4.
    assert segment_returns([1, 1], [0.5, 0.5], [-0.15, 0], 0.4, reward)[0] == pytest.approx(0.408)
    qa = reward.qa
    assert (qa.max_questions, qa.recall_n, qa.s1_top_k, qa.s2_k, qa.source_k, qa.ask) == (4, 40, 10, 2, 1, False)


def test_the_corrected_run_differs_where_it_says(paper: RunConfig) -> None:
    fixed = load_config("qwen2.5-3b")
    assert (fixed.contract.rules, fixed.reward.rules, fixed.contract.order) == ("fixed", "fixed", "append")
    assert fixed.grpo.kl_guard == "old"
    assert 10 <= fixed.grpo.learning_rate / paper.grpo.learning_rate <= 50  # what LoRA wants
    assert fixed.grpo.group_size == paper.grpo.group_size
    assert fixed.reward.qa == paper.reward.qa  # one budget, so that runs compare
