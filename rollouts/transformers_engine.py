"""The generator for machines without vLLM: batched decoding with transformers in a worker thread.

Requests that are waiting are decoded together; a row that ends leaves the batch and its future resolves at once.
The noise of a row comes from its own seed, so it does not depend on which rows it was batched with.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from writer_rl.configs.errors import InputError
from writer_rl.configs.schema import SamplerConfig
from writer_rl.rollouts.generator import (
    Completion,
    GeneratorError,
    PolicyGate,
    PolicyWeights,
    SamplingSpec,
    sync_form,
    text_decoder,
)

_GATHER_S = 0.02
"""How long the worker waits for company before it starts a batch."""


@dataclass(slots=True)
class _Row:
    """One request under way."""

    prompt_ids: list[int]
    spec: SamplingSpec
    seed: int
    version: int
    future: Future[Completion]
    noise: torch.Generator = field(default_factory=torch.Generator)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def uniform(self) -> float:
        """The row's next uniform number, drawn on the CPU so that it is the same on every device; 0 for greedy rows."""
        return 0.0 if self.spec.greedy else torch.rand((), generator=self.noise, dtype=torch.float64).item()


def processed_logprobs(logits_BV: Tensor, temperature_B: Tensor, top_p_B: Tensor) -> Tensor:
    """Log-probabilities that tokens are drawn from: logits over temperature, top-p mass kept and renormalised.

    Args:
        logits_BV: Raw logits, any float format; B rows, V vocabulary.
        temperature_B: Positive; 0 stands for greedy and leaves the row as it is (temperature 1, all tokens).
        top_p_B: In (0, 1]. The smallest set of most likely tokens whose mass reaches it is kept.

    Returns:
        float32 (B, V); -inf for dropped tokens.

    Example: probabilities 0.5, 0.3, 0.2 at top_p 0.6 keep the first two: log 0.625, log 0.375, -inf.
    """
    greedy_B = temperature_B == 0
    scaled_BV = logits_BV.float() / torch.where(greedy_B, 1.0, temperature_B)[:, None]
    logprobs_BV = scaled_BV.log_softmax(-1)
    top_p_B = torch.where(greedy_B, 1.0, top_p_B)
    if bool((top_p_B < 1).any()):
        ordered_BV, order_BV = logprobs_BV.sort(-1, descending=True)
        mass_before_BV = ordered_BV.exp().cumsum(-1) - ordered_BV.exp()
        dropped_BV = (mass_before_BV >= top_p_B[:, None]) & (top_p_B[:, None] < 1)
        dropped_BV[:, 0] = False
        dropped_BV = torch.zeros_like(dropped_BV).scatter(-1, order_BV, dropped_BV)
        logprobs_BV = logprobs_BV.masked_fill(dropped_BV, -torch.inf).log_softmax(-1)
    return logprobs_BV


class TransformersGenerator:
    """Decoding by transformers; see `Generator` for the promises. Decoding under a JSON schema is not offered.

    Args:
        base_dir: Model folder. The generator holds no policy until `load_policy` is called.
        config: Sampler settings; `max_num_seqs` bounds a batch, `max_model_len` prompt and completion together.
        eos_token_ids: Every id that ends a completion.
        device: "cpu" or "cuda"; the GPU where there is one, if None.
    """

    def __init__(
        self,
        base_dir: Path,
        config: SamplerConfig,
        *,
        eos_token_ids: Sequence[int],
        device: Literal["cpu", "cuda"] | None = None,
    ) -> None:
        self.device: Literal["cpu", "cuda"] = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.form = sync_form(config.sync, self.device)
        dtype = config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        model = AutoModelForCausalLM.from_pretrained(
            base_dir, dtype=dtype, use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
        self._base_dir: Path | None = base_dir
        self._held_dir: Path | None = base_dir.resolve()
        self._start(
            model.to(self.device).eval(),
            text_decoder(base_dir),
            eos_token_ids,
            config.max_num_seqs,
            config.max_model_len,
        )

    @classmethod
    def around(
        cls, model: Any, tokenizer: Any, *, eos_token_ids: Sequence[int], version: int = 0, max_batch: int = 16
    ) -> Self:
        """A generator around a model in memory, for example the learner's own policy in evaluation mode.

        It holds `version` from the start; `load_policy` is refused. Leave the weights alone during requests.

        Args:
            model: A causal LM of transformers or PEFT. It is used as it is.
            tokenizer: Decodes completions.
            eos_token_ids: Every id that ends a completion.
            version: Policy version of the weights.
            max_batch: Most rows decoded together.
        """
        self = cls.__new__(cls)
        device = next(model.parameters()).device
        self.device = "cuda" if device.type == "cuda" else "cpu"
        self.form = "merged"
        self._base_dir = self._held_dir = None
        limit = int(getattr(model.config, "max_position_embeddings", 2**31))

        def decode(token_ids: Sequence[int]) -> str:
            text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
            return text

        self._start(model, decode, eos_token_ids, max_batch, limit)
        with self._gate.loading(version):
            pass
        return self

    def _start(
        self,
        model: Any,
        decode: Callable[[Sequence[int]], str],
        eos_token_ids: Sequence[int],
        max_batch: int,
        max_len: int,
    ) -> None:
        self._model, self._decode = model, decode
        self._eos = frozenset(eos_token_ids)
        self._max_batch, self._max_len = max_batch, max_len
        self._gate = PolicyGate()
        self._queue: queue.SimpleQueue[_Row | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="transformers-generator", daemon=True)
        self._thread.start()

    @property
    def policy_version(self) -> int | None:
        """Version of the loaded weights."""
        return self._gate.version

    def submit(
        self, prompt_ids: Sequence[int], spec: SamplingSpec, seed: int, *, expected_version: int | None = None
    ) -> Future[Completion]:
        """Queue one request; see `Generator.submit`.

        Raises:
            InputError: The spec has a JSON schema.
        """
        if spec.json_schema is not None:
            raise InputError(
                "sampler.constrained", "is true, but engine transformers cannot decode under a JSON schema",
                "set it to false, or sampler.engine to vllm",
            )  # fmt: skip
        version = self._gate.enter(expected_version)
        row = _Row(list(prompt_ids), spec, seed, version, Future())
        row.noise.manual_seed(seed)
        self._queue.put(row)
        return row.future

    def load_policy(self, weights: PolicyWeights) -> float:
        """Replace the weights in place, or put the adapter on the base; see `Generator.load_policy`."""
        if self._base_dir is None:
            raise RuntimeError("this generator samples from the learner's own model; there is nothing to load")
        began = time.monotonic()
        with self._gate.loading(weights.version):
            if hasattr(self._model, "unload"):
                self._model = self._model.unload()  # the base as it was, without any adapter
            folder = weights.path.resolve() if weights.kind == "merged" else self._base_dir.resolve()
            if folder != self._held_dir or weights.kind == "merged":
                self._held_dir = None
                _copy_weights(folder, self._model)
                self._held_dir = folder
            if weights.kind == "adapter":
                from peft import PeftModel

                self._model = PeftModel.from_pretrained(self._model, str(weights.path), torch_device=self.device).eval()
        return time.monotonic() - began

    def close(self) -> None:
        """Finish the requests in flight and stop the worker."""
        if not self._gate.broken:
            self._gate.break_down("the generator is closed")
            self._queue.put(None)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        closing = False
        while not closing:
            rows: list[_Row] = []
            row = self._queue.get()
            while row is not None:
                rows.append(row)
                if len(rows) == self._max_batch:
                    break
                try:
                    row = self._queue.get(timeout=_GATHER_S)
                except queue.Empty:
                    break
            closing = row is None
            refused = [r for r in rows if not r.prompt_ids or len(r.prompt_ids) >= self._max_len]
            for bad in refused:
                self._fail(bad, f"a prompt of {len(bad.prompt_ids)} tokens does not fit the limit of {self._max_len}")
            rows = [r for r in rows if r not in refused]
            try:
                if rows:
                    self._decode_batch(rows)
            except Exception as error:  # out of memory and the like: data for these rows, the engine lives on
                for failed in rows:
                    if not failed.future.done():
                        self._fail(failed, f"{type(error).__name__}: {error}")

    @torch.inference_mode()
    def _decode_batch(self, rows: list[_Row]) -> None:
        width = max(len(row.prompt_ids) for row in rows)
        # Left padding: every row's next token stands in the last column. The pad id is masked, so any id serves.
        ids_BT = torch.zeros(len(rows), width, dtype=torch.long)
        mask_BT = torch.zeros(len(rows), width, dtype=torch.long)
        for place, row in enumerate(rows):
            ids_BT[place, width - len(row.prompt_ids) :] = torch.tensor(row.prompt_ids)
            mask_BT[place, width - len(row.prompt_ids) :] = 1
        ids_BT, mask_BT = ids_BT.to(self.device), mask_BT.to(self.device)
        positions_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=self._model.config)
        while rows:
            logits_BV = self._model(
                input_ids=ids_BT, attention_mask=mask_BT, position_ids=positions_BT, past_key_values=cache,
                use_cache=True, logits_to_keep=1,
            ).logits[:, -1]  # fmt: skip
            next_ids = self._sample(logits_BV, rows)
            kept = [place for place, row in enumerate(rows) if not self._ends(row)]
            for row in rows:
                if self._ends(row):
                    self._finish(row)
            if len(kept) < len(rows):
                rows = [rows[place] for place in kept]
                kept_B = torch.tensor(kept, device=self.device, dtype=torch.long)
                if rows:
                    cache.batch_select_indices(kept_B)
                next_ids, mask_BT, positions_BT = next_ids[kept_B], mask_BT[kept_B], positions_BT[kept_B]
            ids_BT = next_ids[:, None]
            mask_BT = torch.cat([mask_BT, torch.ones_like(ids_BT)], dim=1)
            positions_BT = positions_BT[:, -1:] + 1

    def _sample(self, logits_BV: Tensor, rows: list[_Row]) -> Tensor:
        """Draw one token a row by inverting its cumulative distribution at the row's own uniform number."""
        temperature_B = torch.tensor([row.spec.temperature for row in rows], device=self.device)
        top_p_B = torch.tensor([row.spec.top_p for row in rows], device=self.device)
        logprobs_BV = processed_logprobs(logits_BV, temperature_B, top_p_B)
        uniform_B = torch.tensor([row.uniform() for row in rows], device=self.device, dtype=torch.float64)
        cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
        # right=True: a token of no mass is never hit, not even by a uniform number of exactly 0.
        drawn_B = torch.searchsorted(cumulative_BV, (uniform_B * cumulative_BV[:, -1])[:, None], right=True)[:, 0]
        last_B = cumulative_BV.argmax(-1)  # first place of the full mass: the last token that has any
        ids_B = torch.where(temperature_B == 0, logits_BV.argmax(-1), torch.minimum(drawn_B, last_B))
        chosen_B = logprobs_BV.gather(-1, ids_B[:, None])[:, 0].tolist()
        for row, token, logprob in zip(rows, ids_B.tolist(), chosen_B, strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logprob)
        return ids_B

    def _limit(self, row: _Row) -> int:
        return min(row.spec.max_new_tokens, self._max_len - len(row.prompt_ids))

    def _ends(self, row: _Row) -> bool:
        return row.token_ids[-1] in self._eos or len(row.token_ids) >= self._limit(row)

    def _finish(self, row: _Row) -> None:
        reason: Literal["stop", "length"] = "stop" if row.token_ids[-1] in self._eos else "length"
        ids = tuple(row.token_ids)
        done = Completion(ids, tuple(row.logprobs), self._decode(ids), reason, row.version, len(row.prompt_ids))
        self._gate.leave()
        row.future.set_result(done)

    def _fail(self, row: _Row, error: str) -> None:
        self._gate.leave()
        row.future.set_result(Completion.failed(error, row.version, len(row.prompt_ids)))


def _copy_weights(model_dir: Path, model: Any) -> None:
    """Overwrite the model's parameters with those of a folder of the same architecture, cast to the model's format."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())  # tied ones appear once
    copied: set[str] = set()
    with torch.no_grad():
        for file in sorted(model_dir.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    if name in parameters:
                        parameters[name].copy_(opened.get_tensor(name))
                        copied.add(name)
    missing = sorted(set(parameters) - copied)
    if missing:
        raise GeneratorError(
            f"{model_dir} has no weight {missing[0]}; give a whole model folder of the same architecture"
        )
