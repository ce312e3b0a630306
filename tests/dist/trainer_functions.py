"""What test_trainer_*.py runs on ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from verifier.data.rollout import Rollout, make_rollout
from verifier.launch.rank import RankContext
from verifier.mesh import Mesh

VOCAB = 512


def preload() -> None:
    """The CPU tier, whatever the machine has."""
    from verifier.runs import session_megatron

    session_megatron.preload("cpu")


def rollouts(seed: int = 0, num: int = 8, shortest: int = 16, longest: int = 48) -> list[Rollout]:
    """Seeded token sequences, all in the loss but for their first; without token 0, which padding rows hold."""
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(1, VOCAB, int(rng.integers(shortest, longest + 1))) for _ in range(num)]
    return [make_rollout(f"sequence {at}", tokens[:1], tokens[1:]) for at, tokens in enumerate(sequences)]


def _build(args: Mapping[str, Any]) -> Any:
    from verifier.model.provider_megatron import DataParallel, build

    return build(
        args["checkpoint"],
        Mesh(**args.get("mesh", {})),
        dtype=args.get("dtype", "float32"),
        tier="cpu",
        data_parallel=DataParallel(**args.get("data_parallel", {})),
        overrides=args.get("overrides", {}),
        fixes=args.get("fixes", ()),
    )


def _digests(exported: Iterator[tuple[str, Any]]) -> dict[str, str]:
    from verifier.plan.digest import digest_tensor

    return {name: f"{tensor.dtype} {list(tensor.shape)} {digest_tensor(tensor)}" for name, tensor in exported}


def oracle(context: RankContext) -> list[list[float]]:
    """Log-probabilities by transformers, float32 weights, float64 softmax."""
    import torch
    from transformers import AutoModelForCausalLM

    path = context.args["checkpoint"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    scored = []
    with torch.no_grad():
        for rollout in rollouts():
            tokens = torch.from_numpy(rollout.tokens)[None]
            logprobs = model(tokens).logits[0].double().log_softmax(-1)
            scored.append(logprobs[:-1].gather(-1, tokens[0, 1:, None])[:, 0].tolist())
    return scored


def trainer(context: RankContext) -> dict[str, Any]:
    """Load, score, export, train three steps, export again."""
    from verifier.export.gather_megatron import export
    from verifier.megatron.optimizer_megatron import make_optimizer
    from verifier.megatron.step_megatron import score, train_step

    built = _build(context.args)
    scored = score(built, rollouts())
    exported = _digests(export(built))
    optimizer = make_optimizer(built, learning_rate=1e-3)
    steps = [train_step(built, optimizer, rollouts()) for _ in range(3)]
    moved = {name: float(tensor.double().norm()) for name, tensor in export(built)}
    return {
        "scored": [row.tolist() for row in scored],
        "exported": exported,
        "steps": [[step.loss, step.grad_norm, step.num_tokens] for step in steps],
        "moved": moved,
    }


def score_only(context: RankContext) -> list[list[float]]:
    """Log-probabilities of one group of rollouts, packed together; token 0 embeds as NaN if asked for."""
    import torch

    from verifier.megatron.step_megatron import score

    built = _build(context.args)
    if context.args.get("poison_padding"):
        with torch.no_grad():
            for chunk in built.chunks:
                for name, parameter in chunk.named_parameters():
                    if name.endswith("word_embeddings.weight") and context.rank % built.mesh.tp == 0:
                        parameter[0] = torch.nan
    batch = rollouts(num=4)
    if context.args.get("perturb") is not None:
        other = rollouts(seed=99, num=1)[0].tokens
        at = context.args["perturb"]
        length = len(batch[at])
        tokens = np.resize(other, length)
        batch[at] = make_rollout(batch[at].id, tokens[:1], tokens[1:])
    return [row.tolist() for row in score(built, batch, micro_batch_size=4)]


def gradients(context: RankContext) -> None:
    """Per-parameter gradients, exported in the weights' place, into rank 0's file."""
    from safetensors.torch import save_file

    from verifier.export.gather_megatron import export
    from verifier.megatron.step_megatron import backward

    built = _build(context.args)
    backward(built, rollouts(), micro_batch_size=context.args.get("micro_batch_size", 4))
    for chunk in built.chunks:
        for parameter in chunk.parameters():
            parameter.data = parameter.main_grad
    score_bias = "e_score_correction_bias"  # a buffer, which has no gradient
    exported = {name: tensor.clone().contiguous() for name, tensor in export(built) if not name.endswith(score_bias)}
    if context.rank == 0:
        save_file(exported, context.args["file"])


def oracle_gradients(context: RankContext) -> None:
    """The same by transformers, in float64."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    path = context.args["checkpoint"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    batch = rollouts()
    for rollout in batch:
        tokens = torch.from_numpy(rollout.tokens)[None]
        logprobs = model(tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])
        (-logprobs.sum() / sum(rollout.mask.sum() for rollout in batch)).backward()
    save_file({name: parameter.grad for name, parameter in model.named_parameters()}, context.args["file"])


def idle(context: RankContext) -> dict[str, Any]:
    """Digests before and after a step of learning rate 0, scoring, and a second export."""
    from verifier.export.gather_megatron import export
    from verifier.megatron.optimizer_megatron import make_optimizer
    from verifier.megatron.step_megatron import score, train_step

    built = _build(context.args)
    before = _digests(export(built))
    optimizer = make_optimizer(built, learning_rate=1e-3)
    train_step(built, optimizer, rollouts(), learning_rate=0.0)
    score(built, rollouts())
    return {"before": before, "after": _digests(export(built))}


def stale(context: RankContext) -> dict[str, Any]:
    """An export after a step, and the same without waiting for the parameters that are still to be gathered."""
    from verifier.export.gather_megatron import export
    from verifier.megatron.optimizer_megatron import make_optimizer
    from verifier.megatron.step_megatron import score, train_step

    built = _build(context.args)
    before = _digests(export(built))
    train_step(built, make_optimizer(built, learning_rate=1e-3), rollouts())
    naive = _digests(built.bridge.export_hf_weights(built.chunks, cpu=True, show_progress=False))
    synced = _digests(export(built))
    score(built, rollouts())
    return {"before": before, "naive": naive, "synced": synced, "settled": _digests(export(built))}


def steps_of_equal_lengths(context: RankContext) -> list[list[float]]:
    """Loss and gradient norm of three steps on sequences of one length."""
    from verifier.megatron.optimizer_megatron import make_optimizer
    from verifier.megatron.step_megatron import train_step

    built = _build(context.args)
    optimizer = make_optimizer(built, learning_rate=1e-3)
    batch = rollouts(shortest=32, longest=32)
    steps = [train_step(built, optimizer, batch, micro_batch_size=2) for _ in range(3)]
    return [[step.loss, step.grad_norm] for step in steps]


def stepped(context: RankContext) -> dict[str, str]:
    """An export after three steps, with an optimizer made anew before the second and the third if asked for."""
    from verifier.export.gather_megatron import export
    from verifier.runs.scenario import MICRO_BATCH, RULE
    from verifier.runs.steps_megatron import Steps

    built = _build(context.args)
    steps = Steps(built, RULE, MICRO_BATCH)
    for at in range(3):
        if at and context.args["resume"]:
            folder = context.run_dir / f"stopped-{at}"
            folder.mkdir(exist_ok=True)
            steps.resume(folder)
        steps.take(rollouts())
    return _digests(export(built))


def states_of_a_save(context: RankContext) -> dict[str, Any]:
    """States of the optimizer in a save, as they are and as megatron-core gathers them, and how many are copies."""
    from contextlib import nullcontext
    from unittest import mock

    from verifier.megatron import checkpoint_megatron
    from verifier.megatron.optimizer_megatron import make_optimizer, make_scheduler
    from verifier.megatron.step_megatron import train_step
    from verifier.runs.scenario import RULE

    built = _build(context.args)
    optimizer = make_optimizer(built, rule=RULE)
    scheduler = make_scheduler(optimizer, RULE)
    train_step(built, optimizer, rollouts(), scheduler=scheduler)
    own = {
        value.data_ptr() for part in optimizer.chained_optimizers for state in part.optimizer.state.values()
        for key, value in state.items() if key != "step"
    }  # fmt: skip

    def states() -> tuple[dict[str, str], int]:
        parts = checkpoint_megatron._sharded_state(built, optimizer, scheduler)["optimizer"]
        parts = [parts] if "param_state" in parts else [part for part in parts.values() if "param_state" in part]
        items = [item for part in parts for tensors in part["param_state"].values() for item in tensors.values()]
        named = ((f"{item.key} {getattr(item, 'global_offset', None)}", item.data) for item in items)
        copied = sum(".exp_avg" in item.key and item.data.data_ptr() not in own for item in items)
        return _digests(named), copied

    in_place = states()
    with mock.patch.object(checkpoint_megatron, "_states_in_place", return_value=nullcontext()):
        return {"in place": in_place, "gathered": states()}


def rebuilt(context: RankContext) -> list[list[list[float]]]:
    """Several meshes, one after another, in the same processes."""
    from verifier.megatron.step_megatron import score
    from verifier.model.provider_megatron import teardown

    results = []
    for mesh in context.args["meshes"]:
        built = _build({**context.args, "mesh": mesh})
        results.append([row.tolist() for row in score(built, rollouts())])
        teardown()
    return results
