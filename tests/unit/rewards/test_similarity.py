from __future__ import annotations

import difflib
import random

import pytest

from writer_rl.rewards import similarity as module
from writer_rl.rewards.similarity import gated_similarity, sequence_ratio, similarity, tokens

TEXTS = [
    "",
    "!!!",
    "🎉🎉",
    "likes tea",
    "Likes green tea!",
    "x_y don't",
    "住在北京，喜欢tea",
    "Ａｎａ ﬁnds it",
    "naïve café",
    "ab " * 150,
]


@pytest.mark.parametrize(
    ("text", "paper", "fixed"),
    [
        ("", (), ()),
        ("?! 🎉 …", (), ()),
        ("Straße", ("stra", "e"), ("strasse",)),
        ("E\u0301te\u0301", ("e", "te"), ("\u00e9t\u00e9",)),
        ("ＡＢ１２", (), ("ab12",)),
        ("中b文", ("b", "中", "文"), ("中", "b", "文")),
        ("Привет мир", (), ("привет", "мир")),
        ("\U00020000x", ("x",), ("\U00020000", "x")),
        ("don't", ("don", "t"), ("don", "t")),
    ],
)
def test_tokens(text, paper, fixed):
    assert tokens(text, "paper") == paper
    assert tokens(text, "fixed") == fixed


@pytest.mark.parametrize("rules", ["paper", "fixed"])
def test_a_side_without_tokens_scores_zero_even_against_itself(rules):
    assert similarity("!!!", "!!!", rules) == 0.0
    assert similarity("", "", rules) == 0.0
    assert similarity("tea", "🎉", rules) == 0.0


@pytest.mark.parametrize("rules", ["paper", "fixed"])
@pytest.mark.parametrize("text", ["tea", "住在北京", "ab " * 150])
def test_equal_texts_score_exactly_one(rules, text):
    assert similarity(text, text, rules) == 1.0


def test_texts_the_paper_cannot_read():
    assert similarity("живёт в Осло", "живёт в Осло", "paper") == 0.0
    assert similarity("живёт в Осло", "живёт в Осло", "fixed") == 1.0


def test_the_order_of_arguments_is_predicted_then_reference():
    # difflib takes the first longest block of the first text, so the two orders differ; found by search
    rng = random.Random(3)
    pairs = [
        ("".join(rng.choice("ab ") for _ in range(12)), "".join(rng.choice("ab ") for _ in range(12)))
        for _ in range(300)
    ]
    asymmetric = [(a, b) for a, b in pairs if sequence_ratio(a, b, False) != sequence_ratio(b, a, False)]
    assert asymmetric
    for a, b in asymmetric:
        assert sequence_ratio(a, b, False) == difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()


def test_near_twins_over_200_characters_drop_in_paper_only():
    text = "gives a classic answer and does not commit to coming " * 8
    near = text.replace("classic", "typical", 1)
    assert similarity(text, near, "fixed") > 0.95
    assert similarity(text, near, "paper") < similarity(text, near, "fixed") - 0.2


def test_the_gate_refuses_without_changing_any_value():
    for rules in ("paper", "fixed"):
        for a in TEXTS:
            for b in TEXTS:
                value = similarity(a, b, rules)
                assert gated_similarity(a, b, rules) == (value if value >= 0.5 else 0.0)


def test_the_fast_matcher_gives_the_ratios_of_difflib():
    cydifflib = pytest.importorskip("cydifflib")
    assert module.SequenceMatcher is cydifflib.SequenceMatcher
    rng = random.Random(7)
    for _ in range(400):
        letters = rng.choice(["ab ", "abc中文 ", "abcdefghijkl é😀 "])
        a, b = ("".join(rng.choice(letters) for _ in range(rng.choice([0, 3, 30, 230]))) for _ in range(2))
        for autojunk in (True, False):
            plain = sequence_ratio(a, b, autojunk, difflib.SequenceMatcher)
            assert sequence_ratio(a, b, autojunk, cydifflib.SequenceMatcher) == plain


def test_similarity_passes_its_arguments_on_in_order():
    rng = random.Random(3)
    differing = 0
    for _ in range(300):
        a, b = ("".join(rng.choice("ab ") for _ in range(12)) for _ in range(2))
        joined = [" ".join(tokens(text, "fixed")) for text in (a, b)]
        if not all(joined):
            continue
        overlap = 0.6 * module.token_f1(*(frozenset(text.split()) for text in joined))
        ratios = [difflib.SequenceMatcher(None, *pair, autojunk=False).ratio() for pair in (joined, joined[::-1])]
        differing += ratios[0] != ratios[1]
        assert similarity(a, b, "fixed") == pytest.approx(overlap + 0.4 * ratios[0], abs=1e-12)
    assert differing > 5


def test_the_gate_keeps_one_half_and_refuses_less():
    # F1 1/2; blocks "xx " of 12 characters: 0.3 + 0.4 * 6/12 = 0.50; with one more letter on each side 0.3 + 0.4 * 6/14
    # = 0.471
    assert gated_similarity("xx bbb", "xx ccc", "fixed") == 0.5
    assert gated_similarity("xx bbbb", "xx cccc", "fixed") == 0.0


def test_the_gate_does_not_refuse_on_few_common_words():
    # F1 2/6; 17 of 19 characters in order: 0.2 + 0.4 * 34/38 = 0.5579
    expected = 0.2 + 0.4 * 34 / 38
    assert gated_similarity("abcdefgh ijklmnop q", "abcdefgx ijklmnox q", "fixed") == pytest.approx(expected, abs=1e-12)
