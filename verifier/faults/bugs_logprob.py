"""Bugs of the trainer's forward pass and of its log-probabilities."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import NO_ENGINE, Fault, Fired, Inject
from verifier.faults.inject import replaced
from verifier.mesh import Mesh

STEP = "verifier.train.step_megatron"
LOGPROB = "verifier.train.logprob:vocab_parallel_logprob"
LOGPROB_PARAMETERS = "logits_TV, labels_T, vocab_start, vocab_size, group, temperature, chunk_tokens, entropy"
ROPE = "megatron.core.models.common.embeddings.rope_utils:_get_thd_freqs_on_this_cp_rank"
PACKED_FIELDS = (
    "qkv_format, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, "
    "local_cp_size, cp_group, total_tokens, seq_idx, tokens_per_sample, pad_between_seqs"
)
CP2 = Mesh(cp=2)
SCAN_CHUNK = 128
"""Rows of a sequence that a state-space scan takes at a time."""


def _when_scoring(change: Callable[[Any, Any, dict[str, Any]], tuple[Any, Any, dict[str, Any]]]) -> Inject:
    """A fault of the passes that only score: logits, labels and options as `change` gives them."""

    def inject(fired: Fired) -> Any:
        def make(original: Any) -> Any:
            def logprob(logits_TV: Any, labels_T: Any, **options: Any) -> Any:
                import torch

                if not torch.is_grad_enabled():
                    fired()
                    logits_TV, labels_T, options = change(logits_TV, labels_T, options)
                return original(logits_TV, labels_T, **options)

            return logprob

        return replaced(LOGPROB, LOGPROB_PARAMETERS, make)

    return inject


def _sampling_temperature(logits_TV: Any, labels_T: Any, options: dict[str, Any]) -> Any:
    return logits_TV, labels_T, {**options, "temperature": 0.6}


def _softmax_in_place(logits_TV: Any, labels_T: Any, options: dict[str, Any]) -> Any:
    logits_TV.sub_(logits_TV.amax(-1, keepdim=True)).exp_()
    return logits_TV, labels_T, options


def _top_token(logits_TV: Any, labels_T: Any, options: dict[str, Any]) -> Any:
    import torch

    return logits_TV, torch.where(labels_T >= 0, logits_TV.argmax(-1), labels_T), options


def _without_temperature(fired: Fired) -> Any:
    def make(original: Any) -> Any:
        def logprob(logits_TV: Any, labels_T: Any, **options: Any) -> Any:
            if options["temperature"] != 1.0:
                fired()
            return original(logits_TV, labels_T, **{**options, "temperature": 1.0})

        return logprob

    return replaced(LOGPROB, LOGPROB_PARAMETERS, make)


@contextlib.contextmanager
def _state_lost_between_chunks(fired: Fired) -> Iterator[None]:
    import torch

    def make(original: Any) -> Any:
        def scan(z_BLI: Any, xbc_BLC: Any, dt_BLH: Any, *rest: Any, groups: int) -> Any:
            parts = [value.split(SCAN_CHUNK, dim=1) for value in (z_BLI, xbc_BLC, dt_BLH)]
            if len(parts[0]) > 1:
                fired()
            return torch.cat([original(*part, *rest, groups=groups) for part in zip(*parts, strict=True)], dim=1)

        return scan

    with replaced(
        "verifier.platform.cpu_mamba:_scan",
        "z_BLI, xbc_BLC, dt_BLH, weight_CW, bias_C, dt_bias_H, A_H, D_H, groups",
        make,
    ):
        yield


@contextlib.contextmanager
def _scores_shifted(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def score(trainer: Any, rollouts: Any, **options: Any) -> Any:
            fired()
            return [row.roll(-1) for row in original(trainer, rollouts, **options)]

        return score

    with replaced(f"{STEP}:score", "trainer, rollouts, micro_batch_size, temperature, on_shards, on_chunk", make):
        yield


@contextlib.contextmanager
def _local_positions(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def frequencies(cp_rank: int, cp_size: int, x: Any, freqs: Any, offset: int = 0) -> Any:
            fired()
            return freqs[offset : offset + x.size(0)]

        return frequencies

    with replaced(ROPE, "cp_rank, cp_size, x, freqs, offset", make):
        yield


@contextlib.contextmanager
def _one_sequence(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def packed(**fields: Any) -> Any:
            fired()
            ends = fields["cu_seqlens_q_padded"][[0, -1]]
            whole = int(ends[-1])
            fields |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), ends)
            fields |= dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), ends)
            return original(**{**fields, "max_seqlen_q": whole, "max_seqlen_kv": whole})

        return packed

    with replaced("megatron.core.packed_seq_params:PackedSeqParams", PACKED_FIELDS, make):
        yield


@contextlib.contextmanager
def _state_never_reset(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def packed(**fields: Any) -> Any:
            fired()
            return original(**{**fields, "total_tokens": None})

        return packed

    with replaced("megatron.core.packed_seq_params:PackedSeqParams", PACKED_FIELDS, make):
        yield


@contextlib.contextmanager
def _never_in_evaluation(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        @contextlib.contextmanager
        def mode(trainer: Any, *, training: bool) -> Iterator[None]:
            layers = [
                module for chunk in trainer.chunks for module in chunk.modules() if hasattr(module, "hidden_dropout")
            ]
            with original(trainer, training=True):
                if not training:
                    fired()
                    for layer in layers:
                        layer.hidden_dropout = 0.1
                try:
                    yield
                finally:
                    for layer in layers:
                        layer.hidden_dropout = 0.0

        return mode

    with replaced(f"{STEP}:_mode", "trainer, training", make):
        yield


@contextlib.contextmanager
def _gates_not_normalised(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def route(logits: Any, topk: int, *rest: Any, **options: Any) -> Any:
            fired()
            return original(logits, topk, *rest, **{**options, "use_pre_softmax": True})

        return route

    with replaced(
        "megatron.core.transformer.moe.router:topk_routing_with_score_function",
        "logits, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias, fused, "
        "router_replay, dense_output, precomputed_indices",
        make,
    ):
        yield


@contextlib.contextmanager
def _gather_taken_for_done(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def finish(self: Any, skip_next_bucket_dispatch: bool = False) -> None:
            if not self.param_gather_dispatched:
                fired()
                self.param_gather_dispatched = True
            original(self, skip_next_bucket_dispatch)

        return finish

    target = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.finish_param_sync"
    with replaced(target, "self, skip_next_bucket_dispatch", make):
        yield


@contextlib.contextmanager
def _rounded_to_bf16(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def logprob(logits_TV: Any, labels_T: Any, **options: Any) -> Any:
            fired()
            logprob_T, entropy_T = original(logits_TV, labels_T, **options)
            return logprob_T.to(logits_TV.dtype).to(logprob_T.dtype), entropy_T

        return logprob

    with replaced(LOGPROB, LOGPROB_PARAMETERS, make):
        yield


@contextlib.contextmanager
def _frequencies_rounded(fired: Fired) -> Iterator[None]:
    import torch

    def make(original: Any) -> Any:
        def frequencies(self: Any, max_seq_len: int, offset: int = 0) -> Any:
            fired()
            exact, self.inv_freq = self.inv_freq, self.inv_freq.to(torch.bfloat16).to(self.inv_freq.dtype)
            try:
                return original(self, max_seq_len, offset)
            finally:
                self.inv_freq = exact

        return frequencies

    with replaced(
        "megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.get_freqs_non_repeated",
        "self, max_seq_len, offset",
        make,
    ):
        yield


def _fault(
    name: str,
    reproduces: str,
    summary: str,
    inject: Inject,
    mesh: Mesh = CP2,
    model: str = "tiny:qwen3",
    dtype: str = "float32",
) -> Fault:
    return Fault(
        id=name, stage=Stage.LOGPROB, reproduces=reproduces, summary=summary, caught_by=("LGP001",), inject=inject,
        model=model, mesh=mesh, engine=NO_ENGINE, dtype=dtype,
    )  # fmt: skip


FAULTS = (
    _fault(
        "forward-before-param-gather",
        "NVIDIA/Megatron-LM#950",
        "a module runs before its weights are gathered from the ranks that stepped them, and uses those of last step",
        _gather_taken_for_done,
        Mesh(dp=2),
    ),
    _fault(
        "logprobs-rounded-to-bf16",
        "OpenRLHF/OpenRLHF#634",
        "log-probabilities are kept in the model's bf16: each is off by less than bf16 itself makes it",
        _rounded_to_bf16,
        Mesh(tp=2),
        dtype="bfloat16",
    ),
    _fault(
        "frequencies-rounded-with-the-model",
        "huggingface/transformers#25681",
        "rotary frequencies are cast to bf16 with the model: angles are off by more at each position",
        _frequencies_rounded,
        Mesh(),
        dtype="bfloat16",
    ),
    _fault(
        "temperature-not-applied",
        "huggingface/trl#3029",
        "the trainer computes log-probabilities at temperature 1, whatever the rollouts were sampled at",
        _without_temperature,
    ),
    _fault(
        "state-lost-between-chunks",
        "huggingface/transformers#47246",
        "a state-space scan hands nothing on from one chunk of 128 rows to the next: only long sequences show it",
        _state_lost_between_chunks,
        Mesh(),
        "tiny:nemotron-h",
    ),
    _fault(
        "scored-at-another-temperature",
        "THUDM/slime#2085",
        "a pass that only scores divides the logits by another temperature than the one asked for",
        _when_scoring(_sampling_temperature),
    ),
    _fault(
        "logits-modified-in-place",
        "verl-project/verl#1672",
        "the softmax for the entropy is taken in place, and the log-probabilities after it read what it left",
        _when_scoring(_softmax_in_place),
    ),
    _fault(
        "top-token-scored",
        "NVIDIA-NeMo/RL#3297",
        "the log-probability is that of the likeliest token, not of the one that was sampled",
        _when_scoring(_top_token),
    ),
    _fault(
        "scores-shifted-by-one",
        "PrimeIntellect-ai/prime-rl#1525",
        "log-probabilities are handed back one token early after a shift of labels moved into the model",
        _scores_shifted,
    ),
    _fault(
        "local-positions",
        "PrimeIntellect-ai/prime-rl#2392",
        "positions are counted within a context-parallel rank's own rows",
        _local_positions,
    ),
    _fault(
        "samples-not-told-apart",
        "NovaSky-AI/SkyRL#2056",
        "the model is not told where samples of a pack begin, so each sees the ones before it",
        _one_sequence,
    ),
    _fault(
        "state-crosses-sequences",
        "NVIDIA-NeMo/RL#2529",
        "state-space layers are not told where samples of a pack begin, and hand their state on from one to the next",
        _state_never_reset,
        Mesh(),
        "tiny:nemotron-h",
    ),
    _fault(
        "dropout-while-scoring",
        "verl-project/verl#4708",
        "modules stay in training mode while they score, and drop out",
        _never_in_evaluation,
    ),
    _fault(
        "gates-not-normalised",
        "pytorch/torchtitan#1448",
        "gate weights of the chosen experts are left as the softmax over all experts has them, not brought to sum 1",
        _gates_not_normalised,
        Mesh(cp=2, ep=2),
        "tiny:qwen3-moe",
    ),
)
