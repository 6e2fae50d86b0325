"""Simulated chats: the same by seed, every kind of event at its share, and a reference memory that is true."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

import pytest

from writer_rl.configs.schema import QaConfig, SimulationConfig
from writer_rl.data.actions import GROUP, GROUP_LAYERS, Action
from writer_rl.data.embedding import HashedEmbedder
from writer_rl.data.simulation.chats import WINDOW, SimulatedChat, simulate_split
from writer_rl.data.simulation.vocabulary import (
    GROUP_MATTERS,
    HELDOUT_NAMES,
    NORM_MATTERS,
    PERSON_MATTERS,
    STANCE_MATTERS,
    TRAIN_NAMES,
    TRAIT_MATTERS,
    MatterKind,
)
from writer_rl.data.traces import ReplayedStep, replay
from writer_rl.rewards.qa_gain import QaScorer

KINDS = (*PERSON_MATTERS, *STANCE_MATTERS, *TRAIT_MATTERS, *GROUP_MATTERS, *NORM_MATTERS)
CONFIG = SimulationConfig(num_train=300, num_heldout=40)


@cache
def chats(split: str = "train") -> tuple[SimulatedChat, ...]:
    return tuple(simulate_split(CONFIG, split))


@cache
def replays() -> tuple[tuple[ReplayedStep, ...], ...]:
    return tuple(tuple(replay(c.dialogue, c.trace, WINDOW, rules="fixed")) for c in chats())


def some(**changes: object) -> list[SimulatedChat]:
    return list(simulate_split(SimulationConfig(**{"num_train": 30, **changes}), "train"))  # type: ignore[arg-type]


def read(content: str) -> tuple[MatterKind, str, str]:
    """(kind, person or "", value) that a record's content states."""
    for kind in KINDS:
        pattern = re.escape(kind.content).replace(r"\{p\}", "(?P<p>[A-Z][a-z]+)").replace(r"\{v\}", "(?P<v>.+)")
        match = re.fullmatch(pattern, content)
        if match and match["v"] in kind.values:
            return kind, match.groupdict().get("p") or "", match["v"]
    raise AssertionError(f"no kind of matter states {content!r}")


def actions(found: tuple[SimulatedChat, ...] | list[SimulatedChat]) -> list[Action]:
    return [action for chat in found for step in chat.trace.steps for action in step.actions]


def near(count: int, total: int, share: float, slack: float = 0.0) -> bool:
    """Whether a count lies within four standard deviations of a share (and `slack` below it)."""
    deviation = 4 * (share * (1 - share) / total) ** 0.5
    return share - slack - deviation <= count / total <= share + deviation


def test_the_seed_decides_everything() -> None:
    assert some() == some()
    assert all(a.dialogue != b.dialogue for a, b in zip(some(seed=1), some(seed=2), strict=True))


def test_a_chat_does_not_depend_on_how_many_are_made() -> None:
    few, many = some(num_train=3, num_heldout=1), some(num_train=9, num_heldout=7)
    assert few == many[:3]


def test_splits_share_neither_names_nor_seeds() -> None:
    assert not set(TRAIN_NAMES) & set(HELDOUT_NAMES)
    for split, names in (("train", TRAIN_NAMES), ("heldout", HELDOUT_NAMES)):
        speakers = {m.speaker for c in chats(split) for s in c.dialogue.sessions for m in s.messages}
        assert speakers <= set(names)
    train, heldout = ({c.dialogue.meta["seed"] for c in chats(split)} for split in ("train", "heldout"))
    assert (len(train), len(heldout)) == (300, 40)
    assert not train & heldout
    assert not {c.dialogue.dialogue_id for c in chats()} & {c.dialogue.dialogue_id for c in chats("heldout")}


def test_sizes_stay_in_their_ranges() -> None:
    for chat in chats():
        assert CONFIG.members[0] <= len(set(chat.dialogue.members)) == len(chat.dialogue.members) <= CONFIG.members[1]
        assert CONFIG.sessions[0] <= len(chat.dialogue.sessions) <= CONFIG.sessions[1]
        for session, step in zip(chat.dialogue.sessions, chat.trace.steps, strict=True):
            assert CONFIG.messages[0] <= len(session.messages) <= CONFIG.messages[1]
            # A disagreement counts twice, so a session may hold one write more than `matters`.
            assert len(step.actions) <= CONFIG.matters[1] + 1


def test_the_reference_is_always_valid_and_updates_name_heads() -> None:
    """`replay` refuses an invalid list; on top of that every UPDATE moves the right matter on, and from its head."""
    num_updates = 0
    for steps in replays():  # building them has validated every list under the fixed rules
        for step in steps:
            for action in step.actions:
                if action.action != "UPDATE":
                    continue
                head = step.before.find(action.entry_id)
                assert head is not None
                assert not head.superseded_by
                old, new = read(head.content), read(action.content)
                assert (old[0], old[1]) == (new[0], new[1])
                assert old[2] != new[2]
                num_updates += 1
    assert num_updates > 100


def test_one_matter_has_one_chain() -> None:
    for steps in replays():
        heads = [(head.owner, read(head.content)[0].key) for head in steps[-1].after.heads()]
        assert len(heads) == len(set(heads))


def test_owner_layer_and_content_agree() -> None:
    for steps in replays():
        for record in steps[-1].after.records:
            kind, person, _ = read(record.content)
            assert record.kind == kind.kind
            assert person == ("" if record.owner == GROUP else record.owner)
            if record.owner == GROUP:
                assert record.layer in GROUP_LAYERS
            else:
                assert (record.layer == "per_speaker_core") == (record.owner == record.source)


def test_every_write_is_said_in_its_segment() -> None:
    """The value of a record stands word for word in a message: said by its source, for an ADD."""
    for steps in replays():
        for step in steps:
            for action in step.actions:
                if action.action == "NOOP":
                    continue
                value = read(action.content)[2]
                said = [m for m in step.segment.messages if re.search(rf"\b{re.escape(value)}\b", m.text)]
                assert any(action.action == "UPDATE" or m.speaker == action.source for m in said), action


def test_a_message_is_never_written_twice_and_side_talk_never() -> None:
    """A matter that memory holds and that is merely said again appears in messages but in no action."""
    num_restated = 0
    for steps in replays():
        for step in steps:
            written = {read(a.content)[2] for a in step.actions if a.action != "NOOP"}
            for head in step.before.heads():
                kind, person, value = read(head.content)
                again = {t.format(p=person, v=value) for t in kind.said}
                if any(m.text in again and (m.speaker == person or not person) for m in step.segment.messages):
                    num_restated += 1
                    assert not any(a.action == "UPDATE" and a.entry_id == head.entry_id for a in step.actions)
                    same = [a for a in step.actions if a.action == "ADD" and a.content == head.content]
                    assert not same, (value, written)
    assert num_restated > 20


def test_shares_are_those_of_the_configuration() -> None:
    found = actions(chats())
    adds = [a for a in found if a.action == "ADD"]
    segments = [step for c in chats() for step in c.trace.steps]
    assert near(sum(not s.actions for s in segments), len(segments), CONFIG.noop_share)
    # Draws that find nothing free fall back to another kind of matter: a little below the share is right.
    assert near(sum(a.owner == GROUP for a in adds), len(adds), CONFIG.group_share, slack=0.06)
    personal = [a for a in adds if a.owner != GROUP and read(a.content)[0] not in STANCE_MATTERS]
    assert near(sum(a.owner != a.source for a in personal), len(personal), CONFIG.hearsay_share, slack=0.05)
    later = [a for c in chats() for step in c.trace.steps[1:] for a in step.actions]
    assert near(sum(a.action == "UPDATE" for a in later), len(later), CONFIG.update_share, slack=0.08)
    assert not any(a.action == "UPDATE" for c in chats() for a in c.trace.steps[0].actions)


def test_a_disagreement_is_two_adds() -> None:
    pairs = 0
    for chat in chats():
        for step in chat.trace.steps:
            stances = [a for a in step.actions if a.action == "ADD" and read(a.content)[0] in STANCE_MATTERS]
            by_kind = Counter(read(a.content)[0].key for a in stances)
            for key in by_kind:
                held = [a for a in stances if read(a.content)[0].key == key]
                assert len(held) == 2
                assert len({a.owner for a in held}) == 2
                assert all(a.owner == a.source for a in held)
                assert len({read(a.content)[2] for a in held}) == 2
                pairs += 1
    # 1 − group_share of about 2 matters a session, a tenth of them: dozens in 900 sessions.
    assert 40 < pairs < 160


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({"noop_share": 1.0}, lambda a: False),
        ({"update_share": 0.0}, lambda a: a.action == "ADD"),
        ({"hearsay_share": 0.0}, lambda a: a.action == "UPDATE" or a.owner in (GROUP, a.source)),
        ({"group_share": 0.0}, lambda a: a.action == "UPDATE" or a.owner != GROUP),
        ({"disagreement_share": 0.0}, lambda a: read(a.content)[0] not in STANCE_MATTERS),
        ({"group_share": 1.0, "sessions": (1, 1)}, lambda a: a.owner == GROUP),
    ],
)
def test_shares_of_zero_and_one(changes, holds) -> None:
    found = actions(some(**changes))
    assert all(map(holds, found))
    assert found or changes == {"noop_share": 1.0}


# ---------------------------------------------------------------- the teacher that errs

FAULTS = {"misfiled_hearsay": 0.6, "written_noise": 0.5, "missed_update": 0.6}


def test_a_teacher_without_faults_writes_the_truth() -> None:
    for chat in chats():
        assert chat.teacher_trace.steps == chat.trace.steps
        assert chat.teacher_trace.teacher != chat.trace.teacher


def test_faults_touch_neither_chat_nor_truth() -> None:
    for plain, faulty in zip(some(), some(teacher_faults=FAULTS), strict=True):
        assert (faulty.dialogue, faulty.trace) == (plain.dialogue, plain.trace)
        assert faulty.teacher_trace.steps != plain.teacher_trace.steps


def test_a_faulty_trace_is_valid_and_errs_at_its_shares() -> None:
    """Replayed under the fixed rules: every list is one that a Writer could have written, with its own live heads."""
    made = some(num_train=200, teacher_faults=FAULTS)
    told = misfiled = updates = missed = side = noise = 0
    for chat in made:
        list(replay(chat.dialogue, chat.teacher_trace, WINDOW, rules="fixed"))
        for session, truth, taught in zip(
            chat.dialogue.sessions, chat.trace.steps, chat.teacher_trace.steps, strict=True
        ):
            by_content = {a.content: a for a in taught.actions}
            for action in truth.actions:
                found = by_content[action.content]  # nothing that the truth holds is lost
                if action.action == "UPDATE":
                    updates += 1
                    missed += found.action == "ADD"
                elif action.owner not in (GROUP, action.source):
                    told += 1
                    wrong = (found.owner, found.layer) == (action.source, "per_speaker_core")
                    assert wrong or found == action
                    misfiled += wrong
                else:
                    assert found == action
            extra = set(by_content) - {a.content for a in truth.actions}
            said = {f"{m.speaker} says {m.text}" for m in session.messages}
            assert extra <= said
            noise += len(extra)
            # A matter that is said again is no news either, so it counts with the side talk.
            side += len(said) - len(truth.actions)
    assert near(misfiled, told, FAULTS["misfiled_hearsay"])
    assert near(missed, updates, FAULTS["missed_update"])
    assert near(noise, side, FAULTS["written_noise"], slack=0.02)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_comes_alone(fault: str) -> None:
    differing = set()
    for chat in some(teacher_faults={fault: 1.0}):
        for truth, taught in zip(chat.trace.steps, chat.teacher_trace.steps, strict=True):
            right = {(a.action, a.owner, a.layer, a.content) for a in truth.actions}
            differing |= {a.action for a in taught.actions if (a.action, a.owner, a.layer, a.content) not in right}
            assert fault == "missed_update" or sum(a.action == "UPDATE" for a in taught.actions) == sum(
                a.action == "UPDATE" for a in truth.actions
            )
    assert differing == {"ADD"}


def test_a_long_chat_that_runs_out_of_matters_still_ends() -> None:
    long = some(num_train=1, members=(2, 2), sessions=(30, 30), matters=(3, 3), update_share=0.0)
    assert len(long[0].dialogue.sessions) == 30


def test_a_full_session_loses_no_matter() -> None:
    """With as many matters as messages a disagreement does not fit the last place; nothing may be made and not said."""
    for chat in some(matters=(3, 3), messages=(3, 3), disagreement_share=1.0):
        list(replay(chat.dialogue, chat.trace, WINDOW, rules="fixed"))
        assert all(question.evidence_ids for question in chat.dialogue.questions)


def test_questions_rest_on_messages_that_exist() -> None:
    categories: Counter[str] = Counter()
    for chat in (*chats(), *chats("heldout")):
        ids = {m.message_id for s in chat.dialogue.sessions for m in s.messages}
        assert len(ids) == sum(len(s.messages) for s in chat.dialogue.sessions)
        assert len({q.question_id for q in chat.dialogue.questions}) == len(chat.dialogue.questions)
        for question in chat.dialogue.questions:
            categories[question.category] += 1
            assert question.evidence_ids
            assert set(question.evidence_ids) <= ids
            assert question.answer
    assert set(categories) == {"current_state", "how_changed", "single_fact", "group", "who_said"}


def test_the_true_memory_answers_the_questions_and_raw_messages_do_not() -> None:
    scorer = QaScorer(QaConfig(), HashedEmbedder())
    reference, without = [], []
    for chat, steps in list(zip(chats(), replays(), strict=True))[:60]:
        reference += [r.score for r in scorer.answer_questions(chat.dialogue, steps[-1].after)]
        without += [r.score for r in scorer.answer_questions(chat.dialogue, None)]
    assert None not in reference + without
    means = [sum(scores) / len(scores) for scores in (reference, without)]  # type: ignore[arg-type]
    assert means[0] >= 0.95, means
    assert means[0] - means[1] >= 0.2, means
