"""Supervised fine-tuning: teacher traces → adapter → merged model, which is GRPO's base and its reference policy.

`trl.SFTTrainer` does the training; two things are ours. Rows are tokenised by the contract's one code path, and the loss runs
through `completion_logprobs`, which computes the prompt start that all rows share once and the output layer at completion
positions only. The loss is the same number as TRL's own (a test compares the two).
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset as HfDataset
from peft import PeftModel
from transformers import PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from writer_rl.configs.load import dump_resolved
from writer_rl.configs.schema import RunConfig
from writer_rl.data.actions import parse_completion, validate
from writer_rl.data.embedding import Embedder, make_embedder
from writer_rl.data.files import write_json
from writer_rl.rollouts.generator import SamplingSpec
from writer_rl.rollouts.prompt_tokens import PromptEncoder
from writer_rl.rollouts.transformers_engine import TransformersGenerator
from writer_rl.trainer.base_model import eos_token_ids, load_tokenizer, new_directory, prepare_base_model
from writer_rl.trainer.batching import TrainSample, make_microbatch
from writer_rl.trainer.cli import config_parser, parse_config, run_dir
from writer_rl.trainer.data_sets import Example, SftRow, load_examples, sft_rows
from writer_rl.trainer.logprobs import completion_logprobs
from writer_rl.trainer.metrics import MetricLog
from writer_rl.trainer.policy import adapter_state, load_policy, merge_adapter
from writer_rl.trainer.progress import Bar, progress, say, stage

IGNORED = -100


class WriterSftTrainer(SFTTrainer):
    """TRL's trainer with the completion-only loss computed by `completion_logprobs`."""

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Σ −log π over completion tokens, EOS included, divided by their number in the whole accumulated batch."""
        labels_BT = inputs["labels"]
        samples = []
        for ids_T, labels_T in zip(inputs["input_ids"], labels_BT, strict=True):
            trained = torch.nonzero(labels_T != IGNORED).flatten()
            first, last = int(trained[0]), int(trained[-1]) + 1
            prompt, completion = tuple(ids_T[:first].tolist()), tuple(ids_T[first:last].tolist())
            samples.append(TrainSample(prompt, completion, (0.0,) * len(completion), 0.0))
        batch = make_microbatch(samples, range(len(samples)), pad_id=0).to(labels_BT.device)
        logprobs_BT = completion_logprobs(model, batch)
        num_tokens = batch.completion_mask_BT.sum() if num_items_in_batch is None else num_items_in_batch
        loss = -logprobs_BT.sum() / num_tokens
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            # The count is that of all ranks, and DDP averages gradients over ranks.
            loss = loss * self.accelerator.num_processes
        return (loss, {"loss": loss}) if return_outputs else loss

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[torch.Tensor, None, None]:
        """Validation loss alone: no logits are kept."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, inputs).detach(), None, None


def to_hf_dataset(rows: Sequence[SftRow]) -> HfDataset:
    """Rows as TRL takes them: ids, and labels that are ignored on the prompt and trained on the completion."""
    return HfDataset.from_list(
        [
            {
                "input_ids": [*row.prompt_ids, *row.completion_ids],
                "labels": [IGNORED] * len(row.prompt_ids) + list(row.completion_ids),
            }
            for row in rows
        ]
    )


def sft_arguments(config: RunConfig, output: Path, num_rows: int) -> SFTConfig:
    """The arguments given to TRL.

    Args:
        config: The run.
        output: Scratch folder of the trainer.
        num_rows: Training rows, for the logging interval.
    """
    sft = config.sft
    steps = max(1, math.ceil(num_rows / (sft.batch_size * sft.accumulation)))
    on_gpu = torch.cuda.is_available()
    return SFTConfig(
        output_dir=str(output),
        num_train_epochs=sft.epochs,
        per_device_train_batch_size=sft.batch_size,
        per_device_eval_batch_size=sft.batch_size,
        gradient_accumulation_steps=sft.accumulation,
        learning_rate=sft.learning_rate,
        lr_scheduler_type=sft.scheduler,
        warmup_steps=sft.warmup_frac,
        weight_decay=sft.weight_decay,
        max_grad_norm=sft.max_grad_norm,
        max_length=None,  # rows are checked one by one beforehand; nothing may be truncated
        packing=False,
        gradient_checkpointing=sft.gradient_checkpointing,
        bf16=config.model.autocast,
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        seed=config.seed,
        data_seed=config.seed,
        logging_steps=max(1, steps // 40),
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_nan_inf_filter=False,
    )


class _Reporter(TrainerCallback):
    """Progress, metrics, and greedy validity after each epoch."""

    def __init__(self, log: MetricLog, bar: Bar, measure: Any) -> None:
        self._log, self._bar, self._measure = log, bar, measure
        self.last: dict[str, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._bar.advance(note=f"loss {self.last['loss']:.3f}" if "loss" in self.last else "")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        logs = logs or {}
        if logs.get("grad_norm") is not None and not math.isfinite(float(logs["grad_norm"])):
            raise FloatingPointError(
                f"gradient norm is {logs['grad_norm']} at step {state.global_step}; lower sft.learning_rate"
            )
        names: tuple[str, ...] = ("loss", "eval_loss", "learning_rate", "grad_norm", "epoch")
        kept = {name: float(logs[name]) for name in names if name in logs}
        self.last.update(kept)
        if "loss" in kept or "eval_loss" in kept:
            self._log.log(state.global_step, kept)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        measured = self._measure()
        self.last.update(measured)
        self._log.log(state.global_step, {**measured, "epoch": float(state.epoch or 0)})


def greedy_validity(policy: PeftModel, rows: Sequence[SftRow], examples: Sequence[Example], config: RunConfig,
                    encoder: PromptEncoder, eos_ids: Sequence[int]) -> dict[str, float]:  # fmt: skip
    """Share of greedy completions that are valid on the teacher's memory, and that equal the teacher's word for word."""
    if not rows:
        return {}
    states = {(e.dialogue.dialogue_id, s.segment.index): s for e in examples for s in e.demonstrations}
    longest = max(len(row.completion_ids) for row in rows)
    spec = SamplingSpec(0.0, 1.0, min(config.sampler.max_new_tokens, 2 * longest))
    num_valid = num_exact = 0
    policy.eval()
    with TransformersGenerator.around(policy, encoder.tokenizer, eos_token_ids=tuple(eos_ids)) as generator:
        futures = [generator.submit(list(row.prompt_ids), spec, 0) for row in rows]
        for row, future in zip(rows, futures, strict=True):
            completion = future.result()
            step = states[row.dialogue_id, row.segment_index]
            seen = step.before.observe(step.segment)
            num_valid += validate(parse_completion(completion.text), seen, config.contract.rules).valid
            num_exact += tuple(completion.token_ids) == row.completion_ids
    policy.train()
    return {"eval_valid_frac": num_valid / len(rows), "eval_exact_frac": num_exact / len(rows)}


def run_sft(config: RunConfig, directory: Path, examples: Sequence[Example] | None = None) -> Path:
    """Train, merge, and leave `sft/adapter`, `sft/merged`, `sft/metrics.jsonl`, `sft/summary.json` in the run folder.

    Args:
        config: The run.
        directory: Run folder.
        examples: Training dialogues with references; loaded from the configuration if None.

    Returns:
        The merged model's folder.

    Raises:
        InputError: Data or model cannot be used.
        FloatingPointError: The loss is no longer finite; nothing is saved.
    """
    started = time.monotonic()
    embedder: Embedder = make_embedder(config.contract.embedder)
    base_dir = prepare_base_model(config.model.path)
    encoder = PromptEncoder(load_tokenizer(base_dir))
    examples = list(examples) if examples is not None else load_examples(config, "train")
    if config.sft.max_dialogues:
        examples = examples[: config.sft.max_dialogues]
    held = min(config.sft.heldout_dialogues, len(examples) - 1)
    training, validation = examples[: len(examples) - held], examples[len(examples) - held :]
    rows, valid_rows = (sft_rows(part, config, encoder, embedder) for part in (training, validation))
    output = directory / "sft"
    output.mkdir(parents=True, exist_ok=True)
    policy = load_policy(
        base_dir, config.model, gradient_checkpointing=config.sft.gradient_checkpointing, seed=config.seed
    )
    arguments = sft_arguments(config, output / ".trainer", len(rows))
    num_steps = math.ceil(
        math.ceil(len(rows) / (arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps))
        * config.sft.epochs
    )
    say(f"{len(rows)} training samples, {len(valid_rows)} for validation, {num_steps} optimiser steps")
    with (
        MetricLog(output, config.logging, run_name=f"{config.name}-sft", config=config.model_dump()) as log,
        progress("SFT steps", num_steps) as bar,
    ):
        eos_ids = eos_token_ids(base_dir)
        reporter = _Reporter(
            log, bar, lambda: greedy_validity(policy, valid_rows, validation, config, encoder, eos_ids)
        )
        trainer = WriterSftTrainer(
            model=policy, args=arguments, train_dataset=to_hf_dataset(rows),
            eval_dataset=to_hf_dataset(valid_rows or rows[:1]), processing_class=encoder.tokenizer, callbacks=[reporter],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    if not math.isfinite(reporter.last.get("loss", 0.0)):
        raise FloatingPointError(f"SFT loss is {reporter.last['loss']}; lower sft.learning_rate")
    with stage("merge the SFT adapter into the base"):
        with new_directory(output / "adapter") as staged:
            policy.save_pretrained(staged)
        merged = merge_adapter(base_dir, adapter_state(policy), output / "merged", alpha=config.model.lora.alpha)
    summary: dict[str, float] = {
        "num_samples": len(rows), "num_steps": num_steps, "time_s": time.monotonic() - started,
        **{key: reporter.last[key] for key in ("loss", "eval_loss", "eval_valid_frac", "eval_exact_frac") if key in reporter.last},
    }  # fmt: skip
    write_json(output / "summary.json", summary)
    say("SFT: " + json.dumps({k: round(v, 4) for k, v in summary.items()}))
    return merged


def main(argv: list[str]) -> int:
    """Entry point of `sft`."""
    parser = config_parser(
        "sft",
        "Fine-tune the Writer on teacher traces; the result is GRPO's base.",
        "example: ./launch.sh sft demo sft.epochs=2",
    )
    config = parse_config(parser.parse_args(argv))
    directory = run_dir(config)
    dump_resolved(config, directory)
    merged = run_sft(config, directory)
    print(f"merged model: {merged}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
