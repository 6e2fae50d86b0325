"""Supervised training: the same loss as TRL's own, the right tokens trained, and no mean of means."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoTokenizer
from trl import SFTTrainer

from writer_rl.configs.errors import InputError
from writer_rl.configs.schema import (
    ContractConfig,
    DataConfig,
    LoggingConfig,
    LoraSettings,
    ModelConfig,
    RunConfig,
    SamplerConfig,
    SftConfig,
    SimulationConfig,
)
from writer_rl.trainer.data_sets import SftRow, load_examples
from writer_rl.trainer.policy import adapter_state, load_policy, read_weights
from writer_rl.trainer.sft import IGNORED, WriterSftTrainer, greedy_validity, run_sft, sft_arguments, to_hf_dataset

EOS = 257


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> Iterator[None]:
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def rows(num: int = 4) -> list[SftRow]:
    """Prompts with a common start and completions of different lengths, each closed by the EOS, which is also the pad."""
    draw = random.Random(2)
    system = [draw.randrange(256) for _ in range(12)]
    return [
        SftRow(
            "d", i, (*system, *(draw.randrange(256) for _ in range(3 + i))),
            (*(draw.randrange(256) for _ in range(1 + 4 * i)), EOS),
        )
        for i in range(num)
    ]  # fmt: skip


def config(base: Path, **sft) -> RunConfig:
    settings = {
        "epochs": 1,
        "batch_size": 4,
        "accumulation": 1,
        "learning_rate": 1e-2,
        "warmup_frac": 0.0,
        "max_length": 4096,
    }
    return RunConfig(
        name="s", model=ModelConfig(path=str(base), lora=LoraSettings(r=4, alpha=8)), sft=SftConfig(**(settings | sft)),
        data=DataConfig(simulation=SimulationConfig(num_train=4, num_heldout=1, sessions=(1, 1))),
        contract=ContractConfig(embedder="hashed"), logging=LoggingConfig(wandb="disabled"),
        sampler=SamplerConfig(engine="transformers", max_new_tokens=8, max_model_len=16384),
    )  # fmt: skip


def trainer(kind: type[SFTTrainer], base: Path, folder: Path, data: list[SftRow], **sft) -> SFTTrainer:
    run = config(base, **sft)
    policy = load_policy(base, run.model, seed=1)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
    return kind(
        model=policy, args=sft_arguments(run, folder, len(data)), train_dataset=to_hf_dataset(data),
        eval_dataset=to_hf_dataset(data), processing_class=AutoTokenizer.from_pretrained(base),
    )  # fmt: skip


def collated(of: SFTTrainer) -> dict[str, torch.Tensor]:
    (batch,) = list(of.get_train_dataloader())
    return dict(batch)


@pytest.mark.parametrize("num_items", [None, 40])
def test_loss_and_gradient_equal_trls_own(tiny_chat_dir, tmp_path, num_items):
    found = []
    for kind in (WriterSftTrainer, SFTTrainer):
        AcceleratorState._reset_state(True)
        made = trainer(kind, tiny_chat_dir, tmp_path, rows())
        made.model.train()
        count = None if num_items is None else torch.tensor(num_items)
        loss = made.compute_loss(made.model, collated(made), num_items_in_batch=count)
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in made.model.parameters() if p.requires_grad])
        found.append((loss.detach(), gradient))
    (ours, our_gradient), (theirs, their_gradient) = found
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)
    assert ours.item() > 1  # a random model on bytes: a loss of 0 would agree with anything
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-3, atol=1e-6)


def test_exactly_the_completion_is_trained(tiny_chat_dir, tmp_path):
    """Faults 20 and 22: from its first token to its one EOS, though the pad token is the EOS as well."""
    made = trainer(WriterSftTrainer, tiny_chat_dir, tmp_path, rows())
    batch = collated(made)
    assert (batch["input_ids"] == EOS).sum() > len(rows())  # padding is there, and it is EOS
    trained = sorted(
        tuple(ids[labels != IGNORED].tolist()) for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    )
    assert trained == sorted(row.completion_ids for row in rows())
    assert all(completion.count(EOS) == 1 for completion in trained)


def test_changing_the_first_or_last_completion_token_changes_the_loss(tiny_chat_dir, tmp_path):
    """A shift by one would leave one of them out. The token's own probability is what is compared."""
    made = trainer(WriterSftTrainer, tiny_chat_dir, tmp_path, rows(1), batch_size=1)
    base = rows(1)[0]
    values = []
    for completion in (base.completion_ids, (base.completion_ids[0] ^ 1, EOS), (base.completion_ids[0], 5)):
        batch = made.data_collator(list(to_hf_dataset([SftRow("d", 0, base.prompt_ids, completion)])))
        with torch.no_grad():
            values.append(made.compute_loss(made.model, batch).item())
    assert len(set(values)) == 3


def test_nothing_is_cut_however_long_a_row_is(tiny_chat_dir, tmp_path):
    """Fault 22: TRL's default of 1,024 tokens must not come in through the back door."""
    long = SftRow("d", 0, tuple([7] * 1500), (1, 2, 3, EOS))
    made = trainer(WriterSftTrainer, tiny_chat_dir, tmp_path, [long], batch_size=1)
    batch = collated(made)
    assert batch["input_ids"].shape == (1, 1504)
    assert batch["labels"][0, -4:].tolist() == [1, 2, 3, EOS]
    assert (batch["labels"][0, :-4] == IGNORED).all()


@pytest.mark.parametrize(("batch_size", "accumulation"), [(1, 4), (2, 2)])
def test_one_step_is_the_same_however_the_batch_is_accumulated(tiny_chat_dir, tmp_path, batch_size, accumulation):
    """Fault 1 for supervised training: rows of 2 to 14 trained tokens; a mean of means would differ."""
    moved = []
    for size, steps in ((4, 1), (batch_size, accumulation)):
        AcceleratorState._reset_state(True)
        made = trainer(
            WriterSftTrainer, tiny_chat_dir, tmp_path, rows(), batch_size=size, accumulation=steps, max_grad_norm=0.0
        )
        gradients: list[torch.Tensor] = []
        step = made.create_optimizer

        def keep(made=made, gradients=gradients, step=step):
            optimiser = step()
            optimiser.register_step_pre_hook(
                lambda *_: gradients.append(
                    torch.cat([p.grad.flatten().clone() for p in made.model.parameters() if p.requires_grad])
                )
            )
            return optimiser

        made.create_optimizer = keep
        made.train()
        assert len(gradients) == 1
        moved.append(gradients[0])
    assert moved[0].abs().max() > 1e-3
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-3, atol=1e-6)


def test_a_whole_run_leaves_adapter_model_and_numbers(tiny_chat_dir, tmp_path):
    run = config(tiny_chat_dir, heldout_dialogues=1, epochs=2, batch_size=2, learning_rate=2e-3)
    merged = run_sft(run, tmp_path)
    assert merged == tmp_path / "sft" / "merged"
    summary = json.loads((tmp_path / "sft" / "summary.json").read_text())
    assert summary["num_samples"] == 3
    assert summary["num_steps"] == 4
    assert {"loss", "eval_loss", "eval_valid_frac", "eval_exact_frac"} <= set(summary)
    lines = [json.loads(line) for line in (tmp_path / "sft" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    assert (tmp_path / "sft" / "adapter" / "adapter_model.safetensors").is_file()
    before, after = read_weights(tiny_chat_dir), read_weights(merged)
    assert {n for n in before if not torch.equal(before[n], after[n])} == {n for n in before if "_proj" in n}


def test_a_run_refuses_rows_that_do_not_fit_before_it_trains(tiny_chat_dir, tmp_path):
    with pytest.raises(InputError, match=r"above sft\.max_length = 128"):
        run_sft(config(tiny_chat_dir, max_length=128), tmp_path)
    assert not (tmp_path / "sft" / "merged").exists()


def test_a_loss_that_is_not_finite_saves_nothing(tiny_chat_dir, tmp_path):
    with pytest.raises(FloatingPointError, match=r"lower sft\.learning_rate"):
        run_sft(config(tiny_chat_dir, learning_rate=1e30, epochs=4, batch_size=1, heldout_dialogues=0), tmp_path)
    assert not (tmp_path / "sft" / "merged").exists()


def test_greedy_validity_counts_valid_and_exact_outputs(tiny_chat_dir):
    """A random model writes no JSON; that is a share of 0 over what was measured, and nothing at all without rows."""
    from writer_rl.rollouts.prompt_tokens import PromptEncoder
    from writer_rl.trainer.data_sets import sft_rows

    run = config(tiny_chat_dir)
    encoder = PromptEncoder(AutoTokenizer.from_pretrained(tiny_chat_dir))
    examples = load_examples(run, "train")
    some = sft_rows(examples, run, encoder, None)[:2]
    policy = load_policy(tiny_chat_dir, run.model)
    assert greedy_validity(policy, some, examples, run, encoder, (EOS,)) == {
        "eval_valid_frac": 0.0,
        "eval_exact_frac": 0.0,
    }
    assert greedy_validity(policy, [], examples, run, encoder, (EOS,)) == {}
    assert policy.training
    assert adapter_state(policy)
