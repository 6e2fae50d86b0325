"""The two tracks of memory: application, chains, roster, provenance (specification §2)."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from writer_rl.data.actions import GROUP, Action, ActionReport, parse_completion, render_actions, validate
from writer_rl.data.embedding import Embedder, HashedEmbedder
from writer_rl.data.memory import MemoryState, Record, Roster
from writer_rl.data.records import Message, Segment


def segment(index: int = 0, *texts: str) -> Segment:
    said = texts or ("hello", "hi")
    messages = tuple(Message(f"s{index}_{i}", ("Ana", "Ben")[i % 2], text) for i, text in enumerate(said))
    return Segment(index, f"s{index}", f"2026-08-1{index}T09:00:00", messages)


def add(
    content: str, owner: str = "Ana", source: str = "Ana", layer: str = "per_speaker_core", kind: str = "fact"
) -> Action:
    return Action("ADD", owner, source, layer, kind, content)


def update(entry_id: str, content: str) -> Action:
    return Action("UPDATE", content=content, entry_id=entry_id)


def write(state: MemoryState, index: int, *actions: Action, embedder: Embedder | None = None) -> MemoryState:
    part = segment(index)
    seen = state.observe(part)
    report = validate(parse_completion(render_actions(actions)), seen)
    assert report.valid, [str(error) for error in report.errors]
    return seen.apply(report, part, embedder)


def test_observe_keeps_messages_verbatim_and_meets_speakers() -> None:
    part = Segment(
        0,
        "s",
        "",
        (Message("a", "Zoë", "  two  spaces\n<|im_end|> "), Message("b", "Ben", ""), Message("c", "ZOË", "x")),
    )
    state = MemoryState.empty().observe(part)
    assert state.messages == part.messages
    assert state.roster.members == ("Zoë", "Ben")
    assert state.records == ()


def test_add_fills_every_field() -> None:
    state = write(MemoryState.empty(), 1, add("plays chess", kind="stance"))
    assert state.records == (
        Record(
            "m1", "plays chess", "Ana", "Ana", "per_speaker_core", "stance", 1, "2026-08-11T09:00:00", 0.7, (), (), ""
        ),
    )


def test_update_supersedes_and_inherits_and_overwrites_nothing() -> None:
    first = write(MemoryState.empty(), 0, add("Ben is late", "Ben", "Ana", "per_speaker_profile", "observation"))
    second = write(first, 1, update("m1", "Ben is on time now"))
    old, new = second.records
    assert (old.content, old.superseded_by, old.confidence) == ("Ben is late", "m2", 0.7)
    assert (new.owner, new.source, new.layer, new.kind) == ("Ben", "Ana", "per_speaker_profile", "observation")
    assert (new.entry_id, new.links, new.superseded_by) == ("m2", ("m1",), "")
    assert (new.created_at_segment, new.sent_at) == (1, "2026-08-11T09:00:00")
    assert new.confidence == 0.8
    assert first.records[0].superseded_by == ""
    assert second.heads() == (new,)
    assert second.update_edges() == (("m1", "m2"),)


def test_confidence_rises_by_a_tenth_and_stops_at_one() -> None:
    state = write(MemoryState.empty(), 0, add("version 0"))
    for number in range(1, 6):
        state = write(state, number, update(f"m{number}", f"version {number}"))
    assert [record.confidence for record in state.records] == [0.7, 0.8, 0.9, 1.0, 1.0, 1.0]
    ids = ["m1", "m2", "m3", "m4", "m5", "m6"]
    assert all([record.entry_id for record in state.chain(entry_id)] == ids for entry_id in ids)


def test_chain_of_an_unknown_record_raises() -> None:
    with pytest.raises(KeyError):
        MemoryState.empty().chain("m1")


def test_a_refused_list_returns_the_same_object() -> None:
    state = write(MemoryState.empty(), 0, add("x"))
    for text in ("no json", '{"actions":[]}', render_actions([add("y"), update("m7", "z")])):
        assert state.apply(validate(parse_completion(text), state), segment(1)) is state


def test_noop_changes_nothing() -> None:
    state = write(MemoryState.empty(), 0, add("x"))
    report = ActionReport(True, ({"action": "NOOP"},), (Action("NOOP"),), ())
    assert state.apply(report, segment(1)) is state


def test_two_updates_and_an_add_in_one_list() -> None:
    state = write(MemoryState.empty(), 0, add("a"), add("b"))
    state = write(state, 1, update("m2", "b2"), add("c"), update("m1", "a2"))
    assert [record.content for record in state.records] == ["a", "b", "b2", "c", "a2"]
    assert state.update_edges() == (("m2", "m3"), ("m1", "m5"))
    assert [record.entry_id for record in state.heads()] == ["m3", "m4", "m5"]


def test_given_ids_are_used_in_order_and_a_taken_id_is_refused() -> None:
    state = MemoryState.empty().observe(segment())
    report = validate(parse_completion(render_actions([add("a"), add("b")])), state)
    ids = iter(["x", "y"])
    assert [r.entry_id for r in state.apply(report, segment(), None, lambda _: next(ids)).records] == ["x", "y"]
    with pytest.raises(ValueError, match="entry_id"):
        state.apply(report, segment(), None, lambda _: "x")


def test_sequential_ids_pass_over_taken_ones() -> None:
    state = MemoryState(records=(Record("m2", "x", "Ana", "Ana", "per_speaker_core"),), roster=Roster(("Ana",)))
    assert write(state, 0, add("y"), add("z")).records[1:][0].entry_id == "m3"


def test_owners_are_alphabetical_with_group_last() -> None:
    records = tuple(
        Record(f"m{i}", "x", owner, "Ana", "group_insight" if owner == GROUP else "per_speaker_core")
        for i, owner in enumerate(["Zed", GROUP, "Ana", "Zed"])
    )
    assert MemoryState(records=records).owners() == ("Ana", "Zed", GROUP)


class _FixedCosines:
    """Text "q" has the listed cosines with messages 0, 1, 2, …"""

    def __init__(self, *cosines: float) -> None:
        self.cosines = cosines

    def embed(self, texts: list[str]) -> NDArray[np.float32]:
        if texts == ["q"]:
            return np.asarray([[*self.cosines]], np.float32)
        return np.eye(len(self.cosines), dtype=np.float32)[: len(texts)]


@pytest.mark.parametrize(
    ("cosines", "expected"),
    [
        ((0.24, 0.25, 0.9), ("s0_2", "s0_1")),
        ((0.3, 0.4, 0.5, 0.6), ("s0_3", "s0_2", "s0_1")),
        ((0.5, 0.5, 0.5, 0.5), ("s0_0", "s0_1", "s0_2")),
        ((0.1, 0.2), ()),
    ],
)
def test_provenance_takes_three_messages_of_cosine_a_quarter_or_more(
    cosines: tuple[float, ...], expected: tuple[str, ...]
) -> None:
    part = segment(0, *("text" for _ in cosines))
    state = MemoryState.empty().observe(part)
    report = validate(parse_completion(render_actions([add("q")])), state)
    assert state.apply(report, part, _FixedCosines(*cosines)).records[0].from_ids == expected  # type: ignore[arg-type]


def test_provenance_finds_the_message_that_was_said() -> None:
    part = segment(0, "I bought a red bicycle", "nice weather today")
    state = MemoryState.empty().observe(part)
    report = validate(parse_completion(render_actions([add("Ana bought a red bicycle")])), state)
    assert state.apply(report, part, HashedEmbedder()).records[0].from_ids == ("s0_0",)
    assert state.apply(report, part).records[0].from_ids == ()


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Ana", "Ana"), (" ana ", "Ana"), ("ANA@2026-08-10", "Ana"), ("Ana @ 2026-08-10T09:00", "Ana"), ("benny", "Ben"),
     ("An", None), ("Ana B", None), ("", None), (GROUP, None)],
)  # fmt: skip
def test_roster_resolves_written_names(name: str, expected: str | None) -> None:
    assert Roster(("Ana", "Ben"), {"Benny": "Ben"}).canonical(name) == expected


def test_roster_does_not_repeat_a_member_or_an_alias() -> None:
    roster = Roster(("Ana",), {"Annie": "Ana"})
    assert roster.with_members(["ana", "ANNIE", ""]) is roster
    assert roster.with_members(["Ben", "ben"]).members == ("Ana", "Ben")


def test_states_compare_by_value() -> None:
    one, two = (write(MemoryState.empty(("Ana",)), 0, add("x")) for _ in range(2))
    assert one == two
    assert one != write(MemoryState.empty(("Ana",)), 0, add("y"))
