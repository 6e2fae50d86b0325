"""A generator that answers from a table or a function: deterministic, instant, without weights or tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from writer_rl.rollouts.generator import Completion, FinishReason, PolicyGate, PolicyWeights, SamplingSpec

BYTE_EOS = 256
"""EOS of the built-in byte encoding, in which text is its UTF-8 bytes."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An answer that becomes a completion with finish reason "error"."""

    error: str


Answer = str | Sequence[int] | Failure
"""Text (the EOS is added), exact token ids (nothing is added), or a failure."""


def encode_bytes(text: str) -> list[int]:
    """UTF-8 bytes of a text as token ids."""
    return list(text.encode())


def decode_bytes(token_ids: Sequence[int]) -> str:
    """Text of byte ids; ids that are no byte are control tokens and leave no trace."""
    return bytes(i for i in token_ids if 0 <= i < 256).decode(errors="replace")


class ReplayGenerator:
    """Answers requests from `answers`; obeys the same rules on versions, limits and EOS as the real engines.

    Args:
        answers: A function of (prompt ids, seed), or a mapping with such keys. A missing key, or a function that raises
            `LookupError`, gives a completion with finish reason "error".
        encode: Text to ids; bytes if left out.
        decode: Ids to text without control tokens.
        eos_token_ids: Ids that end a completion; the first is added after a text.
        logprob: Log-probability in nats claimed for every token.

    Example:
        >>> generator = ReplayGenerator(lambda prompt_ids, seed: "yes" if seed == 1 else "no")
        >>> _ = generator.load_policy(PolicyWeights(0, "base", Path()))
        >>> generator.submit([5, 6], SamplingSpec(), seed=1).result().text
        'yes'
    """

    def __init__(
        self,
        answers: Callable[[tuple[int, ...], int], Answer] | Mapping[tuple[tuple[int, ...], int], Answer],
        *,
        encode: Callable[[str], Sequence[int]] = encode_bytes,
        decode: Callable[[Sequence[int]], str] = decode_bytes,
        eos_token_ids: Sequence[int] = (BYTE_EOS,),
        logprob: float = -0.5,
    ) -> None:
        self._answers = answers
        self._encode, self._decode = encode, decode
        self._eos, self._logprob = tuple(eos_token_ids), logprob
        self._gate = PolicyGate()
        self.loaded: list[PolicyWeights] = []
        """Every policy loaded so far, in order."""

    @property
    def policy_version(self) -> int | None:
        """Version of the last loaded policy."""
        return self._gate.version

    def submit(
        self, prompt_ids: Sequence[int], spec: SamplingSpec, seed: int, *, expected_version: int | None = None
    ) -> Future[Completion]:
        """A future that is already resolved; see `Generator.submit`."""
        version = self._gate.enter(expected_version)
        self._gate.leave()
        future: Future[Completion] = Future()
        future.set_result(self._complete(tuple(prompt_ids), spec, seed, version))
        return future

    def _complete(self, prompt_ids: tuple[int, ...], spec: SamplingSpec, seed: int, version: int) -> Completion:
        try:
            answer = self._answers(prompt_ids, seed) if callable(self._answers) else self._answers[prompt_ids, seed]
        except LookupError:
            answer = Failure(f"no answer for this prompt of {len(prompt_ids)} tokens and seed {seed}")
        if isinstance(answer, Failure):
            return Completion.failed(answer.error, version, len(prompt_ids))
        ids = (*self._encode(answer), self._eos[0]) if isinstance(answer, str) else tuple(answer)
        end = next((place + 1 for place, token in enumerate(ids) if token in self._eos), None)
        ids = ids[: min(spec.max_new_tokens, len(ids) if end is None else end)]
        stopped = bool(ids) and ids[-1] in self._eos
        logprobs = (self._logprob,) * len(ids)
        reason: FinishReason = "stop" if stopped else "length"
        return Completion(ids, logprobs, self._decode(ids), reason, version, len(prompt_ids))

    def load_policy(self, weights: PolicyWeights) -> float:
        """Take note of the version; nothing is read."""
        with self._gate.loading(weights.version):
            self.loaded.append(weights)
        return 0.0

    def close(self) -> None:
        """Refuse further requests."""
        self._gate.break_down("the generator is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
