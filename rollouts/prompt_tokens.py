"""From chat-format prompts to token ids, with untrusted text kept from ever becoming a control token.

The chat template is rendered around placeholders. Its own parts are encoded with the tokenizer's special tokens; the contents
are encoded by a copy of the tokenizer that knows no special or added token at all, so that `<|im_end|>` inside a message
is a handful of ordinary tokens (faults 21 and 23).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from writer_rl.data.contract import ChatMessage

_SLOT = "\x00slot{}\x00"
_SLOT_PATTERN = re.compile("\x00slot(\\d+)\x00")


class PromptEncoder:
    """Encodes prompts and completion targets with one tokenizer.

    Args:
        tokenizer: A fast tokenizer of transformers with a chat template.

    Raises:
        ValueError: The tokenizer is not a fast one or has no chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import Tokenizer

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("the tokenizer has no fast backend; use a model that ships tokenizer.json")
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; use an instruct model")
        self.tokenizer = tokenizer
        state = json.loads(backend.to_str())
        state["added_tokens"], state["post_processor"], state["truncation"], state["padding"] = [], None, None, None
        self._plain = Tokenizer.from_str(json.dumps(state))
        self._cached_system: dict[str, list[int]] = {}

    def plain_ids(self, text: str) -> list[int]:
        """Token ids of text in which nothing is a control token."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def prompt_ids(self, prompt: Sequence[ChatMessage]) -> list[int]:
        """Token ids of a prompt, ending where the assistant's text begins.

        The template writes the beginning-of-sequence token if it wants one; none is added (fault 21).
        """
        slots = [{"role": message["role"], "content": _SLOT.format(i)} for i, message in enumerate(prompt)]
        text = self.tokenizer.apply_chat_template(slots, tokenize=False, add_generation_prompt=True)
        ids: list[int] = []
        for position, part in enumerate(_SLOT_PATTERN.split(text)):
            if position % 2 == 0:
                ids += self.tokenizer.encode(part, add_special_tokens=False) if part else []
                continue
            content, role = prompt[int(part)]["content"], prompt[int(part)]["role"]
            if role != "system":
                ids += self.plain_ids(content)
                continue
            if content not in self._cached_system:
                self._cached_system[content] = self.plain_ids(content)
            ids += self._cached_system[content]
        return ids

    def completion_ids(self, target: str) -> list[int]:
        """Token ids of a target text with exactly one end-of-sequence token (fault 20)."""
        return [*self.plain_ids(target), self.tokenizer.eos_token_id]

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of sampled ids without control tokens, for parsing and display only."""
        decoded: str = self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return decoded
