"""Packing samples into micro-batches."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from writer_rl.trainer.batching import TrainSample, common_prefix_length, make_microbatch, pack_microbatches

PAD = 2  # also a real token below: no mask may depend on it


def _sample(prompt: list[int], completion: list[int], advantage: float = 1.0) -> TrainSample:
    logprobs = tuple(-float(i) - 1 for i in range(len(completion)))
    return TrainSample(tuple(prompt), tuple(completion), logprobs, advantage)


def _random_samples(num: int, seed: int = 0) -> list[TrainSample]:
    draw = random.Random(seed)
    system = [draw.randrange(2, 50) for _ in range(20)]
    samples = []
    for _ in range(num // 4):
        prompt = system + [draw.randrange(2, 50) for _ in range(draw.randrange(1, 30))]
        for _ in range(4):
            samples.append(_sample(prompt, [draw.randrange(2, 50) for _ in range(draw.randrange(1, 15))] + [PAD]))
    draw.shuffle(samples)
    return samples


def _unpacked(batches) -> dict[int, tuple[list[int], list[int], list[float], float]]:
    rows = {}
    for batch in batches:
        for b, index in enumerate(batch.sample_indices):
            real, trained = batch.attention_mask_BT[b], batch.completion_mask_BT[b]
            prompt = batch.prefix_ids_P.tolist() + batch.ids_BT[b][real & ~trained].tolist()
            rows[index] = (
                prompt, batch.ids_BT[b][trained].tolist(), batch.sampling_logprobs_BT[b][trained].tolist(),
                batch.advantages_B[b].item(),
            )  # fmt: skip
    return rows


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 120, 300, 10_000])
def test_every_sample_comes_back_with_its_own_tokens(share_prefix, max_tokens):
    samples = _random_samples(32)
    batches = pack_microbatches(samples, max_tokens, PAD, share_prefix=share_prefix)
    rows = _unpacked(batches)
    assert sorted(rows) == list(range(32))
    for index, sample in enumerate(samples):
        assert rows[index] == (
            list(sample.prompt_ids), list(sample.completion_ids), list(sample.sampling_logprobs), sample.advantage
        )  # fmt: skip
    for batch in batches:
        assert batch.num_padded_tokens <= max_tokens or batch.num_rows == 1
        assert not batch.completion_mask_BT[:, 0].any(), "column 0 is the prompt token that predicts the first id"
        assert batch.num_real_tokens <= batch.num_padded_tokens


def test_a_group_shares_its_whole_prompt_but_the_last_token():
    samples = [_sample(list(range(200)), [300 + i] * 60) for i in range(8)]
    (batch,) = pack_microbatches(samples, 8192, PAD)
    assert batch.prefix_ids_P.numel() == 199
    assert batch.ids_BT.shape == (8, 61)
    assert batch.num_padded_tokens == 199 + 8 * 61
    assert batch.num_completion_tokens == 480
    (plain,) = pack_microbatches(samples, 8192, PAD, share_prefix=False)
    assert plain.prefix_ids_P.numel() == 0
    assert plain.num_padded_tokens == 8 * 260


def test_groups_are_kept_apart_where_that_is_cheaper():
    system = list(range(100, 110))
    samples = [_sample([*system, *[k] * 90], [7] * (5 + i)) for k in (1, 3) for i in range(4)]
    batches = pack_microbatches(samples, 8192, PAD)
    assert [len(b.sample_indices) for b in batches] == [4, 4]
    assert [b.prefix_ids_P.numel() for b in batches] == [99, 99]
    # With a short own part, one batch on the system prompt is cheaper than two batches.
    short = [_sample([*system, k], [7] * 5) for k in (1, 3)]
    (joint,) = pack_microbatches(short, 8192, PAD)
    assert joint.prefix_ids_P.tolist() == system


def test_one_sample_keeps_one_prompt_token():
    (batch,) = pack_microbatches([_sample([5, 6], [7, 8])], 100, PAD)
    assert batch.prefix_ids_P.tolist() == [5]
    assert batch.ids_BT.tolist() == [[6, 7, 8]]
    (single,) = pack_microbatches([_sample([5], [7])], 100, PAD)
    assert single.prefix_ids_P.numel() == 0


def test_masks_come_from_lengths_not_from_the_pad_id():
    batch = make_microbatch([_sample([PAD, 4], [PAD, PAD]), _sample([PAD, 4], [9, PAD, PAD])], [0, 1], PAD)
    assert batch.ids_BT.tolist() == [[4, PAD, PAD, PAD], [4, 9, PAD, PAD]]
    assert batch.completion_mask_BT.tolist() == [[False, True, True, False], [False, True, True, True]]
    assert batch.attention_mask_BT.tolist() == [[True, True, True, False], [True, True, True, True]]
    assert batch.sampling_logprobs_BT.tolist() == [[0.0, -1.0, -2.0, 0.0], [0.0, -1.0, -2.0, -3.0]]


def test_prefix_in_rows_holds_the_same_sequences():
    samples = _random_samples(8, seed=3)
    for batch in pack_microbatches(samples, 500, PAD):
        plain = batch.with_prefix_in_rows()
        assert plain.prefix_ids_P.numel() == 0
        assert _unpacked([plain]) == _unpacked([batch])
        assert torch.equal(
            plain.sampling_logprobs_BT[plain.completion_mask_BT], batch.sampling_logprobs_BT[batch.completion_mask_BT]
        )


def test_the_cut_is_the_cheapest_one():
    """Against every way to cut the sorted order of a small set."""
    samples = _random_samples(8, seed=5)
    limit, overhead = 150, 10

    def cost(batches) -> int:
        return sum(b.num_padded_tokens + overhead for b in batches)

    order = sorted(range(8), key=lambda i: (samples[i].prompt_ids, len(samples[i].completion_ids), i))
    options = []
    for bits in range(2**7):
        cuts = [0, *[k + 1 for k in range(7) if bits >> k & 1], 8]
        batches = [make_microbatch(samples, order[a:b], PAD) for a, b in itertools.pairwise(cuts)]
        if all(b.num_padded_tokens <= limit or b.num_rows == 1 for b in batches):
            options.append(cost(batches))
    assert cost(pack_microbatches(samples, limit, PAD, overhead_tokens=overhead)) == min(options)


def test_boundaries():
    assert pack_microbatches([], 100, PAD) == []
    assert common_prefix_length([1, 2], [1, 2, 3]) == 2
    with pytest.raises(ValueError, match="positive"):
        pack_microbatches([], 0, PAD)
    with pytest.raises(ValueError, match="empty"):
        _sample([1], [])
    with pytest.raises(ValueError, match="one per sampled id"):
        TrainSample((1,), (2, 3), (-1.0,), 0.0)
