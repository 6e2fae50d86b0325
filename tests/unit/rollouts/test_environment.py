"""One Writer step: what is seen before it, what is stored by it, and what a refused answer leaves."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from writer_rl.configs.schema import ContractConfig
from writer_rl.data.actions import Action, render_actions
from writer_rl.data.embedding import HashedEmbedder
from writer_rl.data.records import Dialogue, Message, Session
from writer_rl.rollouts.environment import Environment, constrained
from writer_rl.rollouts.generator import Completion, SamplingSpec
from writer_rl.rollouts.prompt_tokens import PromptEncoder

FIRST = Action("ADD", "Ana", "Ben", "per_speaker_profile", "fact", "Ana lives in Leeds")
SECOND = Action("UPDATE", entry_id="m1", content="Ana lives in York")


def session(number: int, *texts: str) -> Session:
    messages = tuple(
        Message(f"s{number}-{i}", "Ben", text, f"2026-08-1{number}T09:00:00", f"s{number}", position=i)
        for i, text in enumerate(texts)
    )
    return Session(f"s{number}", f"2026-08-1{number}T09:00:00", messages)


DIALOGUE = Dialogue(
    "d1", ("Ana", "Ben"), (session(1, "Ana moved to Leeds.", "Haha."), session(2, "Ana moved to York.")), (), "en"
)


@pytest.fixture(scope="module")
def encoder(tiny_chat_dir) -> PromptEncoder:
    return PromptEncoder(AutoTokenizer.from_pretrained(tiny_chat_dir))


@pytest.fixture
def environment(encoder) -> Environment:
    return Environment(DIALOGUE, 25, ContractConfig(embedder="hashed"), encoder, HashedEmbedder())


def answer(encoder: PromptEncoder, text: str, reason: str = "stop") -> Completion:
    ids = tuple(encoder.completion_ids(text))
    return Completion(ids, (-0.5,) * len(ids), text, reason, 0, 1)  # type: ignore[arg-type]


def test_the_prompt_is_of_the_memory_before_and_the_messages_are_stored_before_the_answer(environment, encoder):
    seen = environment.observe(environment.start(), 0)
    prompt = encoder.tokenizer.decode(list(seen.prompt_ids))
    assert "Memory:\n(empty)" in prompt
    assert "Ben: Ana moved to Leeds." in prompt
    assert "York" not in prompt  # the next session is not seen
    assert seen.memory_before.messages == ()
    assert [m.message_id for m in seen.memory.messages] == ["s1-0", "s1-1"]
    assert seen.memory.records == ()
    assert seen.budget == 8


def test_an_answer_becomes_memory_and_the_next_prompt_shows_it(environment, encoder):
    first = environment.act(environment.observe(environment.start(), 0), answer(encoder, render_actions([FIRST])))
    assert first.report.valid
    record = first.memory_after.find("m1")
    assert (record.content, record.owner, record.source) == ("Ana lives in Leeds", "Ana", "Ben")
    assert record.from_ids[:1] == ("s1-0",)
    seen = environment.observe(first.memory_after, 1)
    prompt = encoder.tokenizer.decode(list(seen.prompt_ids))
    assert "m1 profile Ana by Ben 8/11: Ana lives in Leeds" in prompt
    assert "Ana moved to Leeds." not in prompt  # messages of earlier segments are not repeated
    second = environment.act(seen, answer(encoder, render_actions([SECOND])))
    assert [r.content for r in second.memory_after.heads()] == ["Ana lives in York"]
    assert [r.content for r in second.memory_after.chain("m1")] == ["Ana lives in Leeds", "Ana lives in York"]
    assert second.segment_index == 1
    assert len(second.memory_after.messages) == 3
    assert second.memory_before is seen.memory


@pytest.mark.parametrize(
    ("text", "reason", "code"),
    [
        ('{"actions":[', "length", "invalid_json"),
        ("Sure!", "stop", "invalid_json"),
        ('{"actions":[]}', "stop", "empty"),
        (render_actions([FIRST, SECOND]), "stop", "unknown_entry"),
        (render_actions([Action("ADD", "Zoe", "Ben", "per_speaker_core", "fact", "x")]), "stop", "unknown_owner"),
    ],
)
def test_a_refused_answer_leaves_the_derived_memory_but_the_messages_stay(environment, encoder, text, reason, code):
    seen = environment.observe(environment.start(), 0)
    step = environment.act(seen, answer(encoder, text, reason))
    assert [error.code for error in step.report.errors] == [code]
    assert step.memory_after is seen.memory
    assert len(step.memory_after.messages) == 2
    assert step.hit_limit == (reason == "length")


def test_trained_ids_are_the_sampled_ones_whatever_the_text(environment, encoder):
    """Fault 19: the step keeps the completion as it came, with ids that no text would give."""
    odd = Completion((65, 66, 200, 257), (-1.0,) * 4, render_actions([FIRST]), "stop", 3, 9)
    step = environment.act(environment.observe(environment.start(), 0), odd)
    assert step.completion is odd


def test_rule_sets_differ_in_who_is_a_member(encoder):
    text = render_actions([Action("ADD", "Zoe", "Ben", "per_speaker_core", "fact", "x")])
    for rules, valid in (("paper", True), ("fixed", False)):
        environment = Environment(DIALOGUE, 25, ContractConfig(rules=rules), encoder, None)
        step = environment.act(environment.observe(environment.start(), 0), answer(encoder, text))
        assert step.report.valid == valid


def test_forks_share_what_they_had_and_do_not_alter_each_other(environment, encoder):
    root = environment.act(environment.observe(environment.start(), 0), answer(encoder, render_actions([FIRST])))
    before = root.memory_after.records
    fork = environment.act(environment.observe(root.memory_after, 1), answer(encoder, render_actions([SECOND])))
    other = environment.act(environment.observe(root.memory_after, 1), answer(encoder, render_actions([])))
    assert root.memory_after.records is before
    assert before[0].superseded_by == ""
    assert fork.memory_after.find("m1").superseded_by == "m2"
    assert other.memory_after.find("m1").superseded_by == ""
    assert other.memory_after.records == before


def test_max_segments_and_window(encoder):
    one = Environment(DIALOGUE, 25, ContractConfig(), encoder, None, max_segments=1)
    assert [s.session_id for s in one.segments] == ["s1"]
    assert len(Environment(DIALOGUE, 1, ContractConfig(), encoder, None).segments) == 3


def test_constrained_keeps_the_sampling_and_bounds_the_list():
    spec = constrained(SamplingSpec(0.7, 0.9, 50), budget=8)
    assert (spec.temperature, spec.top_p, spec.max_new_tokens) == (0.7, 0.9, 50)
    assert '"maxItems": 8' in json.dumps(spec.json_schema)
