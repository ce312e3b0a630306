"""What test_second_trainer.py runs on trainer ranks: weights and gradients of every update, written beside a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.dist.train_parity_functions import exported_gradients
from verifier.launch.rank import RankContext
from verifier.trainer.ranks import WorkerSpec


@contextmanager
def captured(spec: WorkerSpec, context: RankContext, folder: str) -> Iterator[None]:
    """Write the weights before each update, and its gradients before clipping, under their checkpoint names."""
    from safetensors.torch import save_file

    from verifier.export.gather_megatron import export
    from verifier.megatron import step_megatron

    take, count = step_megatron.train_step, 0

    def keep(kind: str, tensors: dict[str, Any]) -> None:
        if context.rank == 0:
            path = Path(folder) / f"{kind} {count}.safetensors"
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)

    def watched(trainer: Any, *arguments: Any, on_gradients: Callable[[], None] | None = None, **more: Any) -> Any:
        nonlocal count
        count += 1
        keep("weights", {name: tensor.clone() for name, tensor in export(trainer)})

        def both() -> None:
            keep("gradients", exported_gradients(trainer))
            if on_gradients is not None:
                on_gradients()

        return take(trainer, *arguments, on_gradients=both, **more)

    step_megatron.train_step = watched
    try:
        yield
    finally:
        step_megatron.train_step = take
