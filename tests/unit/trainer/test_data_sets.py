"""Dialogues, references and supervised rows of a run, from simulation and from files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from writer_rl.configs.errors import InputError
from writer_rl.configs.schema import ContractConfig, DataConfig, RunConfig, SftConfig, SimulationConfig, TeacherFaults
from writer_rl.data.actions import parse_completion
from writer_rl.data.dialogues import write_dialogues
from writer_rl.data.embedding import HashedEmbedder
from writer_rl.data.simulation.chats import simulate_split
from writer_rl.data.traces import write_traces
from writer_rl.rollouts.prompt_tokens import PromptEncoder
from writer_rl.trainer.data_sets import load_examples, sft_rows
from writer_rl.trainer.grpo import make_environments

SIMULATION = SimulationConfig(num_train=4, num_heldout=2)
CONFIG = RunConfig(data=DataConfig(simulation=SIMULATION), contract=ContractConfig(embedder="hashed"))
EOS = 257


@pytest.fixture(scope="module")
def encoder(tiny_chat_dir) -> PromptEncoder:
    return PromptEncoder(AutoTokenizer.from_pretrained(tiny_chat_dir))


@pytest.fixture
def files(tmp_path: Path) -> DataConfig:
    chats = list(simulate_split(SIMULATION, "train"))
    write_dialogues(tmp_path / "dialogues.json", [c.dialogue for c in chats])
    write_traces(tmp_path / "traces.json", [c.trace for c in chats])
    paths = {name: str(tmp_path / f"{name.split('_')[1]}.json") for name in ("train_dialogues", "train_traces")}
    return DataConfig(source="files", **paths)


def edited(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_files_give_the_same_examples_as_the_simulation_they_were_written_from(files):
    simulated = load_examples(CONFIG, "train")
    from_files = load_examples(RunConfig(data=files), "train")
    assert [e.references for e in from_files] == [e.references for e in simulated]
    assert [e.dialogue.questions for e in from_files] == [e.dialogue.questions for e in simulated]
    assert len(simulated) == 4
    assert len(load_examples(CONFIG, "heldout")) == 2


def test_limits_on_dialogues_and_segments():
    limited = RunConfig(data=DataConfig(simulation=SIMULATION, max_dialogues=2, max_segments=1))
    whole, cut = load_examples(CONFIG, "train"), load_examples(limited, "train")
    assert len(cut) == 2
    for short, full in zip(cut, whole, strict=False):
        assert len(short.steps) == len(short.trace.steps) == 1
        assert short.references == full.references[:1]
    assert len(load_examples(limited, "heldout")) == 2  # the limit is on training dialogues


def test_the_window_of_files_is_the_traces_own(files):
    examples = load_examples(RunConfig(data=files.model_copy(update={"window": 1})), "train")
    assert {example.trace.window for example in examples} == {25}
    assert all(len(e.steps) == len(e.dialogue.sessions) for e in examples)


def test_an_embedder_gives_references_their_provenance():
    with_sources = load_examples(CONFIG, "train", HashedEmbedder())
    records = [r for e in with_sources for r in e.references[-1].records]
    assert sum(bool(r.from_ids) for r in records) > len(records) / 2
    assert not any(r.from_ids for e in load_examples(CONFIG, "train") for r in e.references[-1].records)


def test_stale_prompts_are_refused_unless_allowed(files, tmp_path):
    edited(tmp_path / "traces.json", lambda v: v["traces"][1].update(prompt_version="older"))
    with pytest.raises(InputError, match=r"traces\[1\]\.prompt_version: is 'older'"):
        load_examples(RunConfig(data=files), "train")
    allowed = files.model_copy(update={"allow_stale_prompt": True})
    assert len(load_examples(RunConfig(data=allowed), "train")) == 4


def test_a_trace_without_its_dialogue_is_refused(files, tmp_path):
    edited(tmp_path / "dialogues.json", lambda v: v["dialogues"].pop(2))
    with pytest.raises(InputError, match="'train-00002', which is no dialogue"):
        load_examples(RunConfig(data=files), "train")


def test_missing_parts_name_their_keys(files):
    with pytest.raises(InputError, match=r"data\.heldout_dialogues"):
        load_examples(RunConfig(data=files), "heldout")
    empty = RunConfig(data=DataConfig(simulation=SimulationConfig(num_heldout=0)))
    with pytest.raises(InputError, match="heldout split is empty"):
        load_examples(empty, "heldout")


def test_rows_train_the_reference_with_one_eos(encoder):
    """Faults 20 and 22 before any trainer: the completion starts with the answer's first token and ends with one EOS."""
    examples = load_examples(CONFIG, "train")
    rows = sft_rows(examples, CONFIG, encoder, HashedEmbedder())
    steps = [(e.dialogue.dialogue_id, s) for e in examples for s in e.steps]
    assert [(r.dialogue_id, r.segment_index) for r in rows] == [(i, s.segment.index) for i, s in steps]
    for row, (_, step) in zip(rows, steps, strict=True):
        assert row.completion_ids.count(EOS) == 1
        assert row.completion_ids[-1] == EOS
        text = encoder.text(row.completion_ids)
        assert text.startswith('{"actions":[')
        parsed = parse_completion(text)
        assert len(parsed.items) == max(1, len(step.actions))
        assert encoder.tokenizer.decode(list(row.prompt_ids)).endswith("<|im_start|>assistant\n")


def test_supervised_and_sampled_prompts_are_the_same_ids(encoder):
    """One code path: on the reference's memory a rollout shows the Writer exactly what supervised training showed it."""
    examples = load_examples(CONFIG, "train")
    rows = iter(sft_rows(examples, CONFIG, encoder, HashedEmbedder()))
    for example, environment in zip(
        examples, make_environments(examples, CONFIG, encoder, HashedEmbedder()), strict=True
    ):
        for position, step in enumerate(example.steps):
            assert environment.observe(step.before, position).prompt_ids == next(rows).prompt_ids


def test_rows_imitate_the_teacher_and_references_stay_true(encoder):
    """A teacher that errs is what SFT learns from; what rewards compare with is the truth."""
    faulty = SIMULATION.model_copy(update={"teacher_faults": TeacherFaults(written_noise=1.0, missed_update=1.0)})
    config = CONFIG.model_copy(update={"data": DataConfig(simulation=faulty)})
    clean, taught = load_examples(CONFIG, "train"), load_examples(config, "train")
    assert [e.references for e in taught] == [e.references for e in clean]
    assert [e.demonstrations for e in clean] == [e.steps for e in clean]
    rows = iter(sft_rows(taught, config, encoder, None))
    for example in taught:
        for step in example.demonstrations:
            text = encoder.text(next(rows).completion_ids)
            assert '"UPDATE"' not in text
            assert [item["content"] for item in parse_completion(text).items] == [a.content for a in step.actions]
    assert any(" says " in a.content for e in taught for s in e.demonstrations for a in s.actions)
    cut = config.model_copy(update={"data": DataConfig(simulation=faulty, max_segments=1)})
    assert {(len(e.steps), len(e.demonstrations)) for e in load_examples(cut, "train")} == {(1, 1)}


def test_a_row_that_does_not_fit_raises(encoder):
    """Fault 22: never truncated, so that no completion is lost; the message says which and what to change."""
    examples = load_examples(CONFIG, "train")
    rows = sft_rows(examples, CONFIG, encoder, None)
    longest = max(len(r.prompt_ids) + len(r.completion_ids) for r in rows)
    exact = CONFIG.model_copy(update={"sft": SftConfig(max_length=longest)})
    assert sft_rows(examples, exact, encoder, None) == rows
    short = CONFIG.model_copy(update={"sft": SftConfig(max_length=longest - 1)})
    with pytest.raises(
        InputError, match=rf"segment \d+: makes a sample of .* above sft.max_length = {longest - 1}; raise"
    ):
        sft_rows(examples, short, encoder, None)


def test_a_reference_that_is_refused_names_its_step(files, tmp_path):
    def forge(value) -> None:
        value["traces"][0]["steps"][0]["actions"] = [{"action": "UPDATE", "entry_id": "m9", "content": "x"}]

    edited(tmp_path / "traces.json", forge)
    with pytest.raises(InputError, match=r"train-00000: steps\[0\]: is refused .*'m9' is not in memory"):
        load_examples(RunConfig(data=files), "train")


def test_examples_are_values():
    example = load_examples(CONFIG, "train")[0]
    assert replace(example) == example
    assert example.references[-1] is example.steps[-1].after
