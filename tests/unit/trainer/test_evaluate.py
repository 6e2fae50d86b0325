"""Evaluation: counts by hand, intervals, paired differences, and every arm under one budget."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from writer_rl.configs.errors import InputError
from writer_rl.configs.schema import (
    ContractConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    RunConfig,
    SamplerConfig,
    SimulationConfig,
)
from writer_rl.data.actions import render_actions
from writer_rl.data.embedding import HashedEmbedder
from writer_rl.data.memory import MemoryState, Record
from writer_rl.data.simulation.chats import simulate_split
from writer_rl.rewards.qa_gain import QaScorer
from writer_rl.rollouts.prompt_tokens import PromptEncoder
from writer_rl.rollouts.replay import Failure, ReplayGenerator
from writer_rl.rollouts.seeds import derive_seed
from writer_rl.trainer.data_sets import load_examples
from writer_rl.trainer.evaluate import (
    DialogueResult,
    bootstrap_interval,
    coordinate_errors,
    measure_dialogue,
    print_summary,
    run_evaluation,
    summarise,
    update_counts,
)

SIMULATION = SimulationConfig(num_train=1, num_heldout=4, sessions=(2, 3), noop_share=0.0, update_share=0.8)


def record(
    entry_id: str, content: str, owner: str = "Ana", source: str = "", layer: str = "per_speaker_core", **links
) -> Record:
    return Record(entry_id, content, owner, source or owner, layer, **links)


def chain(old: str, new: str, owner: str = "Ana") -> tuple[Record, Record]:
    return (
        record(f"{owner}1{old}", old, owner, superseded_by=f"{owner}2{new}"),
        record(f"{owner}2{new}", new, owner, links=(f"{owner}1{old}",)),
    )


def test_coordinate_errors_by_hand():
    truth = [
        record("m1", "Ana lives in Leeds"),
        record("m2", "Ben keeps a parrot", "Ben", "Ana", "per_speaker_profile"),
    ]
    assert coordinate_errors(truth, truth) == {"owner": (0, 2), "source": (0, 2), "layer": (0, 2)}
    wrong_owner = [record("x1", "Ana lives in Leeds", "Ben", "Ana"), truth[1]]
    assert coordinate_errors(wrong_owner, truth) == {"owner": (1, 2), "source": (0, 2), "layer": (0, 2)}
    own_words = [record("x2", "Ben keeps a parrot", "Ben")]
    assert coordinate_errors(own_words, truth) == {"owner": (0, 1), "source": (1, 1), "layer": (1, 1)}
    assert coordinate_errors([record("x3", "We meet on Monday", "GROUP")], truth)["owner"] == (0, 0)
    assert coordinate_errors([], truth)["owner"] == (0, 0)


def test_coordinate_errors_match_one_to_one_and_best_first():
    truth = [record("m1", "Ana lives in Leeds")]
    twice = [record("x1", "Ana lives in Leeds now", "Ben"), record("x2", "Ana lives in Leeds")]
    assert coordinate_errors(twice, truth)["owner"] == (0, 1)  # the exact copy takes the match


def test_update_counts_by_hand():
    truth = MemoryState(records=chain("Ana lives in Leeds", "Ana lives in York"))
    assert update_counts(truth, truth) == (1, 1, 1)
    assert update_counts(MemoryState(), truth) == (0, 0, 1)
    assert update_counts(truth, MemoryState()) == (0, 1, 0)
    other_owner = MemoryState(records=chain("Ana lives in Leeds", "Ana lives in York", "Ben"))
    assert update_counts(other_owner, truth) == (0, 1, 1)
    other_matter = MemoryState(records=chain("Ana lives in Leeds", "a quite different thing"))
    assert update_counts(other_matter, truth) == (0, 1, 1)
    both = MemoryState(records=(*truth.records, *chain("Ana works as a baker", "Ana works as a pilot")))
    assert update_counts(both, truth) == (1, 2, 1)
    doubled = MemoryState(records=(*truth.records, *chain("Ana lives in  Leeds", "Ana lives in  York")))
    assert update_counts(doubled, truth) == (1, 2, 1)  # one reference edge serves one UPDATE


def test_bootstrap_interval():
    assert bootstrap_interval([1.0, 1.0, 1.0], 1000, 0) == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert bootstrap_interval([0.25], 1000, 0) == {"mean": 0.25, "low": 0.25, "high": 0.25}
    two = bootstrap_interval([0.0, 1.0], 10000, 0)  # a quarter of the draws are all 0, a quarter all 1
    assert (two["mean"], two["low"], two["high"]) == (0.5, 0.0, 1.0)
    # 100 coins: 1.96 · 0.5 / 10 either side.
    coins = bootstrap_interval([0.0] * 50 + [1.0] * 50, 10000, 1)
    assert coins["low"] == pytest.approx(0.402, abs=0.011)
    assert coins["high"] == pytest.approx(0.598, abs=0.011)
    assert coins == bootstrap_interval([0.0] * 50 + [1.0] * 50, 10000, 1)


def result(arm: str, dialogue: str, **values: float) -> DialogueResult:
    return DialogueResult(arm, dialogue, values, {"person": values.get("phi", 0.0)}, ())


def test_differences_are_paired_and_missing_values_are_no_zeros():
    """Fault 32: an arm that lacks a dialogue or a metric is compared on what both have."""
    results = [
        result("sft", "a", state_score=0.2, qa=0.1), result("sft", "b", state_score=0.4, qa=0.3),
        result("sft", "c", state_score=0.9),
        result("rl", "a", state_score=0.3, qa=0.6), result("rl", "b", state_score=0.5),
    ]  # fmt: skip
    summary = summarise(results, RunConfig())
    assert summary["arms"]["sft"]["state_score"]["mean"] == pytest.approx(0.5)
    assert summary["arms"]["sft"]["qa"] == {"mean": pytest.approx(0.2), "low": 0.1, "high": 0.3, "num_dialogues": 2}
    assert summary["arms"]["rl"]["qa"]["num_dialogues"] == 1
    assert "owner_error" not in summary["arms"]["rl"]
    found = {(d["a"], d["b"], d["metric"]): d for d in summary["differences"]}
    state = found["rl", "sft", "state_score"]
    # Every dialogue gains 0.1: the paired interval is a point, however much dialogues differ from each other.
    assert [state[k] for k in ("mean", "low", "high")] == pytest.approx([0.1] * 3)
    assert state["num_dialogues"] == 2
    assert found["rl", "sft", "qa"]["mean"] == pytest.approx(0.5)
    assert set(found) == {("rl", "sft", "state_score"), ("rl", "sft", "qa")}
    assert summary["budget"] == json.loads(RunConfig().reward.qa.model_dump_json())


def test_the_reference_arm_is_perfect_and_s1_only_has_no_memory_metrics():
    config = RunConfig(data=DataConfig(simulation=SIMULATION))
    qa = QaScorer(config.reward.qa, HashedEmbedder())
    moved = 0
    for example in load_examples(config, "heldout"):
        truth = example.references[-1]
        best = measure_dialogue("reference", example, truth, None, qa)
        for metric, value in {
            "state_score": 1.0,
            "phi": 1.0,
            "owner_error": 0.0,
            "source_error": 0.0,
            "layer_error": 0.0,
        }.items():
            assert best.values[metric] == pytest.approx(value)
        assert best.values["qa_gain"] > 0
        if truth.update_edges():
            moved += 1
            assert best.values["update_precision"] == best.values["update_recall"] == 1.0
        assert best.values["records_per_segment"] == len(truth.records) / len(example.steps)
        assert "validity" not in best.values  # nothing was sampled
        plain = measure_dialogue("s1_only", example, None, None, qa)
        assert set(plain.values) == {"qa", "qa_gain"}
        assert plain.values["qa_gain"] == 0.0
        assert plain.owners == {}
        assert best.values["qa"] - plain.values["qa"] == pytest.approx(best.values["qa_gain"])
        empty = measure_dialogue("base", example, MemoryState(), None, qa)
        assert "owner_error" not in empty.values  # no match, so no rate
        assert "update_precision" not in empty.values
        assert empty.values["state_score"] == 0.0
    assert moved >= 2


@pytest.fixture
def setting(tiny_chat_dir, tmp_path: Path):
    """A run folder with an SFT model, and a generator whose base writes nothing and whose SFT model is the teacher."""
    config = RunConfig(
        name="e", model=ModelConfig(path=str(tiny_chat_dir)), data=DataConfig(simulation=SIMULATION),
        contract=ContractConfig(embedder="hashed", max_prompt_tokens=3500),
        sampler=SamplerConfig(engine="transformers", max_new_tokens=4000, max_model_len=8000),
        evaluation=EvaluationConfig(arms=("s1_only", "base", "sft", "reference"), bootstrap_draws=200),
    )  # fmt: skip
    shutil.copytree(tiny_chat_dir, tmp_path / "sft" / "merged")
    encoder = PromptEncoder(AutoTokenizer.from_pretrained(tiny_chat_dir))
    chats = list(simulate_split(SIMULATION, "heldout"))
    actions = {
        derive_seed(config.seed, c.dialogue.dialogue_id, 0, t): (c.dialogue.dialogue_id, step.actions)
        for c in chats for t, step in enumerate(c.trace.steps)
    }  # fmt: skip

    def answers(prompt_ids, seed):
        dialogue_id, written = actions[seed]
        if generator.loaded[-1].path == tmp_path / "sft" / "merged":
            return render_actions(written)
        return Failure("timeout") if dialogue_id == "heldout-00001" else render_actions([])

    generator = ReplayGenerator(answers, encode=encoder.plain_ids, decode=encoder.text, eos_token_ids=(257,))
    return config, tmp_path, generator


def test_arms_share_prompts_budget_and_questions(setting):
    config, folder, generator = setting
    summary = run_evaluation(config, folder, generator=generator)
    arms = summary["arms"]
    assert [w.path for w in generator.loaded] == [Path(config.model.path), folder / "sft" / "merged"]
    assert len({w.version for w in generator.loaded}) == 2
    assert arms["sft"]["state_score"]["mean"] == pytest.approx(1.0)
    assert arms["sft"]["qa"]["mean"] == pytest.approx(arms["reference"]["qa"]["mean"])
    assert arms["base"]["state_score"]["mean"] == 0.0
    assert arms["base"]["num_dialogues"] == 3  # one failed: left out, not 0
    assert arms["base"]["validity"]["mean"] == 1.0
    differences = {(d["a"], d["b"], d["metric"]): d for d in summary["differences"]}
    assert differences["sft", "base", "state_score"]["num_dialogues"] == 3
    assert differences["sft", "base", "state_score"]["mean"] == pytest.approx(1.0)
    written = [json.loads(line) for line in (folder / "evaluation" / "dialogues.jsonl").read_text().splitlines()]
    assert len(written) == 4 + 3 + 4 + 4
    questions = [json.loads(line) for line in (folder / "evaluation" / "questions.jsonl").read_text().splitlines()]
    by_arm = {arm: {q["question_id"] for q in questions if q["arm"] == arm} for arm in arms}
    assert by_arm["s1_only"] == by_arm["sft"] == by_arm["reference"] > by_arm["base"]
    assert json.loads((folder / "evaluation" / "summary.json").read_text())["arms"].keys() == arms.keys()
    print_summary(summary)


def test_arms_without_weights_say_what_to_run(setting):
    config, folder, generator = setting
    with_rl = config.model_copy(update={"evaluation": EvaluationConfig(arms=("rl",))})
    with pytest.raises(InputError, match="no whole checkpoint; run `grpo` first"):
        run_evaluation(with_rl, folder, generator=generator)
    shutil.rmtree(folder / "sft")
    with pytest.raises(InputError, match="run `sft` first"):
        run_evaluation(config, folder, generator=generator)
    assert not (folder / "evaluation").exists()
