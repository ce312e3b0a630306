"""What test_tokens_*.py runs on ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from verifier.data.rollout import Rollout, make_rollout
from verifier.launch.rank import RankContext
from verifier.mesh import Mesh

LENGTHS = [(1, 4), (3, 13), (7, 1), (2, 17), (5, 11), (1, 1), (16, 16), (4, 0), (9, 2), (1, 22)]
VOCAB = 512


def rollouts() -> list[Rollout]:
    """Anti-correlated, one-token and edge lengths; multi-turn, masked out and mixed-version rollouts."""
    rng = np.random.default_rng(3)
    batch = []
    for at, (prompt, response) in enumerate(LENGTHS):
        tokens = rng.integers(1, VOCAB, prompt + response)
        sampled = np.arange(response) % 4 != 2 if at % 3 == 1 else np.ones(response, bool)
        batch.append(
            make_rollout(
                f"r{at}",
                tokens[:prompt],
                tokens[prompt:],
                sampled=sampled,
                mask=sampled & (at != 6),
                logprobs=-6 + rng.normal(size=response),
                versions=np.arange(response) // 8,
            )
        )
    return batch


def _build(args: dict[str, Any]) -> Any:
    from verifier.model.provider_megatron import DataParallel, build

    return build(args["checkpoint"], Mesh(**args["mesh"]), dtype="float32", tier="cpu", data_parallel=DataParallel())


def _policy_loss(logprob_T: Any, entropy_T: Any, shard: Any) -> Any:
    """A clipped policy gradient with an entropy bonus: every label-aligned tensor of the pack takes part."""
    import torch

    engine_T = torch.where(shard.loss_mask_T, shard.engine_logprobs_T, logprob_T.detach())
    ratio_T = (logprob_T - engine_T).exp()
    advantage_T = 1.0 - 0.25 * shard.versions_T.float()
    clipped_T = ratio_T.clamp(0.8, 1.25)
    return -torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T) - 0.01 * entropy_T


def gradients(context: RankContext) -> dict[str, Any]:
    """Log-probabilities, loss, and the gradient of every parameter under its checkpoint name.

    The gradients are put where the weights are and leave through the export, so all meshes give them in one layout.
    """
    import torch
    from safetensors.torch import save_file

    from verifier.export.gather_megatron import export
    from verifier.megatron.step_megatron import backward, score

    built = _build(context.args)
    batch = rollouts()
    size = context.args["micro_batch_size"]
    scored = score(built, batch, micro_batch_size=size)
    done = backward(built, batch, loss=_policy_loss, micro_batch_size=size)
    with torch.no_grad():
        for chunk in built.chunks:
            for parameter in chunk.parameters():
                parameter.copy_(parameter.main_grad)
    exported = {name: tensor.clone() for name, tensor in export(built)}
    path = context.run_dir / f"gradients_{context.rank}.safetensors"
    save_file(exported, path)
    return {
        "scored": [row.tolist() for row in scored],
        "loss": done.loss,
        "num_tokens": done.num_tokens,
        "path": str(path),
    }


def logprob_over_ranks(context: RankContext) -> dict[str, Any]:
    """Values and gradients with the vocabulary split over all ranks, against the same on one."""
    import torch
    import torch.distributed as dist

    from verifier.megatron.vocab_logprob import vocab_parallel_logprob

    worst = {}
    for name, dtype in (("float64", torch.float64), ("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        generator = torch.Generator().manual_seed(5)
        num_rows, columns = 13, 7
        vocab = columns * context.world_size
        whole = (8 * torch.randn(num_rows, vocab, dtype=torch.float64, generator=generator)).to(dtype)
        labels = torch.randint(0, vocab, (num_rows,), generator=generator)
        labels[4] = -100
        mine = slice(context.rank * columns, (context.rank + 1) * columns)
        results = []
        for logits, start, group in ((whole[:, mine], mine.start, dist.group.WORLD), (whole, 0, None)):
            leaf = logits.clone().requires_grad_()
            logprob, entropy = vocab_parallel_logprob(
                leaf, labels, vocab_start=start, group=group, temperature=0.7, chunk_tokens=4
            )
            (logprob * torch.arange(num_rows) + entropy / 3).sum().backward()
            assert torch.equal(leaf.detach(), logits)
            results.append((logprob.detach(), entropy.detach(), leaf.grad))
        (logprob, entropy, grad), (whole_logprob, whole_entropy, whole_grad) = results
        worst[name] = [
            float((logprob - whole_logprob).abs().max()),
            float((entropy - whole_entropy).abs().max()),
            float((grad.double() - whole_grad[:, mine].double()).abs().max()),
        ]
    return worst


def label_outside(context: RankContext) -> str:
    """All ranks must refuse a label that no rank holds, and none may hang."""
    import torch
    import torch.distributed as dist

    from verifier.errors import ContractError
    from verifier.megatron.vocab_logprob import vocab_parallel_logprob

    labels = torch.tensor([0, 2 * context.world_size])
    try:
        vocab_parallel_logprob(torch.zeros(2, 2), labels, vocab_start=2 * context.rank, group=dist.group.WORLD)
    except ContractError as error:
        return str(error)
    return "accepted"


def megatron_slices(context: RankContext) -> list[list[int]]:
    """Rows that Megatron's own slicing gives this rank: over context parallelism, and over sequence parallelism."""
    import torch
    import torch.distributed as dist
    from megatron.core.tensor_parallel.mappings import _split_along_first_dim
    from megatron.core.utils import get_batch_on_this_cp_rank

    results = []
    world = dist.group.WORLD
    for ends in context.args["cu_seqlens_padded"]:
        rows = torch.arange(ends[-1])
        parts = [
            get_batch_on_this_cp_rank(
                {"tokens": rows[begin:end][None].clone(), "cu_seqlens": None}, is_hybrid_cp=False, cp_group=world
            )["tokens"][0]
            for begin, end in pairwise(ends)
        ]
        results.append(torch.cat(parts).tolist())
        results.append(_split_along_first_dim(rows, world).tolist())
    return results
