"""The loop around the learner: which dialogues when, what a resumed run repeats, and what stops it."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import AutoTokenizer

from writer_rl.configs.errors import InputError
from writer_rl.configs.schema import (
    ContractConfig,
    DataConfig,
    GrpoConfig,
    LoggingConfig,
    LoraSettings,
    ModelConfig,
    RunConfig,
    SamplerConfig,
    SimulationConfig,
)
from writer_rl.data.actions import render_actions
from writer_rl.data.simulation.chats import simulate_split
from writer_rl.rollouts.prompt_tokens import PromptEncoder
from writer_rl.rollouts.replay import Failure, ReplayGenerator
from writer_rl.rollouts.seeds import derive_seed
from writer_rl.trainer.grpo import dialogues_of_update, run_grpo

SIMULATION = SimulationConfig(num_train=5, num_heldout=2, sessions=(2, 2), members=(2, 3))


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> Iterator[None]:
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def config(base: Path, **grpo) -> RunConfig:
    settings = {
        "num_updates": 4, "dialogues_per_update": 2, "group_size": 3, "epochs": 2, "minibatches": 2, "learning_rate": 1e-3,
        "save_every": 2, "micro_batch_tokens": 4096, "sample_rows": 3,
    } | grpo  # fmt: skip
    return RunConfig(
        name="g", seed=3, model=ModelConfig(path=str(base), lora=LoraSettings(r=2, alpha=4)),
        data=DataConfig(simulation=SIMULATION), contract=ContractConfig(embedder="hashed", max_prompt_tokens=3000),
        sampler=SamplerConfig(engine="transformers", sync="merged", dtype="float32", temperature=1.0, top_p=1.0,
                              max_new_tokens=3000, max_model_len=8000, max_mismatch_nats=50),
        grpo=GrpoConfig(**settings), logging=LoggingConfig(wandb="disabled"),
    )  # fmt: skip


@pytest.fixture
def run_folder(tiny_chat_dir, tmp_path: Path):
    def make(name: str) -> Path:
        shutil.copytree(tiny_chat_dir, tmp_path / name / "sft" / "merged")
        return tmp_path / name

    return make


class Writer(ReplayGenerator):
    """Writes a seed-dependent part of the reference: trajectories differ, and a resumed run sees the same answers."""

    def __init__(self, base: Path, failing: bool = False) -> None:
        encoder = PromptEncoder(AutoTokenizer.from_pretrained(base))
        self.seeds: Counter[int] = Counter()
        known = {}
        for split in ("train", "heldout"):
            for chat in simulate_split(SIMULATION, split):
                for t, step in enumerate(chat.trace.steps):
                    for update in range(8):
                        for i in range(3):
                            known[derive_seed(3 * 1_000_003 + update, chat.dialogue.dialogue_id, i, t)] = step.actions
                    known[derive_seed(3, chat.dialogue.dialogue_id, 0, t)] = step.actions

        def answers(prompt_ids, seed):
            self.seeds[seed] += 1
            if failing:
                return Failure("down")
            part = [a for place, a in enumerate(known[seed]) if a.action == "ADD" and (seed >> place) & 1]
            return render_actions(part)

        super().__init__(answers, encode=encoder.plain_ids, decode=encoder.text, eos_token_ids=(257,))


def test_every_pass_is_a_shuffle_without_gaps():
    passes = [i for update in range(10) for i in dialogues_of_update(4, 2, seed=1, update=update)]
    for start in range(0, 20, 4):
        assert sorted(passes[start : start + 4]) == [0, 1, 2, 3]
    assert len({tuple(passes[start : start + 4]) for start in range(0, 20, 4)}) > 1
    uneven = [i for update in range(4) for i in dialogues_of_update(4, 3, seed=1, update=update)]
    assert uneven == passes[:12]  # the same stream, whatever the number per update
    assert dialogues_of_update(4, 2, 1, 7) == dialogues_of_update(4, 2, 1, 7)
    assert len(dialogues_of_update(2, 5, 0, 0)) == 5  # more places than dialogues


def metrics(folder: Path) -> dict[int, dict]:
    lines = [json.loads(line) for line in (folder / "grpo" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines}


def adapter(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "adapter" / "adapter_model.safetensors")


def test_stop_and_resume_equals_one_run(tiny_chat_dir, run_folder):
    """Fault 24: 2 updates, a new process's worth of fresh objects, 2 more: adapter, optimiser, seeds and rewards agree."""
    straight = run_folder("straight")
    whole = Writer(tiny_chat_dir)
    result = run_grpo(config(tiny_chat_dir, dialogues_per_update=1), straight, generator=whole)
    assert result.checkpoint.name == "update_000004"

    broken = run_folder("broken")
    first, second = Writer(tiny_chat_dir), Writer(tiny_chat_dir)
    run_grpo(config(tiny_chat_dir, dialogues_per_update=1, num_updates=2), broken, generator=first)
    again = run_grpo(config(tiny_chat_dir, dialogues_per_update=1), broken, generator=second)
    assert first.seeds + second.seeds == whole.seeds
    assert [w.version for w in second.loaded] == [2, 3, 4]  # fault 14: the first rollout after a resume is synced too
    ours, theirs = adapter(result.checkpoint), adapter(again.checkpoint)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for name in ("optimiser.safetensors",):
        ours, theirs = load_file(result.checkpoint / name), load_file(again.checkpoint / name)
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    one, other = metrics(straight), metrics(broken)
    assert sorted(one) == sorted(other) == [1, 2, 3, 4]
    for step in one:
        same = [k for k in one[step] if not k.startswith(("time", "throughput"))]
        assert {k: one[step][k] for k in same} == {k: other[step][k] for k in same}
    states = [json.loads((r.checkpoint / "state.json").read_text()) for r in (result, again)]
    assert states[0] == states[1]  # the cache of answers included
    assert states[0]["qa_cache"]
    assert any(t.abs().max() > 0 for name, t in adapter(result.checkpoint).items() if "lora_B" in name)


def test_syncs_equal_versions(tiny_chat_dir, run_folder):
    """Fault 14: one load before the first rollout and one after every update, whether its steps were skipped or not."""
    generator = Writer(tiny_chat_dir)
    folder = run_folder("v")
    run_grpo(config(tiny_chat_dir, num_updates=3, kl_guard_nats=1e-9, learning_rate=1e-2), folder, generator=generator)
    assert [w.version for w in generator.loaded] == [0, 1, 2, 3]
    assert sum(m["policy/skipped_steps"] for m in metrics(folder).values()) > 0


def test_another_configuration_does_not_continue_a_run(tiny_chat_dir, run_folder):
    folder = run_folder("c")
    run_grpo(config(tiny_chat_dir, num_updates=1), folder, generator=Writer(tiny_chat_dir))
    with pytest.raises(InputError, match="another configuration"):
        run_grpo(config(tiny_chat_dir, beta=0.5), folder, generator=Writer(tiny_chat_dir))
    fresh = Writer(tiny_chat_dir)
    run_grpo(config(tiny_chat_dir, num_updates=1, beta=0.5), folder, generator=fresh, resume=False)
    assert [w.version for w in fresh.loaded] == [0, 1]
    longer = Writer(tiny_chat_dir)  # how long it runs and how often it saves are no part of what must agree
    run_grpo(config(tiny_chat_dir, num_updates=2, beta=0.5, save_every=1), folder, generator=longer)
    assert [w.version for w in longer.loaded] == [1, 2]


def test_a_finished_run_is_not_repeated(tiny_chat_dir, run_folder):
    folder = run_folder("f")
    first = run_grpo(config(tiny_chat_dir, num_updates=1), folder, generator=Writer(tiny_chat_dir))
    idle = Writer(tiny_chat_dir)
    again = run_grpo(config(tiny_chat_dir, num_updates=1), folder, generator=idle)
    assert again.checkpoint == first.checkpoint
    assert not idle.seeds


def test_an_update_in_which_everything_failed_is_named_as_such(tiny_chat_dir, run_folder):
    """Fault 32: no reward, no loss, no probe value; the counts say why, and the run goes on."""
    folder = run_folder("x")
    run_grpo(
        config(tiny_chat_dir, num_updates=2, eval_every=1, eval_dialogues=2),
        folder,
        generator=Writer(tiny_chat_dir, failing=True),
    )
    for step, line in metrics(folder).items():
        assert not [k for k in line if k.startswith(("reward/", "heldout/", "sampler/"))], step
        if step:
            assert line["group/failed_trajectories"] == 6
            assert line["policy/skipped_steps"] == 4
            assert "policy/loss" not in line
            assert line["policy/version"] == step


def test_probes_and_sample_tables_are_written(tiny_chat_dir, run_folder):
    folder = run_folder("p")
    run_grpo(
        config(tiny_chat_dir, num_updates=2, eval_every=2, eval_dialogues=1), folder, generator=Writer(tiny_chat_dir)
    )
    found = metrics(folder)
    assert [("heldout/memory_mean" in found[step]) for step in (0, 1, 2)] == [True, False, True]
    tables = sorted((folder / "grpo" / "samples").glob("*.jsonl"))
    assert len(tables) == 2  # fault 31: one file an update, none overwritten
    rows = [json.loads(line) for line in tables[0].read_text().splitlines()]
    assert len(rows) == 3
    assert all(row["prompt"] and row["completion"] and row["reference"] for row in rows)


def test_a_sampler_that_is_off_stops_the_run(tiny_chat_dir, run_folder):
    strict = config(tiny_chat_dir)
    strict = strict.model_copy(update={"sampler": strict.sampler.model_copy(update={"max_mismatch_nats": 0.2})})
    with pytest.raises(RuntimeError, match="the engine does not hold the learner's policy"):
        run_grpo(strict, run_folder("m"), generator=Writer(tiny_chat_dir))


def test_without_an_sft_model_it_says_what_to_run(tiny_chat_dir, tmp_path):
    with pytest.raises(InputError, match="run `sft`"):
        run_grpo(config(tiny_chat_dir), tmp_path, generator=Writer(tiny_chat_dir))
