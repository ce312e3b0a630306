"""Packing speed: a million tokens of 4,096 rollouts on one core, against the loop that everyone writes first."""

import time

import numpy as np
import torch

from verifier.data.rollout import Rollout, make_rollout
from verifier.megatron.microbatch import split_by_tokens
from verifier.megatron.pack import IGNORE_LABEL, pack
from verifier.megatron.token_layout import Alignment

NUM_ROLLOUTS, NUM_TOKENS, VOCAB = 4096, 1_000_000, 151_936
LIMIT_S = 0.5


def million_tokens() -> list[Rollout]:
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.choice(np.arange(2, NUM_TOKENS // 2), NUM_ROLLOUTS - 1, replace=False)) * 2
    lengths = np.diff(np.concatenate([[0], cuts, [NUM_TOKENS]]))
    batch = []
    for at, length in enumerate(lengths.tolist()):
        tokens = rng.integers(0, VOCAB, length)
        prompt = max(1, length // 3)
        batch.append(
            make_rollout(f"r{at}", tokens[:prompt], tokens[prompt:], logprobs=-rng.random(length - prompt), versions=3)
        )
    assert sum(len(item) for item in batch) == NUM_TOKENS
    return batch


def naive(batch: list[Rollout], alignment: Alignment) -> tuple[torch.Tensor, ...]:
    """Tokens, labels, mask and positions, rollout by rollout and token by token."""
    tokens, labels, mask, positions = [], [], [], []
    for item in batch:
        padded = -(-len(item) // alignment.sequence_multiple) * alignment.sequence_multiple
        for at in range(padded):
            tokens.append(int(item.tokens[at]) if at < len(item) else 0)
            labels.append(int(item.tokens[at + 1]) if at + 1 < len(item) else IGNORE_LABEL)
            mask.append(bool(item.mask[at + 1]) if at + 1 < len(item) else False)
            positions.append(at if at < len(item) else 0)
    return torch.tensor(tokens), torch.tensor(labels), torch.tensor(mask), torch.tensor(positions)


def test_a_million_tokens_pack_in_under_half_a_second() -> None:
    batch, alignment = million_tokens(), Alignment(tp=2, cp=4)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times = []
    try:
        for _ in range(5):
            begin = time.process_time()
            ranks = split_by_tokens(batch, dp=8, max_tokens=32_768, alignment=alignment)
            packs = [pack([batch[index] for index in part], alignment, part) for parts in ranks for part in parts]
            times.append(time.process_time() - begin)
    finally:
        torch.set_num_threads(threads)
    assert sum(int(item.cu_seqlens[-1]) for item in packs if item.ids) == NUM_TOKENS

    some = batch[:256]
    begin = time.process_time()
    expected = naive(some, alignment)
    naive_s = (time.process_time() - begin) * NUM_TOKENS / sum(len(item) for item in some)
    packed = pack(some, alignment)
    for got, want in zip(
        (packed.tokens_T, packed.labels_T, packed.loss_mask_T, packed.positions_T), expected, strict=True
    ):
        assert torch.equal(got, want)
    seconds = sorted(times)[len(times) // 2]
    print(
        f"\nchecked, scheduled and packed {NUM_TOKENS:,} tokens of {NUM_ROLLOUTS:,} rollouts in {seconds:.3f} s "
        f"(limit {LIMIT_S} s) into {len(packs)} packs; the token loop takes {naive_s:.1f} s: {naive_s / seconds:.0f} x"
    )
    assert min(times) < LIMIT_S
