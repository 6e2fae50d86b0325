"""What every sampler promises: prompt ids in, completions out, each under a known policy version."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

FinishReason = Literal["stop", "length", "error"]
SyncForm = Literal["adapter", "merged"]


class StalePolicyError(RuntimeError):
    """Generating was asked of an engine that holds no weights, or weights of another version."""


class GeneratorError(RuntimeError):
    """The engine itself has failed; no further completion can come from it."""


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How to sample one completion.

    Args:
        temperature: Divides the logits; 0 decodes greedily.
        top_p: The smallest set of tokens whose mass reaches this is kept and renormalised; 1 keeps all.
        max_new_tokens: Most tokens of a completion, the EOS included.
        json_schema: Decode only texts that this JSON schema accepts.

    Raises:
        ValueError: A value outside its range.
    """

    temperature: float = 0.8
    top_p: float = 0.95
    max_new_tokens: int = 2048
    json_schema: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature}; give 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; give a number in (0, 1]")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; give 1 or more")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken each time."""
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion. `token_ids` are what was sampled and are what is trained: never re-encode `text` (fault 19).

    Args:
        token_ids: Sampled ids, the EOS included where one was sampled (fault 20).
        sampling_logprobs: Log-probability of each id in nats under the distribution it was drawn from: logits over
            the temperature, top-p mass renormalised. Greedy: of the plain model (temperature 1, all tokens).
        text: Decoded ids without control tokens, for parsing and display.
        finish_reason: "stop" after an EOS, "length" at the token limit, "error" if there is no completion.
        policy_version: Version of the weights that sampled it.
        num_prompt_tokens: Length of the prompt.
        error: What went wrong, empty otherwise.
    """

    token_ids: tuple[int, ...]
    sampling_logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    policy_version: int
    num_prompt_tokens: int
    error: str = ""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.sampling_logprobs):
            raise ValueError(
                f"{len(self.token_ids)} token ids but {len(self.sampling_logprobs)} log-probs; every token has one"
            )

    @classmethod
    def failed(cls, error: str, policy_version: int, num_prompt_tokens: int) -> Completion:
        """The completion that stands for a request that went wrong."""
        return cls((), (), "", "error", policy_version, num_prompt_tokens, error or "unknown error")


@dataclass(frozen=True, slots=True)
class PolicyWeights:
    """Weights of one policy version on disk.

    Args:
        version: Policy version, 0 for the start of training.
        kind: "base" = the engine's own base model; "merged" = a whole model folder; "adapter" = a PEFT adapter folder.
        path: The folder; not read for "base".
    """

    version: int
    kind: Literal["base", "merged", "adapter"]
    path: Path


class Generator(Protocol):
    """A sampler that holds one policy version at a time."""

    @property
    def policy_version(self) -> int | None:
        """Version of the loaded weights; None before the first `load_policy` and while weights are being loaded."""

    def submit(
        self, prompt_ids: Sequence[int], spec: SamplingSpec, seed: int, *, expected_version: int | None = None
    ) -> Future[Completion]:
        """Ask for one completion; returns at once, so that trajectories advance independently of each other.

        Args:
            prompt_ids: Token ids of the prompt, 1 or more.
            spec: Sampling settings.
            seed: Seed of this completion alone, see `derive_seed`. Equal seeds draw the same noise.
            expected_version: Refuse unless exactly this version is loaded.

        Returns:
            A future that resolves to a completion; a request that fails resolves to one with finish reason "error".
            It holds a `GeneratorError` only when the whole engine has died.

        Raises:
            StalePolicyError: No policy is loaded, or another than `expected_version` (fault 17).
            GeneratorError: The engine has died or was closed.
        """

    def load_policy(self, weights: PolicyWeights) -> float:
        """Replace the weights. No request may be in flight, so that every completion belongs to exactly one version.

        Returns:
            Seconds it took.

        Raises:
            RuntimeError: Requests are in flight. After a failed load no policy is held.
        """

    def close(self) -> None:
        """Release the engine. Safe to call twice."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class PolicyGate:
    """The bookkeeping that generators share: which version is loaded, how many requests run under it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._version: int | None = None
        self._num_running = 0
        self._broken = ""

    @property
    def version(self) -> int | None:
        """Version of the loaded weights."""
        return self._version

    @property
    def broken(self) -> str:
        """Why no request is accepted any more; empty while all is well."""
        return self._broken

    def break_down(self, reason: str) -> None:
        """Refuse every further request. The first reason stays."""
        with self._lock:
            self._version = None
            self._broken = self._broken or reason

    def enter(self, expected_version: int | None) -> int:
        """Register a request and return the version it runs under; see `Generator.submit` for what it raises."""
        with self._lock:
            if self._broken:
                raise GeneratorError(self._broken)
            if self._version is None:
                raise StalePolicyError("the generator holds no policy; call load_policy first")
            if expected_version is not None and expected_version != self._version:
                raise StalePolicyError(
                    f"the generator holds policy version {self._version}, not {expected_version}; load that first"
                )
            self._num_running += 1
            return self._version

    def leave(self) -> None:
        """Unregister a request."""
        with self._lock:
            self._num_running -= 1

    @contextmanager
    def loading(self, version: int) -> Iterator[None]:
        """Hold no version for the length of the block, `version` after it, none if it raised."""
        with self._lock:
            if self._broken:
                raise GeneratorError(self._broken)
            if self._num_running:
                raise RuntimeError(f"{self._num_running} requests are in flight; wait for them before loading weights")
            self._version = None
        yield
        with self._lock:
            self._version = version


def sync_form(sync: Literal["auto", "adapter", "merged"], device: Literal["cpu", "cuda"]) -> SyncForm:
    """How weights travel to the engine: `auto` is "merged" on CPU, where LoRA kernels are slow, "adapter" on CUDA."""
    return ("adapter" if device == "cuda" else "merged") if sync == "auto" else sync


def text_decoder(model_dir: Path) -> Callable[[Sequence[int]], str]:
    """The model's own decoder: ids to text without control tokens and without any tidying of blanks."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)

    def decode(token_ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    return decode
