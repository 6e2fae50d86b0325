"""Log-probabilities against a plain full forward pass, in float64 on small random models."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from writer_rl.trainer.batching import TrainSample, make_microbatch
from writer_rl.trainer.logprobs import CompletionScorer, completion_logprobs, completion_logprobs_and_entropy

PAD = 0


def _model(kind: str = "llama", attention: str = "sdpa", tied: bool = True, targets: str | list[str] = "all-linear"):
    torch.manual_seed(0)
    classes = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
    config_class, model_class = classes[kind]
    config = config_class(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=tied, initializer_range=0.3,
        attn_implementation=attention,
    )  # fmt: skip
    policy = get_peft_model(model_class(config), LoraConfig(r=3, lora_alpha=6, target_modules=targets)).double()
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return _float64_norms(policy)


def _float64_norms(model: torch.nn.Module) -> torch.nn.Module:
    """Put torch's RMSNorm in: the one of transformers rounds to float32 inside, which hides errors below 1e-6."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(child.weight.numel(), eps=child.variance_epsilon, dtype=torch.float64)
                parent.register_module(name, norm.requires_grad_(False))
    return model


def _samples() -> list[TrainSample]:
    torch.manual_seed(1)
    system, user = torch.randint(1, 97, (9,)).tolist(), torch.randint(1, 97, (4,)).tolist()
    shapes = [([*system, *user], 5), ([*system, *user], 1), ([*system, *user], 8), ([*system, 3], 4)]
    return [
        TrainSample(tuple(p), tuple(torch.randint(0, 97, (n,)).tolist()), (-1.0,) * n, 1.0) for p, n in shapes
    ]  # fmt: skip


def _plain(model, sample: TrainSample, temperature: float) -> torch.Tensor:
    """One row, no padding, no cache: log-probs of the completion ids."""
    ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
    logprobs = (model(input_ids=ids, use_cache=False).logits / temperature).log_softmax(-1)
    return logprobs[0, :-1].gather(-1, ids[0, 1:, None]).squeeze(-1)[-len(sample.completion_ids) :]


def _gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    return dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize(
    ("kind", "attention", "tied"),
    [("llama", "sdpa", True), ("llama", "sdpa", False), ("qwen2", "sdpa", True)],
)
def test_values_and_gradients_equal_a_plain_forward(kind, attention, tied, share_prefix):
    model, samples = _model(kind, attention, tied), _samples()
    batch = make_microbatch(samples, [0, 1, 2, 3], PAD, share_prefix=share_prefix)
    assert batch.prefix_ids_P.numel() == (9 if share_prefix else 0)
    got_BT = completion_logprobs(model, batch, temperature=0.7, chunk_tokens=5)
    assert got_BT.dtype == torch.float64
    assert torch.equal(got_BT[~batch.completion_mask_BT], torch.zeros_like(got_BT[~batch.completion_mask_BT]))
    want = torch.cat([_plain(model, s, 0.7) for s in samples])
    torch.testing.assert_close(got_BT[batch.completion_mask_BT], want, rtol=0, atol=1e-10)

    weights = torch.linspace(-1, 2, len(want), dtype=torch.float64)
    got_grads = _gradients(model, (got_BT[batch.completion_mask_BT] * weights).sum())
    want_grads = _gradients(model, (want * weights).sum())
    for name, gradient in want_grads.items():
        assert gradient.abs().max() > 1e-8, f"{name} has no gradient to compare"
        torch.testing.assert_close(got_grads[name], gradient, rtol=0, atol=1e-10)


def test_the_first_completion_token_is_predicted_from_the_last_prompt_token():
    model, (sample, *_) = _model(), _samples()
    batch = make_microbatch([sample], [0], PAD)
    logits = model(input_ids=torch.tensor([sample.prompt_ids])).logits[0, -1]
    want = logits.log_softmax(-1)[sample.completion_ids[0]]
    assert completion_logprobs(model, batch)[0, 1].item() == pytest.approx(want.item(), abs=1e-10)


def test_entropy_and_chunking_and_wrapper():
    model, samples = _model(), _samples()
    batch = make_microbatch(samples, [0, 1, 2, 3], PAD)
    logprobs_BT, entropy_BT = completion_logprobs_and_entropy(model, batch, temperature=1.3, chunk_tokens=3)
    torch.testing.assert_close(logprobs_BT, CompletionScorer(model, 1.3)(batch), rtol=0, atol=1e-12)
    ids = torch.tensor([samples[0].prompt_ids + samples[0].completion_ids])
    want = torch.distributions.Categorical(logits=model(input_ids=ids).logits[0, :-1] / 1.3).entropy()[-5:]
    torch.testing.assert_close(entropy_BT[0][batch.completion_mask_BT[0]], want.detach(), rtol=0, atol=1e-10)
    assert not entropy_BT.requires_grad
    assert (entropy_BT[~batch.completion_mask_BT] == 0).all()


def test_an_adapted_output_layer_gets_its_gradient():
    model, samples = _model(tied=False, targets=["q_proj", "lm_head"]), _samples()
    batch = make_microbatch(samples, [0, 1, 2, 3], PAD)
    got_BT = completion_logprobs(model, batch)
    want = torch.cat([_plain(model, s, 1.0) for s in samples])
    torch.testing.assert_close(got_BT[batch.completion_mask_BT], want, rtol=0, atol=1e-10)
    got, plain = _gradients(model, got_BT.sum()), _gradients(model, want.sum())
    assert any("lm_head" in name for name in got)
    for name in got:
        torch.testing.assert_close(got[name], plain[name], rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.*use_reentrant.*")
def test_gradient_checkpointing_falls_back_to_whole_rows():
    model, samples = _model(), _samples()
    batch = make_microbatch(samples, [0, 1, 2, 3], PAD)
    want_BT = completion_logprobs(model, batch)
    want = _gradients(model, want_BT.sum())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    got_BT = completion_logprobs(model, batch)
    torch.testing.assert_close(got_BT, want_BT, rtol=0, atol=1e-10)
    for name, gradient in _gradients(model, got_BT.sum()).items():
        torch.testing.assert_close(gradient, want[name], rtol=0, atol=1e-10)


def test_nothing_to_train_still_has_a_backward_pass():
    model = _model()
    batch = make_microbatch(_samples(), [0, 1], PAD)
    batch.completion_mask_BT[:] = False
    logprobs_BT = completion_logprobs(model, batch)
    logprobs_BT.sum().backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(g is not None and (g == 0).all() for g in gradients)


def test_no_graph_is_kept_without_gradient():
    model, batch = _model(), make_microbatch(_samples(), [0, 1, 2], PAD)
    with torch.no_grad():
        assert completion_logprobs(model, batch).grad_fn is None


def test_float32_result_of_a_bfloat16_model():
    model, batch = _model().bfloat16(), make_microbatch(_samples(), [0, 1, 2], PAD)
    logprobs_BT = completion_logprobs(model, batch)
    assert logprobs_BT.dtype == torch.float32
    logprobs_BT.sum().backward()


def test_boundaries():
    batch = make_microbatch(_samples(), [0], PAD)
    with pytest.raises(ValueError, match="temperature"):
        completion_logprobs(_model(), batch, temperature=0.0)
    with pytest.raises(ValueError, match="decoder-only"):
        completion_logprobs(torch.nn.Linear(1, 1), batch)
