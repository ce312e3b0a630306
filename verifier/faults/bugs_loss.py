"""Bugs of the loss: what is summed, what it is divided by, and what its gradient reaches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import NO_ENGINE, Fault, Fired, Inject
from verifier.faults.inject import replaced
from verifier.mesh import Mesh

STEP = "verifier.train.step_megatron"
LOGPROB = "verifier.train.logprob:vocab_parallel_logprob"
LOGPROB_PARAMETERS = "logits_TV, labels_T, vocab_start, vocab_size, group, temperature, chunk_tokens, entropy"
DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"
CP2, DP2, TP2 = Mesh(cp=2), Mesh(dp=2), Mesh(tp=2)


def _scaled(change: Callable[[Any, Any, Any, int], tuple[Any, Any]]) -> Inject:
    """A fault of normalisation: (sum, tokens) of a micro-batch as `change` gives them.

    `change` gets the sum, the number of tokens, the shard and the number of micro-batches.
    """

    @contextlib.contextmanager
    def inject(fired: Fired) -> Iterator[None]:
        micro_batches: list[int] = [1]

        def count(original: Any) -> Any:
            def run(trainer: Any, forward: Any, shards: Any, **options: Any) -> Any:
                micro_batches[0] = len(shards)
                return original(trainer, forward, shards, **options)

            return run

        def make(original: Any) -> Any:
            def sum_loss(logprob_T: Any, entropy_T: Any, shard: Any, *, loss: Any) -> Any:
                fired()
                total, num_tokens, report = original(logprob_T, entropy_T, shard, loss=loss)
                return *change(total, num_tokens, shard, micro_batches[0]), report

            return sum_loss

        with (
            replaced(f"{STEP}:_run", "trainer, forward, shards, schedule_options", count),
            replaced(f"{STEP}:_sum_loss", "logprob_T, entropy_T, shard, loss", make),
        ):
            yield

    return inject


def _mean_of_means(total: Any, num_tokens: Any, shard: Any, micro_batches: int) -> Any:
    return total / num_tokens.clamp(min=1), num_tokens.clamp(max=1)


def _sampled_tokens(total: Any, num_tokens: Any, shard: Any, micro_batches: int) -> Any:
    return total, shard.sampled_T.sum().int()


def _report_of_first_rank(fired: Fired) -> Any:
    def make(original: Any) -> Any:
        def backward(*given: Any, **options: Any) -> Any:
            import torch.distributed as dist

            loss, num_tokens = original(*given, **options)
            if dist.get_rank() > 0:
                fired()
                loss = -1.0
            return loss, num_tokens

        return backward

    return replaced(f"{STEP}:backward", "trainer, rollouts, loss, micro_batch_size, temperature, on_shards", make)


@contextlib.contextmanager
def _target_without_gradient(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def logprob(logits_TV: Any, labels_T: Any, *, vocab_start: int = 0, **options: Any) -> Any:
            import torch

            fired()
            held_T = (labels_T >= vocab_start) & (labels_T < vocab_start + logits_TV.shape[1])
            logits_TV = torch.where(held_T[:, None], logits_TV, logits_TV.detach())
            return original(logits_TV, labels_T, vocab_start=vocab_start, **options)

        return logprob

    with replaced(LOGPROB, LOGPROB_PARAMETERS, make):
        yield


def _entropy_of_spoiled_logits(fired: Fired) -> Any:
    def make(original: Any) -> Any:
        def logprob(logits_TV: Any, labels_T: Any, *, entropy: bool = True, **options: Any) -> Any:
            logprob_T, entropy_T = original(logits_TV, labels_T, entropy=entropy, **options)
            if entropy:
                fired()
                top = logits_TV.detach().amax(-1, keepdim=True)
                _, entropy_T = original((logits_TV - top).exp(), labels_T, entropy=True, **options)
            return logprob_T, entropy_T

        return logprob

    return replaced(LOGPROB, LOGPROB_PARAMETERS, make)


def _summed_over_context_parallel(fired: Fired) -> Any:
    def make(original: Any) -> Any:
        def sum_loss(logprob_T: Any, entropy_T: Any, shard: Any, *, loss: Any) -> Any:
            fired()
            total, num_tokens, report = original(logprob_T, entropy_T, shard, loss=loss)
            return total, num_tokens, report * shard.alignment.cp

        return sum_loss

    return replaced(f"{STEP}:_sum_loss", "logprob_T, entropy_T, shard, loss", make)


def _summed_in_bfloat16(fired: Fired) -> Any:
    def make(original: Any) -> Any:
        def config(data_parallel: Any, tier: Any) -> Any:
            fired()
            found = original(data_parallel, tier)
            found.grad_reduce_in_fp32 = False
            return found

        return config

    return replaced("verifier.model.provider_megatron:_ddp_config", "data_parallel, tier", make)


@contextlib.contextmanager
def _experts_scaled(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def finalize(model: Any, config: Any, tp_group: Any = None) -> None:
            for chunk in model:
                for _, parameter in chunk.named_parameters():
                    if not getattr(parameter, "allreduce", True):
                        fired()
                        parameter.main_grad.mul_(config.expert_model_parallel_size)
            original(model, config, tp_group)

        return finalize

    target = "megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads"
    with replaced(target, "model, config, tp_group", make):
        yield


@contextlib.contextmanager
def _earlier_micro_batches_dropped(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def hook_of(self: Any, param: Any) -> Any:
            add = original(self, param)

            def hook(*unused: Any) -> None:
                if self.param_to_bucket_group[param].intra_distributed_optimizer_instance_size > 1:
                    fired()
                    param.main_grad.zero_()
                add(*unused)

            return hook

        return hook_of

    with replaced(f"{DDP}._make_backward_post_hook", "self, param", make):
        yield


def _accumulation_unannounced(fired: Fired) -> Any:
    def make(original: Any) -> Any:
        def connect(chunks: Any, data_parallel: Any) -> None:
            from megatron.core.utils import get_model_config

            fired()
            original(chunks, data_parallel)
            get_model_config(chunks[0]).no_sync_func = None

        return connect

    return replaced("verifier.model.provider_megatron:_connect", "chunks, data_parallel", make)


def _boundaries_lost_when_recomputed(fired: Fired) -> Any:
    def make(original: Any) -> Any:
        def forward(self: Any, *, packed_seq_params: Any, **options: Any) -> Any:
            fired()
            unknown = replace(packed_seq_params, total_tokens=None, seq_idx=None)
            return original(self, packed_seq_params=unknown, **options)

        return forward

    return replaced(
        "megatron.core.models.hybrid.hybrid_block:checkpointed_forward",
        "self, hidden_states, attention_mask, context, context_mask, rotary_pos_emb, attention_bias, "
        "packed_seq_params, use_inner_quantization_context, padding_mask, extract_layer_indices, layer_offset",
        make,
    )


def _fault(
    name: str,
    reproduces: str,
    summary: str,
    inject: Inject,
    mesh: Mesh = CP2,
    *,
    caught_by: str = "LSS001",
    dtype: str = "float32",
    model: str = "tiny:qwen3",
) -> Fault:
    return Fault(
        id=name, stage=Stage.LOSS, reproduces=reproduces, summary=summary, caught_by=(caught_by,), inject=inject,
        model=model, mesh=mesh, engine=NO_ENGINE, dtype=dtype,
    )  # fmt: skip


FAULTS = (
    _fault(
        "expert-gradients-times-expert-parallel",
        "deepspeedai/DeepSpeed#5259",
        "experts' gradients are divided by the ranks that share an expert, and so come out as many times too long as "
        "there are ranks of experts; in bf16, whose router flips",
        _experts_scaled,
        Mesh(ep=2, dp=2),
        dtype="bfloat16",
        model="tiny:qwen3-moe",
    ),
    _fault(
        "earlier-micro-batches-dropped",
        "NVIDIA/Megatron-LM#7186",
        "every micro-batch is taken for the last one of its step, and clears what those before it left in the gradient",
        _earlier_micro_batches_dropped,
        DP2,
    ),
    _fault(
        "reduced-before-the-last-micro-batch",
        "NovaSky-AI/SkyRL#2146",
        "ranks are not told that micro-batches follow: they count as many as the first step had, and then reduce",
        _accumulation_unannounced,
        DP2,
    ),
    _fault(
        "boundaries-lost-when-recomputed",
        "fla-org/flash-linear-attention#422",
        "layers that are recomputed are not told where samples of a pack begin; in passes that only score they are",
        _boundaries_lost_when_recomputed,
        Mesh(),
        model="tiny:nemotron-h",
    ),
    _fault(
        "entropy-of-spoiled-logits",
        "verl-project/verl#2484",
        "the entropy is taken of logits that the log-probabilities before it have overwritten with their exponentials",
        _entropy_of_spoiled_logits,
    ),
    _fault(
        "report-summed-over-context-parallel",
        "NovaSky-AI/SkyRL#1420",
        "what a step reports is summed over context-parallel ranks twice; its gradients are right",
        _summed_over_context_parallel,
        caught_by="LSS002",
    ),
    _fault(
        "report-of-one-rank-only",
        "pytorch/torchtitan#1232",
        "the loss that a step reports is right on one rank, and -1 on the others",
        _report_of_first_rank,
        caught_by="LSS002",
    ),
    _fault(
        "divided-by-tokens-left-out",
        "huggingface/trl#6369",
        "the sum is of the tokens in the loss, and it is divided by all that were sampled",
        _scaled(_sampled_tokens),
    ),
    _fault(
        "gradients-summed-in-bf16",
        "deepspeedai/DeepSpeed#1800",
        "gradients of micro-batches and ranks are summed in the model's bf16",
        _summed_in_bfloat16,
        dtype="bfloat16",
    ),
    _fault(
        "loss-times-context-parallel",
        "NovaSky-AI/SkyRL#1751",
        "the loss is multiplied by the context-parallel size, which the schedule accounts for already",
        _scaled(lambda total, num_tokens, shard, micro_batches: (total * shard.alignment.cp, num_tokens)),
    ),
    _fault(
        "mean-of-means",
        "NovaSky-AI/SkyRL#1296",
        "the loss is a mean over micro-batches of means over tokens, so tokens of short samples weigh more",
        _scaled(_mean_of_means),
    ),
    _fault(
        "divided-by-micro-batches",
        "areal-project/AReaL#1273",
        "a loss that is normalised over the whole batch is divided by the number of micro-batches once more",
        _scaled(lambda total, num_tokens, shard, micro_batches: (total / micro_batches, num_tokens)),
    ),
    _fault(
        "scaled-per-token-and-per-batch",
        "THUDM/slime#987",
        "a loss per token is scaled by the share of the micro-batch in the batch as well",
        _scaled(
            lambda total, num_tokens, shard, micro_batches: (
                total * micro_batches / max(1, len(shard.ids) * micro_batches),
                num_tokens,
            )
        ),
    ),
    _fault(
        "logprob-gradient-in-owner-only",
        "modelscope/ms-swift#9947",
        "the sum over vocabulary shards has no backward: right values, no gradient where the label lies elsewhere",
        _target_without_gradient,
        TP2,
    ),
)
