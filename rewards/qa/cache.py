"""Answers and scores by content: the same question on the same evidence is answered once, also across a resume."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """An answer with its score. Failed answers and judgements are never stored.

    Args:
        message_ids: Messages selected from System 1; () where the key already fixes them.
    """

    text: str
    score: float
    support: tuple[str, ...] = ()
    message_ids: tuple[str, ...] = ()


def content_key(*parts: Any) -> str:
    """Key of JSON-able parts; equal content gives an equal key in every process."""
    text = json.dumps(parts, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class AnswerCache:
    """Bounded map from content keys to answers; the least recently used entry leaves first.

    Args:
        max_entries: 1 or more.
    """

    def __init__(self, max_entries: int = 50000) -> None:
        if max_entries < 1:
            raise ValueError(f"max_entries is {max_entries}; give 1 or more")
        self._max_entries = max_entries
        self._entries: OrderedDict[str, CachedAnswer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> CachedAnswer | None:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: str, entry: CachedAnswer) -> None:
        self._entries[key] = entry
        self._entries.move_to_end(key)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able content, oldest use first."""
        return {key: asdict(entry) for key, entry in self._entries.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the content by that of `state_dict`."""
        self._entries = OrderedDict(
            (key, CachedAnswer(item["text"], item["score"], tuple(item["support"]), tuple(item["message_ids"])))
            for key, item in state.items()
        )
