"""The vLLM generator. vLLM's engine core runs in a process of its own; a thread here keeps it supplied.

Nothing of vLLM may touch the learner that shares this process: environment variables it sets at the start are undone, and
thread affinity and thread count of this process stay as they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import logging
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import psutil
import torch

from writer_rl.configs.schema import SamplerConfig
from writer_rl.rollouts.generator import (
    Completion,
    FinishReason,
    GeneratorError,
    PolicyGate,
    PolicyWeights,
    SamplingSpec,
    sync_form,
    text_decoder,
)

if importlib.util.find_spec("vllm") is None:
    # vLLM itself is imported when an engine starts, under the environment it shall have.
    raise ImportError("the package vllm is not installed")

Result = TypeVar("Result")
_LOG_TAIL_LINES = 30
_START_TIMEOUT_S = 1800.0


class VllmGenerator:
    """Continuous batching over one engine; see `Generator` for the promises.

    Args:
        base_dir: Model folder the engine starts from. It holds no policy until `load_policy` is called.
        config: Sampler settings.
        eos_token_ids: Every id that ends a completion.
        lora_r: Largest rank of an adapter; used only where weights travel as adapters.
        seed: Seed of the engine; each request carries its own besides.
        log_path: Where the engine's log goes; a temporary file, removed at the end, if None.

    Raises:
        GeneratorError: The engine does not start; the message ends with the tail of its log.
    """

    def __init__(
        self,
        base_dir: Path,
        config: SamplerConfig,
        *,
        eos_token_ids: Sequence[int],
        lora_r: int = 16,
        seed: int = 0,
        log_path: Path | None = None,
    ) -> None:
        began = time.monotonic()
        self._base_dir = base_dir.resolve()
        self._eos = list(eos_token_ids)
        self._decode = text_decoder(base_dir)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.form = sync_form(config.sync, "cuda" if self.device == "cuda" else "cpu")
        self._gate = PolicyGate()
        self._held_dir = self._base_dir
        self._lora: Any = None
        self._num_loads = 0
        self._request_numbers = itertools.count()
        self._closed = False
        self._own_log = log_path is None
        if log_path is None:
            handle, name = tempfile.mkstemp(prefix="writer-rl-vllm-", suffix=".log")
            os.close(handle)
            log_path = Path(name)
        self.log_path = log_path
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-generator", daemon=True)
        self._thread.start()
        try:
            with _engine_environment(config, self.device, log_path):
                self._engine = self._wait(
                    self._start(_engine_args(self._base_dir, config, self, lora_r, seed)), _START_TIMEOUT_S
                )
        except BaseException as error:
            self._stop_loop()
            raise GeneratorError(f"the vLLM engine did not start: {error}{self._log_tail()}") from error
        if self.device == "cpu":
            self._let_worker_go_first()
        self._guard = kill_when_this_process_ends([child.pid for child in self._processes()])
        self.start_s = time.monotonic() - began

    def _let_worker_go_first(self) -> None:
        """Lower the priority of vLLM's scheduler process.

        It polls for the worker's answer without pause; on a machine with few cores that takes up to a whole core from the
        worker's own threads. At the lowest priority it polls only when the worker leaves a core free.
        """
        for process in self._core_processes():
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, process.pid, 19)

    async def _start(self, args: dict[str, Any]) -> Any:
        # Inside the loop: AsyncLLM ties its output handler to the loop it is made in.
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**args))

    def _core_processes(self) -> list[psutil.Process]:
        manager = getattr(getattr(self._engine.engine_core, "resources", None), "engine_manager", None)
        return [psutil.Process(process.pid) for process in getattr(manager, "processes", ())]

    def _processes(self) -> list[psutil.Process]:
        """Every process of the engine: cores and their workers."""
        cores = self._core_processes()
        return [*cores, *(worker for core in cores for worker in core.children(recursive=True))]

    @property
    def policy_version(self) -> int | None:
        """Version of the loaded weights; None before the first `load_policy`."""
        return self._gate.version

    def submit(
        self, prompt_ids: Sequence[int], spec: SamplingSpec, seed: int, *, expected_version: int | None = None
    ) -> Future[Completion]:
        """Queue one request; see `Generator.submit`."""
        version = self._gate.enter(expected_version)
        request = self._complete(list(prompt_ids), spec, seed, version, f"r{next(self._request_numbers)}", self._lora)
        return asyncio.run_coroutine_threadsafe(request, self._loop)

    async def _complete(
        self, prompt_ids: list[int], spec: SamplingSpec, seed: int, version: int, request_id: str, lora: Any
    ) -> Completion:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
        from vllm.v1.engine.exceptions import EngineDeadError

        final: Any = None
        try:
            schema = spec.json_schema
            params = SamplingParams(
                temperature=spec.temperature,
                top_p=1.0 if spec.greedy else spec.top_p,
                max_tokens=spec.max_new_tokens,
                seed=None if spec.greedy else seed,
                stop_token_ids=self._eos,
                logprobs=0,  # the sampled token's own
                flat_logprobs=True,
                detokenize=False,  # decoded once, below
                output_kind=RequestOutputKind.FINAL_ONLY,
                structured_outputs=None if schema is None else StructuredOutputsParams(json=dict(schema)),
            )
            async for output in self._engine.generate(
                {"prompt_token_ids": prompt_ids}, params, request_id, lora_request=lora
            ):
                final = output
        except EngineDeadError:
            self._gate.break_down(f"the vLLM engine has died{self._log_tail()}")
            raise GeneratorError(self._gate.broken) from None
        except Exception as error:  # a refused or failed request is data
            return Completion.failed(f"{type(error).__name__}: {error}", version, len(prompt_ids))
        finally:
            # Before the future resolves: whoever has waited for all requests may load weights at once.
            self._gate.leave()
        return self._completion(final, version, len(prompt_ids))

    def _completion(self, final: Any, version: int, num_prompt_tokens: int) -> Completion:
        output = final.outputs[0] if final is not None and final.outputs else None
        reasons: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}
        if output is None or output.finish_reason not in reasons:
            why = "no output" if output is None else f"engine's finish reason {output.finish_reason!r}"
            return Completion.failed(why, version, num_prompt_tokens)
        ids = tuple(output.token_ids)
        logprobs = tuple(output.logprobs.logprobs)
        if tuple(output.logprobs.token_ids) != ids:
            return Completion.failed(
                "the engine's log-probs are not those of the sampled tokens", version, num_prompt_tokens
            )
        return Completion(ids, logprobs, self._decode(ids), reasons[output.finish_reason], version, num_prompt_tokens)

    def load_policy(self, weights: PolicyWeights) -> float:
        """Replace the weights in place, or put a fresh adapter on the base; see `Generator.load_policy`.

        Raises:
            ValueError: An adapter for an engine that was started without LoRA.
            GeneratorError: The engine has died or refuses the weights.
        """
        if weights.kind == "adapter" and self.form != "adapter":
            raise ValueError("the engine was started for merged weights; set sampler.sync to adapter")
        began = time.monotonic()
        with self._gate.loading(weights.version):
            try:
                self._wait(self._load(weights))
            except Exception as error:
                what = f"policy version {weights.version} from {weights.path}"
                raise GeneratorError(f"the engine did not load {what}: {error}{self._log_tail()}") from error
        return time.monotonic() - began

    async def _load(self, weights: PolicyWeights) -> None:
        folder = weights.path.resolve() if weights.kind == "merged" else self._base_dir
        old_lora, self._lora = self._lora, None
        if old_lora is not None:
            await self._engine.remove_lora(old_lora.lora_int_id)
        if folder != self._held_dir or weights.kind == "merged":
            self._held_dir = Path()  # unknown until the load has succeeded
            await self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            self._held_dir = folder
        if weights.kind == "adapter":
            from vllm.lora.request import LoRARequest

            # Name and number are new at every load: vLLM caches adapters by number and prefixes by name.
            self._num_loads += 1
            lora = LoRARequest(f"policy-{weights.version}-{self._num_loads}", self._num_loads, str(weights.path))
            if not await self._engine.add_lora(lora):
                raise RuntimeError("the adapter was refused")
            self._lora = lora
        # Blocks computed under the old weights must never serve the new ones (fault 15).
        for _ in range(100):
            if await self._engine.reset_prefix_cache():
                return
            await asyncio.sleep(0.05)
        raise RuntimeError("the prefix cache could not be reset")

    def loaded_adapters(self) -> frozenset[int]:
        """Numbers of the adapters the engine holds; at most one at any time (fault 27)."""
        return frozenset(self._wait(self._engine.list_loras())) if self.form == "adapter" else frozenset()

    def close(self) -> None:
        """Stop the engine's processes and the thread."""
        if self._closed:
            return
        self._closed = True
        self._gate.break_down("the generator is closed")

        async def shut_down() -> None:
            self._engine.shutdown()
            self._engine = None  # its destructor must not wait for the interpreter's end

        try:
            self._wait(shut_down(), 60.0)
        finally:
            self._stop_loop()
            self._guard.kill()
            self._guard.wait()
            if self._own_log:
                self.log_path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self, work: Coroutine[Any, Any, Result], timeout_s: float | None = None) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)

    def _log_tail(self) -> str:
        try:
            lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join([f"\nend of {self.log_path}:", *lines[-_LOG_TAIL_LINES:]]) if lines else ""


def _engine_args(
    base_dir: Path, config: SamplerConfig, generator: VllmGenerator, lora_r: int, seed: int
) -> dict[str, Any]:
    """Arguments of vLLM's engine."""
    args: dict[str, Any] = {
        "model": str(base_dir), "dtype": config.dtype, "seed": seed, "load_format": "safetensors",
        "max_model_len": config.max_model_len, "max_num_seqs": config.max_num_seqs,
        "enable_prefix_caching": config.prefix_caching, "enforce_eager": config.enforce_eager,
        "logprobs_mode": "processed_logprobs", "disable_log_stats": True, "trust_remote_code": False,
        "use_tqdm_on_load": False,
    }  # fmt: skip
    if generator.device == "cpu":
        # A prompt that is prefilled in parts makes vLLM rewind the seeded generator of its request, which generators on the
        # CPU cannot do.
        args |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(4096, config.max_model_len)}
    if generator.device == "cuda":
        args["gpu_memory_utilization"] = config.gpu_memory_frac
    if generator.form == "adapter":
        args |= {"enable_lora": True, "max_lora_rank": _lora_rank(lora_r), "max_loras": 1, "max_cpu_loras": 1}
    return args


def kill_when_this_process_ends(pids: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a guard that kills processes once this one has ended, in whatever way.

    A learner that is killed cannot say goodbye, and vLLM's processes then stay, with their memory. The guard waits on a pipe
    that closes with this process.

    Returns:
        The guard; kill it when the processes have ended by themselves.
    """
    return subprocess.Popen(
        ["/bin/sh", "-c", 'read -r _; kill -9 "$@"', "guard", *map(str, pids)],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def _lora_rank(r: int) -> int:
    """The smallest rank vLLM has kernels for that holds `r`."""
    return next((rank for rank in (8, 16, 32, 64, 128, 256, 320, 512) if rank >= r), r)


@contextmanager
def _engine_environment(config: SamplerConfig, device: str, log_path: Path) -> Iterator[None]:
    """Environment of the engine's processes for the length of the block; then this process gets its own back."""
    before, affinity, num_threads = dict(os.environ), os.sched_getaffinity(0), torch.get_num_threads()
    config_path = log_path.with_suffix(".logging.json")
    config_path.write_text(json.dumps(_logging_config(log_path)), encoding="utf-8")
    os.environ |= {
        "VLLM_LOGGING_CONFIG_PATH": str(config_path),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(config.cpu_cache_gib)
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ["OMP_NUM_THREADS"] = str(len(affinity))
        if config.enforce_eager:
            # vLLM compiles the rank of every log-prob even then: a C++ compiler run at the first request, for nothing.
            os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        config_path.unlink(missing_ok=True)
        if os.sched_getaffinity(0) != affinity:
            os.sched_setaffinity(0, affinity)
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        logging.captureWarnings(False)


def _logging_config(log_path: Path) -> dict[str, Any]:
    """vLLM's log goes to a file: quiet while all is well, at hand when something fails."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": "%(asctime)s %(processName)s %(levelname)s %(message)s"}},
        "handlers": {
            "file": {"class": "logging.FileHandler", "filename": str(log_path), "formatter": "plain", "level": "INFO"}
        },
        "loggers": {"vllm": {"handlers": ["file"], "level": "INFO", "propagate": False}},
    }
