"""The run configuration: frozen models, unknown keys refused, cross-field checks that say what to change.

One YAML file describes one kind of run from model to evaluation. Every default below is the value of the *fixed* rule set of
the specification; `configs/qwen2.5-3b-paper.yaml` spells out where the paper differs.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

RuleSet = Literal["paper", "fixed"]


class StrictModel(BaseModel):
    """Base of every configuration model: immutable, no unknown keys, no silent type conversion of strings to numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class LoraSettings(StrictModel):
    """Low-rank adapter on the frozen base."""

    r: int = Field(16, ge=1, description="rank")
    alpha: int = Field(32, ge=1, description="scale numerator; the adapter is scaled by alpha / r")
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="dropout; 0 keeps the first ratio exactly 1")
    target_modules: tuple[str, ...] | Literal["all-linear"] = Field(
        "all-linear", description="module names that get an adapter"
    )


class ModelConfig(StrictModel):
    """The base model and its number formats."""

    path: str = Field(
        "package:smollm2-135m", description="a local directory, or package:smollm2-135m for the packaged model"
    )
    train_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="number format of the frozen base weights in the learner; adapter weights are always float32",
    )
    autocast: bool = Field(False, description="compute the learner's matrix products in bfloat16")
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    lora: LoraSettings = LoraSettings()


class TeacherFaults(StrictModel):
    """How often the simulated teacher errs. Its traces are what SFT imitates; rewards and evaluation use the true memory."""

    misfiled_hearsay: float = Field(
        0.0, ge=0.0, le=1.0, description="a matter told about someone is filed under the teller"
    )
    written_noise: float = Field(0.0, ge=0.0, le=1.0, description="a line of side talk is written down")
    missed_update: float = Field(0.0, ge=0.0, le=1.0, description="a matter that has moved on is added again")


class SimulationConfig(StrictModel):
    """Simulated chats whose true memory is known. Counts and shares; ranges are inclusive (low, high)."""

    num_train: int = Field(256, ge=0, description="training dialogues")
    num_heldout: int = Field(48, ge=0, description="held-out dialogues; no seed and no name in common with training")
    members: tuple[int, int] = Field((4, 5), description="members per dialogue")
    sessions: tuple[int, int] = Field((3, 3), description="sessions per dialogue")
    messages: tuple[int, int] = Field((4, 6), description="messages per session")
    matters: tuple[int, int] = Field((1, 3), description="memory-worthy messages per session")
    update_share: float = Field(
        0.35,
        ge=0.0,
        le=1.0,
        description="chance that a memory-worthy message of a later session moves an existing matter on",
    )
    noop_share: float = Field(0.08, ge=0.0, le=1.0, description="chance that a session holds side talk alone")
    hearsay_share: float = Field(
        0.3, ge=0.0, le=1.0, description="chance that a person matter is told by somebody else"
    )
    group_share: float = Field(0.25, ge=0.0, le=1.0, description="chance that a matter belongs to the group")
    disagreement_share: float = Field(
        0.1, ge=0.0, le=1.0, description="chance that a stance draws a contrary stance of another member"
    )
    questions: int = Field(4, ge=0, description="questions per dialogue")
    teacher_faults: TeacherFaults = TeacherFaults()
    seed: int = 0

    @model_validator(mode="after")
    def _ranges(self) -> SimulationConfig:
        for name in ("members", "sessions", "messages", "matters"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ValueError(f"{name} is [{low}, {high}]; give an increasing range that starts at 1 or more")
        if self.members[0] < 2:
            raise ValueError(f"members starts at {self.members[0]}; a group chat needs at least 2")
        if self.matters[1] > self.messages[0]:
            raise ValueError(
                f"matters may reach {self.matters[1]} in a session of {self.messages[0]} messages; "
                "lower matters or raise messages"
            )
        return self


class DataConfig(StrictModel):
    """Where dialogues and teacher traces come from."""

    source: Literal["simulation", "files"] = "simulation"
    train_dialogues: str = Field("", description="canonical dialogue file or directory (source: files)")
    train_traces: str = Field("", description="canonical trace file or directory (source: files)")
    heldout_dialogues: str = Field(
        "", description="canonical dialogue file or directory for evaluation (source: files)"
    )
    heldout_traces: str = Field("", description="reference traces of the held-out dialogues (source: files)")
    window: int = Field(25, ge=1, description="messages per segment at most")
    max_dialogues: int = Field(0, ge=0, description="use only the first n training dialogues; 0 uses all")
    max_segments: int = Field(0, ge=0, description="use only the first n segments of each dialogue; 0 uses all")
    allow_stale_prompt: bool = Field(False, description="accept traces made under another PROMPT_VERSION")
    simulation: SimulationConfig = SimulationConfig()

    @model_validator(mode="after")
    def _files(self) -> DataConfig:
        if self.source == "files" and not (self.train_dialogues and self.train_traces):
            raise ValueError("source is files but train_dialogues or train_traces is empty; give both paths")
        return self


class ContractConfig(StrictModel):
    """How memory and prompt are rendered, and which rules an action list must satisfy."""

    form: Literal["compact", "full"] = "compact"
    rules: RuleSet = "fixed"
    order: Literal["append", "grouped"] = Field(
        "append",
        description="append: old records first so that prefixes stay cached; grouped: by owner as in the paper",
    )
    records_per_owner: int = Field(40, ge=1, description="heads shown per owner, chosen by cosine with the segment")
    memory_chars: int = Field(60000, ge=240, description="characters of rendered memory over all owners")
    min_owner_chars: int = Field(240, ge=0, description="characters each owner may use at least")
    embedder: Literal["minilm", "hashed"] = Field("minilm", description="sentence vectors for selection and provenance")
    max_prompt_tokens: int = Field(14336, ge=64, description="a longer prompt is an error, never truncated")


class QaConfig(StrictModel):
    """The frozen reader of the QA gain; one budget for training and for every arm of the evaluation."""

    enabled: bool = True
    reader: Literal["embedded"] = Field(
        "embedded", description="offline deterministic reader; LLM readers plug into the same interfaces"
    )
    max_questions: int = Field(4, ge=0)
    recall_n: int = Field(40, ge=1)
    s1_top_k: int = Field(10, ge=0)
    s2_k: int = Field(2, ge=0)
    source_k: int = Field(1, ge=0)
    expand: int = Field(0, ge=0, le=2)
    ask: bool = False


class RewardConfig(StrictModel):
    """Weights of the return of a segment."""

    rules: RuleSet = "fixed"
    preset: Literal["speakermem"] = "speakermem"
    valid_weight: float = 0.20
    memory_weight: float = 0.45
    qa_weight: float = 0.35
    valid_weight_without_qa: float = 0.25
    memory_weight_without_qa: float = 0.75
    gamma: float = Field(0.95, gt=0.0, le=1.0)
    memory_return: Literal["state", "potential"] = Field(
        "state", description="state: R_mem(t); potential: R_mem(t) - gamma * R_mem(t-1)"
    )
    qa: QaConfig = QaConfig()


class SamplerConfig(StrictModel):
    """The engine that samples and how it is kept in step with the learner."""

    engine: Literal["vllm", "transformers"] = "vllm"
    sync: Literal["auto", "adapter", "merged"] = Field("auto", description="auto: merged on CPU, adapter on GPU")
    dtype: Literal["bfloat16", "float32", "auto"] = "bfloat16"
    temperature: float = Field(0.8, gt=0.0)
    top_p: float = Field(0.95, gt=0.0, le=1.0)
    max_new_tokens: int = Field(2048, ge=1)
    constrained: bool = Field(False, description="decode under the JSON schema of the action list")
    max_model_len: int = Field(16384, ge=128)
    max_num_seqs: int = Field(64, ge=1)
    gpu_memory_frac: float = Field(0.45, gt=0.0, lt=1.0)
    cpu_cache_gib: int = Field(2, ge=1, description="key-value cache on CPU")
    enforce_eager: bool = False
    prefix_caching: bool = True
    max_mismatch_nats: float = Field(
        0.2, gt=0.0, description="mean |log-prob difference| between sampler and learner above which the run stops"
    )


class SftConfig(StrictModel):
    """Supervised fine-tuning on teacher traces."""

    epochs: float = Field(10, gt=0)
    learning_rate: float = Field(1e-5, gt=0)
    batch_size: int = Field(1, ge=1, description="rows per device and micro-batch")
    accumulation: int = Field(8, ge=1)
    warmup_frac: float = Field(0.05, ge=0.0, lt=1.0)
    scheduler: Literal["constant_with_warmup", "linear", "cosine"] = "cosine"
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    max_length: int = Field(16384, ge=64, description="a longer row is an error, never truncated")
    gradient_checkpointing: bool = False
    max_dialogues: int = Field(0, ge=0, description="use only the first n training dialogues; 0 uses all")
    heldout_dialogues: int = Field(
        4, ge=0, description="training-side dialogues set aside for validation loss and greedy validity"
    )


class GrpoConfig(StrictModel):
    """The reinforcement-learning loop."""

    num_updates: int = Field(30, ge=0, description="rollout batches, each followed by its optimiser steps")
    dialogues_per_update: int = Field(1, ge=1)
    group_size: int = Field(8, ge=1, description="trajectories per dialogue, G")
    epochs: int = Field(2, ge=1, description="passes over a rollout batch")
    minibatches: int = Field(1, ge=1, description="optimiser steps per epoch")
    learning_rate: float = Field(2e-5, gt=0)
    warmup_updates: int = Field(0, ge=0)
    schedule: Literal["constant", "linear"] = "constant"
    weight_decay: float = 0.0
    adam_betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float = Field(1.0, gt=0)
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0)
    beta: float = Field(0.1, ge=0, description="weight of the k3 penalty to the SFT policy")
    loss: Literal["completion_mean", "token_mean", "dr_grpo", "gspo"] = "completion_mean"
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    advantage_clip: float = Field(3.0, gt=0)
    min_group_std: float = Field(0.02, ge=0, description="groups with a smaller population std are dropped")
    kl_guard: Literal["old", "reference", "off"] = Field(
        "old",
        description="old: skip the step if KL(old || new) is above the bound; reference: the paper's guard on the SFT policy",
    )
    kl_guard_nats: float = Field(0.02, gt=0)
    importance_cap: float = Field(
        0.0, ge=0, description="truncated importance weight of sampler against learner; 0 reports only"
    )
    micro_batch_tokens: int = Field(8192, ge=64, description="padded tokens per forward pass")
    gradient_checkpointing: bool = False
    save_every: int = Field(5, ge=1, description="updates between checkpoints; the last is always saved")
    keep_checkpoints: int = Field(2, ge=1)
    eval_every: int = Field(0, ge=0, description="updates between held-out probes; 0 probes never")
    eval_dialogues: int = Field(16, ge=1, description="held-out dialogues of a probe")
    sample_rows: int = Field(8, ge=0, description="rows of the sample table written per update")

    @model_validator(mode="after")
    def _group(self) -> GrpoConfig:
        if self.group_size < 2:
            raise ValueError(
                f"group_size is {self.group_size}; a group-relative advantage needs at least 2 trajectories"
            )
        return self


class EvaluationConfig(StrictModel):
    """Held-out evaluation; the retrieval budget is reward.qa, the same object the training reward uses."""

    arms: tuple[Literal["s1_only", "base", "sft", "rl", "reference"], ...] = (
        "s1_only",
        "base",
        "sft",
        "rl",
        "reference",
    )
    num_dialogues: int = Field(0, ge=0, description="0 evaluates all held-out dialogues")
    temperature: float = Field(0.0, ge=0.0, description="0 decodes greedily")
    bootstrap_draws: int = Field(10000, ge=100)
    max_new_tokens: int = Field(0, ge=0, description="0 uses the sampler's limit")


class LoggingConfig(StrictModel):
    """Where metrics go besides metrics.jsonl."""

    wandb: Literal["auto", "offline", "online", "disabled"] = Field(
        "auto", description="auto: online when logged in, else offline"
    )
    wandb_project: str = "writer-rl"


class RunConfig(StrictModel):
    """One run, whole."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9._-]+$")
    output_dir: str = Field("checkpoints/runs", description="runs are written to <output_dir>/<name>")
    seed: int = Field(42, ge=0)
    threads: int = Field(0, ge=0, description="CPU threads of the learner; 0 uses all cores")
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    contract: ContractConfig = ContractConfig()
    reward: RewardConfig = RewardConfig()
    sampler: SamplerConfig = SamplerConfig()
    sft: SftConfig = SftConfig()
    grpo: GrpoConfig = GrpoConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _lengths(self) -> RunConfig:
        need = self.contract.max_prompt_tokens + self.sampler.max_new_tokens
        if need > self.sampler.max_model_len:
            raise ValueError(
                f"contract.max_prompt_tokens + sampler.max_new_tokens = {need} exceeds sampler.max_model_len = "
                f"{self.sampler.max_model_len}; raise max_model_len or lower one of the two"
            )
        if self.model.path.startswith("package:") and self.model.path != "package:smollm2-135m":
            raise ValueError(
                f"model.path {self.model.path!r} names no packaged model; use package:smollm2-135m or a directory"
            )
        return self
