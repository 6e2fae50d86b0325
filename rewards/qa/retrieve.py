"""Deterministic retrieval from both tracks: BM25 and sentence vectors within one budget."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from writer_rl.configs.schema import QaConfig
from writer_rl.data.actions import GROUP
from writer_rl.data.embedding import Embedder
from writer_rl.data.memory import MemoryState, Record
from writer_rl.data.records import Message
from writer_rl.rewards.qa.types import Projection, RowEvidence
from writer_rl.rewards.qa.words import content_roots, overlap, rarity, words

_CACHED_VECTORS = 20000
_K1, _B = 1.5, 0.75
_COSINE_DECIMALS = 4  # vectors computed in another batch differ in the last digits; ranks must not


def bm25(query: frozenset[str], documents: Sequence[Sequence[str]]) -> list[float]:
    """BM25 score of each document, k1 = 1.5, b = 0.75, with a positive inverse document frequency.

    Small corpora need the positive form: in a chat of ten messages half of the useful words stand in most of them.

    Args:
        query: Distinct query words.
        documents: Words of each document.
    """
    if not documents:
        return []
    weight = rarity([frozenset(document) for document in documents])
    mean_length = sum(map(len, documents)) / len(documents) or 1.0
    scores = []
    for document in documents:
        counts, damp = Counter(document), _K1 * (1 - _B + _B * len(document) / mean_length)
        found = sorted(query & counts.keys())
        scores.append(sum(weight[word] * counts[word] * (_K1 + 1) / (counts[word] + damp) for word in found))
    return scores


class BudgetRetriever:
    """Retrieval within the budget of `QaConfig`.

    Args:
        config: `recall_n`, `s1_top_k`, `expand`, `s2_k`, `source_k`.
        embedder: Sentence vectors.

    Source: specification §7. The raw fallback for an empty row is left out: the gain compares two arms on one and the
    same System-1 evidence, and a fallback would give the memory arm messages that the other arm does not have.
    """

    def __init__(self, config: QaConfig, embedder: Embedder) -> None:
        self._config, self._embedder = config, embedder
        self._vectors: OrderedDict[str, NDArray[np.float32]] = OrderedDict()

    def messages(self, projection: Projection, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Recall by BM25, select by BM25 and cosine, take neighbours along, cut at `s1_top_k`; oldest first."""
        if not messages or not self._config.s1_top_k:
            return ()
        texts = [f"{message.speaker}: {message.text}" for message in messages]
        names = {word.root for name in projection.named for word in words(name)}
        query = content_roots(projection.issue) | names
        lexical = bm25(query, [[word.root for word in words(text)] for text in texts])
        recalled = sorted(range(len(messages)), key=lambda i: (-lexical[i], -i))[: self._config.recall_n]
        cosine = self._cosine(" ".join((*projection.named, projection.issue)), [texts[i] for i in recalled])
        top = max(lexical) or 1.0
        score = {i: lexical[i] / top + c for i, c in zip(recalled, cosine, strict=True)}
        chosen: dict[int, None] = {}
        for i in sorted(recalled, key=lambda i: (-score[i], -i)):
            chosen[i] = None
            for distance in range(1, self._config.expand + 1):
                for j in (i - distance, i + distance):
                    if 0 <= j < len(messages) and messages[j].session_id == messages[i].session_id:
                        chosen[j] = None
        return tuple(messages[i] for i in sorted(list(chosen)[: self._config.s1_top_k]))

    def rows(self, projection: Projection, memory: MemoryState) -> tuple[RowEvidence, ...]:
        """Per row the `s2_k` most similar matters and `source_k` statements of that member about others."""
        heads = memory.heads()
        issue = content_roots(projection.issue)
        weight = rarity([content_roots(record.content) for record in heads])
        cosine = self._cosine(projection.issue, [record.content for record in heads])
        score = {
            record.entry_id: overlap(issue, content_roots(record.content), weight) + c
            for record, c in zip(heads, cosine, strict=True)
        }
        age = {record.entry_id: position for position, record in enumerate(heads)}

        def best(records: Sequence[Record], count: int) -> list[Record]:
            return sorted(records, key=lambda r: (-score[r.entry_id], -age[r.entry_id]))[:count]

        found = []
        for row in projection.rows:
            own = best([record for record in heads if record.owner == row], self._config.s2_k)
            said = [record for record in heads if record.source == row and record.owner != row]
            found.append(
                RowEvidence(
                    row,
                    tuple(memory.chain(r.entry_id) if projection.mode == "full" else (r,) for r in own),
                    () if row == GROUP else tuple(best(said, self._config.source_k)),
                )
            )
        return tuple(found)

    def _cosine(self, query: str, texts: Sequence[str]) -> list[float]:
        if not texts:
            return []
        missing = [text for text in dict.fromkeys((query, *texts)) if text not in self._vectors]
        if missing:
            self._vectors.update(zip(missing, self._embedder.embed(missing), strict=True))
        cosine_N = np.stack([self._vectors[text] for text in texts]) @ self._vectors[query]
        while len(self._vectors) > _CACHED_VECTORS:
            self._vectors.popitem(last=False)
        return [round(float(value), _COSINE_DECIMALS) for value in cosine_N]
