"""Probe of a forward pass's arguments: what each model chunk of a rank is told of a packed micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from verifier.core.record import Probe
from verifier.model.provider_megatron import TrainerModel
from verifier.stages.logprob.records import GivenArguments

_TENSORS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
_NUMBERS = ("max_seqlen_q", "max_seqlen_kv", "total_tokens", "pad_between_seqs")


@contextlib.contextmanager
def given_arguments(probe: Probe, trainer: TrainerModel, name: str, version: int) -> Iterator[None]:
    """Record what every chunk is given for each micro-batch of a pass, once the pass is over: nothing waits for a copy.

    Args:
        probe: this rank's recorder.
        trainer: the model.
        name: of the pass, as its packs have it.
        version: of the weights.
    """
    seen: list[tuple[int, Any, torch.Tensor]] = []
    with contextlib.ExitStack() as stack:
        for number, chunk in enumerate(trainer.chunks):

            def look(_: object, __: object, given: dict[str, Any], number: int = number) -> None:
                seen.append((number, given["packed_seq_params"], given["input_ids"]))

            stack.callback(chunk.register_forward_pre_hook(look, with_kwargs=True).remove)
        yield
    counts = dict.fromkeys(range(len(trainer.chunks)), 0)
    for number, packed, tokens in seen:
        lengths = {key: _ints(getattr(packed, key)) for key in _TENSORS}
        hints = {key: getattr(packed, key) for key in _NUMBERS if hasattr(packed, key)}
        where = f"{name} micro-batch {counts[number]}"
        probe.emit(
            GivenArguments(
                name=where, version=version, chunk=number, num_rows=tokens.shape[1],
                lacks=tuple(key for key in _NUMBERS if key not in hints), **lengths,
                **{key: None if value is None else int(value) for key, value in hints.items()},
            )
        )  # fmt: skip
        counts[number] += 1


def _ints(values: torch.Tensor | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values.tolist())
