"""Samples to micro-batches: rows that share the start of their prompts are packed so that the start is computed once.

Rows of a micro-batch hold `[own rest of the prompt | completion | padding]`, padded on the right; the tokens all rows
have in common at the front are stored once in `prefix_ids_P`. Masks come from lengths, never from the pad id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One trainable completion: the ids that were sampled, with their advantage.

    Args:
        prompt_ids: Prompt token ids, at least one.
        completion_ids: Sampled token ids, EOS included when it was sampled, at least one.
        sampling_logprobs: The engine's log-probability of each completion token, nats.
        advantage: Advantage of this step, shared by all tokens of the completion.
        dialogue_id: Dialogue the sample comes from.
        trajectory_index: Trajectory within the group, 0-based.
        segment_index: Segment of the dialogue, 0-based.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    sampling_logprobs: tuple[float, ...]
    advantage: float
    dialogue_id: str = ""
    trajectory_index: int = 0
    segment_index: int = 0

    def __post_init__(self) -> None:
        where = f"sample {self.dialogue_id!r} trajectory {self.trajectory_index} segment {self.segment_index}"
        if not self.prompt_ids or not self.completion_ids:
            raise ValueError(f"{where} has an empty prompt or completion; drop it before batching")
        if len(self.sampling_logprobs) != len(self.completion_ids):
            raise ValueError(
                f"{where} has {len(self.completion_ids)} completion ids but {len(self.sampling_logprobs)} sampling "
                "log-probs; give one per sampled id"
            )


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tensors of one forward pass.

    Args:
        prefix_ids_P: (P,) int64, tokens that start every row; P may be 0.
        ids_BT: (B, T) int64, what follows the prefix in each row, padded on the right. Column 0 is a prompt token.
        attention_mask_BT: (B, T) bool, True at real tokens.
        completion_mask_BT: (B, T) bool, True at sampled and trained tokens; it aligns with `ids_BT`, so the
            log-probability of `ids_BT[b, t]` belongs at `[b, t]`.
        advantages_B: (B,) float32.
        sampling_logprobs_BT: (B, T) float32 nats, 0 outside the completion mask.
        sample_indices: (B,) place of each row in the sample list that was packed.
    """

    prefix_ids_P: Tensor
    ids_BT: Tensor
    attention_mask_BT: Tensor
    completion_mask_BT: Tensor
    advantages_B: Tensor
    sampling_logprobs_BT: Tensor
    sample_indices: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """B."""
        return self.ids_BT.shape[0]

    @property
    def num_padded_tokens(self) -> int:
        """Token positions a forward pass computes: P + B·T."""
        return self.prefix_ids_P.numel() + self.ids_BT.numel()

    @property
    def num_real_tokens(self) -> int:
        """Token positions that are not padding, the shared prefix counted once."""
        return self.prefix_ids_P.numel() + int(self.attention_mask_BT.sum())

    @property
    def num_completion_tokens(self) -> int:
        """Trained tokens."""
        return int(self.completion_mask_BT.sum())

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch on another device."""
        return MicroBatch(
            prefix_ids_P=self.prefix_ids_P.to(device),
            ids_BT=self.ids_BT.to(device),
            attention_mask_BT=self.attention_mask_BT.to(device),
            completion_mask_BT=self.completion_mask_BT.to(device),
            advantages_B=self.advantages_B.to(device),
            sampling_logprobs_BT=self.sampling_logprobs_BT.to(device),
            sample_indices=self.sample_indices,
        )

    def with_prefix_in_rows(self) -> MicroBatch:
        """The same rows with the prefix copied in front of each, for forward passes that keep no key-value cache."""
        num_prefix = self.prefix_ids_P.numel()
        if num_prefix == 0:
            return self

        def left(tensor_BT: Tensor, value: float | bool) -> Tensor:
            return torch.nn.functional.pad(tensor_BT, (num_prefix, 0), value=value)

        return replace(
            self,
            prefix_ids_P=self.prefix_ids_P[:0],
            ids_BT=torch.cat([self.prefix_ids_P.expand(self.num_rows, -1), self.ids_BT], dim=1),
            attention_mask_BT=left(self.attention_mask_BT, True),
            completion_mask_BT=left(self.completion_mask_BT, False),
            sampling_logprobs_BT=left(self.sampling_logprobs_BT, 0.0),
        )


def common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of equal tokens at the front of two sequences.

    Example:
        >>> common_prefix_length([5, 6, 7], [5, 6, 8, 9])
        2
    """
    limit = min(len(first), len(second))
    for index in range(limit):
        if first[index] != second[index]:
            return index
    return limit


def make_microbatch(
    samples: Sequence[TrainSample], indices: Sequence[int], pad_id: int, *, share_prefix: bool = True
) -> MicroBatch:
    """Build one micro-batch from the samples at `indices`, in that order.

    Args:
        samples: All samples.
        indices: Rows of the micro-batch, at least one.
        pad_id: Filler id; its value has no influence on any mask.
        share_prefix: Store the longest common prompt prefix once. At least one prompt token stays in every row,
            because the first completion token is predicted from it.
    """
    rows = [samples[index] for index in indices]
    num_prefix = 0
    if share_prefix:
        num_prefix = min(len(row.prompt_ids) for row in rows) - 1
        for row in rows[1:]:
            num_prefix = min(num_prefix, common_prefix_length(rows[0].prompt_ids, row.prompt_ids))
    lengths = [len(row.prompt_ids) - num_prefix + len(row.completion_ids) for row in rows]
    shape = (len(rows), max(lengths))
    ids_BT = torch.full(shape, pad_id, dtype=torch.int64)
    attention_mask_BT = torch.zeros(shape, dtype=torch.bool)
    completion_mask_BT = torch.zeros(shape, dtype=torch.bool)
    sampling_logprobs_BT = torch.zeros(shape, dtype=torch.float32)
    for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        start = len(row.prompt_ids) - num_prefix
        ids_BT[b, :length] = torch.tensor(row.prompt_ids[num_prefix:] + row.completion_ids)
        attention_mask_BT[b, :length] = True
        completion_mask_BT[b, start:length] = True
        sampling_logprobs_BT[b, start:length] = torch.tensor(row.sampling_logprobs)
    return MicroBatch(
        prefix_ids_P=torch.tensor(rows[0].prompt_ids[:num_prefix], dtype=torch.int64),
        ids_BT=ids_BT,
        attention_mask_BT=attention_mask_BT,
        completion_mask_BT=completion_mask_BT,
        advantages_B=torch.tensor([row.advantage for row in rows], dtype=torch.float32),
        sampling_logprobs_BT=sampling_logprobs_BT,
        sample_indices=tuple(indices),
    )


def pack_microbatches(
    samples: Sequence[TrainSample],
    max_tokens: int,
    pad_id: int,
    *,
    share_prefix: bool = True,
    overhead_tokens: int = 64,
) -> list[MicroBatch]:
    """Split samples into micro-batches of at most `max_tokens` computed positions, with as few positions as possible.

    Samples are sorted so that prompts with a long common start are neighbours (and, among equal prompts, completions
    of similar length); the cheapest cut of that order into consecutive micro-batches is then found exactly by dynamic
    programming. The result depends only on the samples, never on a random draw.

    Args:
        samples: Samples in any order.
        max_tokens: Limit on P + B·T of a micro-batch. A single row that is longer gets a micro-batch of its own:
            it is never truncated.
        pad_id: Filler id.
        share_prefix: Compute the common prompt prefix of a micro-batch once.
        overhead_tokens: Fixed cost of one more micro-batch in token positions; larger means fewer, fuller ones.

    Returns:
        Micro-batches that hold every sample exactly once; none for no samples.

    Example:
        Eight completions of 60 tokens on one prompt of 200: P = 199, rows of 1 + 60 tokens, so 199 + 8·61 = 687
        computed positions instead of 8·260 = 2,080.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; give a positive number of token positions")

    def total(index: int) -> int:
        return len(samples[index].prompt_ids) + len(samples[index].completion_ids)

    if share_prefix:
        order = sorted(range(len(samples)), key=lambda i: (samples[i].prompt_ids, total(i), i))
    else:
        order = sorted(range(len(samples)), key=lambda i: (total(i), i))
    num = len(order)
    prompts = [samples[index].prompt_ids for index in order]
    # In sorted order the common prefix of a run is the shortest common prefix of its neighbours.
    neighbour_prefix = [common_prefix_length(prompts[k], prompts[k + 1]) if share_prefix else 0 for k in range(num - 1)]

    best_cost: list[float] = [0.0] + [float("inf")] * num
    best_start = [0] * (num + 1)
    for end in range(1, num + 1):
        prefix, longest = len(prompts[end - 1]) - 1 if share_prefix else 0, 0
        for start in range(end - 1, -1, -1):
            if share_prefix:
                prefix = min(prefix, len(prompts[start]) - 1)
                if start < end - 1:
                    prefix = min(prefix, neighbour_prefix[start])
            longest = max(longest, total(order[start]))
            cost = prefix + (end - start) * (longest - prefix)
            if cost > max_tokens and start < end - 1:
                # A longer run has more rows, a longer longest row and a shorter prefix: it cannot fit either.
                break
            if best_cost[start] + cost + overhead_tokens < best_cost[end]:
                best_cost[end], best_start[end] = best_cost[start] + cost + overhead_tokens, start
    cuts: list[tuple[int, int]] = []
    end = num
    while end > 0:
        cuts.append((best_start[end], end))
        end = best_start[end]
    return [make_microbatch(samples, order[a:b], pad_id, share_prefix=share_prefix) for a, b in reversed(cuts)]
