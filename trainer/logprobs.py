"""Log-probabilities of the sampled tokens under the model being trained.

This is the only place with the next-token shift: the hidden state at position t − 1 predicts the token at position t.
The decoder runs once over the shared prefix of a micro-batch, with gradient, and its keys and values are expanded to
the rows; only completion positions reach the output layer, in chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from writer_rl.trainer.batching import MicroBatch

CHUNK_TOKENS = 256
"""Completion positions whose logits exist at the same time; 256 × 151,936 float32 logits are 156 MB."""


def causal_lm(model: nn.Module) -> nn.Module:
    """The causal language model inside DDP, DeepSpeed or PEFT wrappers; its layers keep their adapters."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # type: ignore[assignment]
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()  # type: ignore[operator]
    if not (hasattr(model, "model") and hasattr(model, "lm_head")):
        raise ValueError(f"{type(model).__name__} has no model and lm_head; use a decoder-only causal language model")
    return model


def _can_share_prefix(causal: nn.Module) -> bool:
    # Layers drop the key-value cache under gradient checkpointing, and a sliding window would need offset masks.
    checkpointing = causal.training and bool(getattr(causal, "is_gradient_checkpointing", False))
    layer_types = getattr(causal.config, "layer_types", None) or ()
    return not checkpointing and all(kind == "full_attention" for kind in layer_types)


def _hidden_states(causal: Any, batch: MicroBatch) -> Tensor:
    """Final hidden states that predict columns 1 … T−1 of `batch.ids_BT`: (B, T−1, H).

    No padding mask is needed: padding stands on the right, so causal attention keeps it from every real token.
    """
    num_prefix, inputs_BT = batch.prefix_ids_P.numel(), batch.ids_BT[:, :-1]
    positions_T = torch.arange(num_prefix, num_prefix + inputs_BT.shape[1], device=inputs_BT.device)
    cache = None
    if num_prefix:
        cache = DynamicCache()
        causal.model(input_ids=batch.prefix_ids_P[None], past_key_values=cache, use_cache=True)
        for layer in cache.layers:  # views: autograd sums the rows' gradients back into the one prefix
            layer.keys = layer.keys.expand(batch.num_rows, -1, -1, -1)
            layer.values = layer.values.expand(batch.num_rows, -1, -1, -1)
    output = causal.model(
        input_ids=inputs_BT, position_ids=positions_T[None], past_key_values=cache, use_cache=cache is not None
    )
    hidden: Tensor = output.last_hidden_state
    return hidden


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, dim=-1)


class _FrozenHead(torch.autograd.Function):
    """log softmax(W h / temperature)[target] for a frozen W, without keeping logits for the backward pass.

    The value is one number per token, so its gradient with respect to h is that number's upstream gradient times
    (W[target] − Σ_v p_v W[v]) / temperature. The vector is formed during the forward pass while the chunk's
    probabilities exist; the backward pass is then a row scaling and reads no weights.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperature: float, chunk: int, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        keep_grad = ctx.needs_input_grad[0]
        wide = torch.promote_types(hidden_NH.dtype, torch.float32)
        logprobs_N = torch.empty(len(targets_N), dtype=wide, device=hidden_NH.device)
        entropy_N = torch.zeros_like(logprobs_N)
        grad_NH = torch.empty_like(hidden_NH) if keep_grad else None
        for start in range(0, len(targets_N), chunk):
            part = slice(start, start + chunk)
            logprobs_CV = _log_softmax(nn.functional.linear(hidden_NH[part], weight_VH), temperature)
            logprobs_N[part] = logprobs_CV.gather(-1, targets_N[part, None]).squeeze(-1)
            if grad_NH is None and not entropy:
                continue
            probs_CV = logprobs_CV.exp()
            if entropy:
                entropy_N[part] = -(probs_CV * logprobs_CV).sum(-1)
            if grad_NH is not None:
                expected_CH = probs_CV.to(weight_VH.dtype) @ weight_VH
                grad_NH[part] = ((weight_VH[targets_N[part]] - expected_CH) / temperature).to(grad_NH.dtype)
        ctx.save_for_backward(grad_NH)
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (grad_NH,) = ctx.saved_tensors
        return (grads[0][:, None] * grad_NH).to(grad_NH.dtype), None, None, None, None, None


def _whole_weight(weight: Tensor) -> AbstractContextManager[Any]:
    """Gather a weight that ZeRO-3 has partitioned; one collective per call, whatever the number of chunks."""
    if not hasattr(weight, "ds_id"):
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters([weight])
    return context


def _score_tokens(
    causal: Any, hidden_NH: Tensor, targets_N: Tensor, temperature: float, chunk: int, entropy: bool
) -> tuple[Tensor, Tensor]:
    head = causal.lm_head
    if type(head) is nn.Linear and head.bias is None and not head.weight.requires_grad:
        with _whole_weight(head.weight):
            scored: tuple[Tensor, Tensor] = _FrozenHead.apply(
                hidden_NH, head.weight, targets_N, temperature, chunk, entropy
            )
        return scored
    # A trainable or adapted output layer: plain autograd in one call, which keeps its logits.
    logprobs_NV = _log_softmax(head(hidden_NH), temperature)
    detached_NV = logprobs_NV.detach()
    entropy_N = -(detached_NV.exp() * detached_NV).sum(-1) if entropy else logprobs_NV.new_zeros(len(targets_N))
    return logprobs_NV.gather(-1, targets_N[:, None]).squeeze(-1), entropy_N


def _score(
    model: nn.Module, batch: MicroBatch, temperature: float, chunk_tokens: int, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; log-probs need the positive sampling temperature")
    causal = causal_lm(model)
    if getattr(causal.config, "final_logit_softcapping", None) or getattr(causal.config, "logits_scaling", 1.0) != 1.0:
        raise ValueError(f"{type(causal).__name__} rescales its logits, which is not reproduced here; use another base")
    rows = batch if _can_share_prefix(causal) else batch.with_prefix_in_rows()
    targets_mask_BT = rows.completion_mask_BT[:, 1:]  # column 0 is always a prompt token
    hidden_NH = _hidden_states(causal, rows)[targets_mask_BT]
    scores = _score_tokens(
        causal, hidden_NH, rows.ids_BT[:, 1:][targets_mask_BT], temperature, chunk_tokens, with_entropy
    )
    # Row-major order of the true positions is the same in both layouts, so this also undoes with_prefix_in_rows.
    place: Callable[[Tensor], Tensor] = lambda values_N: torch.zeros(  # noqa: E731
        batch.ids_BT.shape, dtype=values_N.dtype, device=values_N.device
    ).masked_scatter(batch.completion_mask_BT, values_N)
    return place(scores[0]), place(scores[1])


def completion_logprobs(
    model: nn.Module, batch: MicroBatch, *, temperature: float = 1.0, chunk_tokens: int = CHUNK_TOKENS
) -> Tensor:
    """Log-probabilities of the sampled tokens.

    Args:
        model: LLaMA- or Qwen2-like causal language model, with or without PEFT, DDP or DeepSpeed wrappers.
        batch: Micro-batch on the model's device.
        temperature: The sampling temperature. The sampler reports log-probs of its processed distribution,
            softmax(logits / temperature), so the learner must use the same one or the ratio is not 1 on policy.
            Top-p is not reproduced: the mean ratio learner / sampler is then the probability mass that top-p kept.
        chunk_tokens: Completion positions whose logits exist at the same time.

    Returns:
        (B, T) float32 nats (float64 for a float64 model), aligned with `batch.ids_BT`: entry [b, t] is
        log π(ids[b, t] | everything before it). Exactly 0 outside the completion mask.

    Source: specification section 5; keys and values of the shared prefix carry gradient, so the result and its
    gradient equal a plain forward pass over the whole rows.
    """
    return _score(model, batch, temperature, chunk_tokens, False)[0]


def completion_logprobs_and_entropy(
    model: nn.Module, batch: MicroBatch, *, temperature: float = 1.0, chunk_tokens: int = CHUNK_TOKENS
) -> tuple[Tensor, Tensor]:
    """Log-probabilities as `completion_logprobs`, and the entropy in nats of the distribution at each of them.

    The entropy is a metric: it carries no gradient. Both are (B, T) and 0 outside the completion mask.
    """
    return _score(model, batch, temperature, chunk_tokens, True)


class CompletionScorer(nn.Module):
    """`completion_logprobs` as a module, so that DDP and DeepSpeed see the call in their own `forward`.

    Args:
        policy: The model with its adapter.
        temperature: The sampling temperature.
        chunk_tokens: Completion positions whose logits exist at the same time.
    """

    def __init__(self, policy: nn.Module, temperature: float = 1.0, chunk_tokens: int = CHUNK_TOKENS) -> None:
        super().__init__()
        self.policy, self.temperature, self.chunk_tokens = policy, temperature, chunk_tokens

    def forward(self, batch: MicroBatch) -> Tensor:
        """(B, T) log-probabilities of the batch; see `completion_logprobs`."""
        return completion_logprobs(self.policy, batch, temperature=self.temperature, chunk_tokens=self.chunk_tokens)
