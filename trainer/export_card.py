"""The model card of an exported Writer: what it is, how it was trained, what was measured, what it cannot do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from writer_rl.configs.schema import RunConfig
from writer_rl.trainer.checkpoint import update_number
from writer_rl.trainer.report import DETAILS, HEADLINE, RunRecord, difference_table, load_run, result_table, verdict


def model_card(
    run_dir: Path, config: RunConfig, label: str, base_name: str, facts: Mapping[str, Any], licence_files: Sequence[str]
) -> str:
    """The text of `README.md`.

    Args:
        run_dir: The run; its evaluation is quoted if there is one.
        config: The run's configuration.
        label: ``sft`` or ``update_000030``.
        base_name: Folder of the model under the adapter.
        facts: Content of `export.json`.
        licence_files: Licence files found beside the base, copied into its folder.
    """
    run = load_run(run_dir)
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            f"base_model: {_quoted(config.model.path)}",
            "tags: [conversation-memory, lora, sft" + ("]" if label == "sft" else ", grpo]"),
            "---",
            "",
            f"# Writer `{config.name}`, {_stage(label)}",
            "",
            "A Writer reads one segment of a group chat together with the memory so far and answers with a JSON list of actions",
            "(ADD, UPDATE, NOOP) that keep a structured memory: who a fact is about, who said it, on which layer it lives, and how it",
            "changed. It expects the prompt of this project's contract and no other.",
            "",
            "## Contents",
            "",
            "| folder | what it is |",
            "|---|---|",
            f"| `model/` | base and adapter merged, {facts['proof']['dtype']}; loads like any causal language model |",
            f"| `adapter/` | LoRA adapter (PEFT), r = {facts['lora_r']}, alpha = {facts['lora_alpha']}; **belongs to `{base_name}/`, not to another base** |",
            f"| `{base_name}/` | {_base_note(base_name)} |",
            "| `export.json` | the numbers of the equality proof |",
            "",
            "## Use",
            "",
            "```python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'model = AutoModelForCausalLM.from_pretrained("model", dtype="auto")',
            'tokenizer = AutoTokenizer.from_pretrained("model")',
            "",
            "# or: the model under the adapter, and the adapter on it",
            "from peft import PeftModel",
            "",
            f'policy = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base_name}"), "adapter")',
            "```",
            "",
            f"Prompt version: `{facts['prompt_version']}` (form `{config.contract.form}`, rules `{config.contract.rules}`, order",
            f"`{config.contract.order}`, segments of at most {config.data.window} messages). Render prompts with `data/contract.py` of that version.",
            "",
            "## Training",
            "",
            *_table([("setting", "value"), *_settings(config, label)]),
            "",
            "## Evaluation",
            "",
            *_evaluation(run, label),
            "",
            "## Equality of the exported forms",
            "",
            *_proof(facts),
            "",
            "## Limits",
            "",
            *_limits(config),
            "",
            "## Licence",
            "",
            f"The weights are derived from `{config.model.path}` and stay under that model's licence"
            + (
                f" (see {', '.join(f'`{base_name}/{name}`' for name in licence_files)})."
                if licence_files
                else "; consult it before use or redistribution."
            ),
            "Data used for training may carry terms of its own.",
            "",
        ]
    )


def _stage(label: str) -> str:
    return (
        "after supervised fine-tuning"
        if label == "sft"
        else f"after reinforcement learning, update {update_number(Path(label))}"
    )


def _base_note(base_name: str) -> str:
    if base_name == "sft_merged":
        return "the SFT policy with its adapter merged: the start of reinforcement learning and its reference policy"
    return "the base model, unchanged"


def _settings(config: RunConfig, label: str) -> list[tuple[str, str]]:
    data = (
        "simulated group chats with known memory"
        if config.data.source == "simulation"
        else "dialogues and teacher traces from files"
    )
    rows = [
        ("base model", config.model.path),
        ("training data", data),
        ("seed", str(config.seed)),
        (
            "SFT",
            f"{config.sft.epochs:g} epochs, rate {config.sft.learning_rate:g}, batch {config.sft.batch_size} × {config.sft.accumulation}",
        ),
    ]
    if label != "sft":
        grpo = config.grpo
        rows += [
            (
                "GRPO",
                f"{update_number(Path(label))} of {grpo.num_updates} updates, {grpo.dialogues_per_update} dialogues × {grpo.group_size} trajectories, "
                f"{grpo.epochs} epochs × {grpo.minibatches} steps, rate {grpo.learning_rate:g}",
            ),
            (
                "loss",
                f"{grpo.loss}, clip −{grpo.clip_low:g} / +{grpo.clip_high:g}, β {grpo.beta:g} ({grpo.kl_estimator})",
            ),
            (
                "sampling",
                f"temperature {config.sampler.temperature:g}, top-p {config.sampler.top_p:g}, {config.sampler.max_new_tokens} new tokens",
            ),
            (
                "reward",
                f"preset {config.reward.preset}, rules {config.reward.rules}, QA gain {'on' if config.reward.qa.enabled else 'off'}",
            ),
        ]
    return rows


def _evaluation(run: RunRecord, label: str) -> list[str]:
    table = result_table(run.evaluation, HEADLINE)
    if table is None:
        return ["Not run: nothing is known about the quality of this model."]
    lines = [
        "Held-out dialogues of the same kind as the training data; mean and 95 % bootstrap interval. "
        + (
            "The row of this model is SFT."
            if label == "sft"
            else "The row of this model is SFT + RL, measured on the checkpoint that was evaluated."
        ),
        "",
    ]
    for columns in (HEADLINE, DETAILS):
        found = result_table(run.evaluation, columns)
        if found:
            header = ("arm", *(name + {1: " ↑", -1: " ↓", 0: ""}[better] for name, better in found["columns"]))
            lines += [
                *_table(
                    [
                        header,
                        *((row["arm"], *(" ".join(cell).strip() for cell in row["cells"])) for row in found["rows"]),
                    ]
                ),
                "",
            ]
    differences = difference_table(run.evaluation)
    if differences:
        body = [(row["pair"], row["metric"], row["text"], str(row["num_dialogues"])) for row in differences]
        lines += [*_table([("paired difference", "metric", "mean [95 % interval]", "dialogues"), *body]), ""]
    return [*lines, verdict(run.evaluation)]


def _proof(facts: Mapping[str, Any]) -> list[str]:
    proof = facts["proof"]
    lines = [
        f"Compared before this folder was written, on {proof['num_prompts']} fixed prompts ({proof['num_tokens']} positions): base + adapter against",
        f"the merge, both in float32, differ by at most {proof['max_logit_difference']:.2g} in any logit (bound {proof['bound']:.2g}; largest logit "
        f"{proof['max_abs_logit']:.3g}; the adapter itself",
        f"moves logits by up to {proof['adapter_effect']:.3g}), and greedy continuations are equal token by token.",
    ]
    if proof["dtype"] != "float32":
        lines.append(
            f"The weights in `model/` are that merge cast to {proof['dtype']}, bit for bit; run in {proof['dtype']}, logits differ by up to "
            f"{proof['cast_logit_difference']:.2g} and the likeliest token agrees at {100 * proof['cast_argmax_frac']:.1f} % of the positions."
        )
    return lines


def _limits(config: RunConfig) -> list[str]:
    lines = [
        "* The output is untrusted text: parse and validate it with the contract's rules, and apply a list whole or not at all.",
        "* Memory quality was measured against reference memories of one kind of chat; other chats, languages and lengths were not.",
        f"* Prompts above {config.contract.max_prompt_tokens} tokens and outputs above {config.sampler.max_new_tokens} tokens were never trained.",
    ]
    if config.data.source == "simulation":
        lines.append(
            "* It was trained on simulated chats with made-up names and matters, which are simpler than what people write."
        )
    return lines


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return (
        ["| " + " | ".join(row) + " |" for row in cells[:1]]
        + ["|" + "---|" * len(cells[0])]
        + ["| " + " | ".join(row) + " |" for row in cells[1:]]
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
