"""The sender of a process: what goes to a weight transfer is planned, held to its plan, and passes unchanged.

It stands around the iterator that a sender draws from, so vLLM's "nccl" and "ipc" engines, files, or a transport of the
trainer's own take it alike. The plan of the first transfer is the plan of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from verifier.core.record import Record
from verifier.errors import ContractError, UsageError
from verifier.plan.chunk_plan import MAX_GPU_CHUNK_BYTES, ChunkPlan, TensorMeta, build_plan, chunk_bytes_of
from verifier.stages.plan.records import PlanDigest, PlannedTensor
from verifier.stages.transport.records import Handover

Pairs = Iterable[tuple[str, Any]]


class Sender:
    """Transfers of one process.

    Args:
        emit: takes records of the process.
        is_first: whether this is rank 0, which records what the plan names.
    """

    def __init__(self, emit: Callable[[Record], None], *, is_first: bool) -> None:
        self._emit, self._is_first = emit, is_first
        self._plan: ChunkPlan | None = None
        self._metas: tuple[TensorMeta, ...] = ()
        self._passed: dict[int, int] = {}

    def begin(self, version: int, given: Sequence[TensorMeta] | None, told: Any = None) -> None:
        """Plan a transfer, before anything of it passes.

        Args:
            version: of the weights.
            given: the tensors in their order, where they are known before they pass.
            told: what the receivers are told of them; see `told_of`.

        Raises:
            ContractError: a plan that cannot be, or another one than before or than the receivers were told.
            UsageError: `told` lacks a column.
        """
        said = told_of(told) if told is not None else None
        self._passed[version] = 0
        try:
            first = said if said is not None else given
            if first is not None:
                self._hold_plan(first, version)
            elif self._plan is not None:
                self._emit_digest(self._plan, version)
            for place, meta in enumerate(given or ()):
                self._hold(meta, place)
            if given is not None:
                self._hold_count(len(given))
        except ContractError as problem:
            self._end(version, str(problem))
            raise

    def held(self, pairs: Pairs) -> Iterator[tuple[str, Any]]:
        """A stream, each tensor held to the plan, if there is one yet, before it passes."""
        count = 0
        for count, (name, tensor) in enumerate(pairs, 1):
            if self._plan is not None:
                self._hold(meta_of(name, tensor), count - 1)
            yield name, tensor
        self._hold_count(count)

    def passing(self, pairs: Pairs, version: int) -> Iterator[tuple[str, Any]]:
        """The pairs as they pass to the sender, and the end of the transfer.

        Raises:
            ContractError: the stream departs from the plan; the tensor that does so is not passed.
        """
        seen: list[TensorMeta] = []
        try:
            for name, tensor in pairs:
                self._passed[version] = len(seen) + 1
                seen.append(meta_of(name, tensor))
                yield name, tensor
            if self._plan is None:
                self._hold_plan(seen, version)
        except GeneratorExit:
            self._leave(version)
            raise
        except BaseException as error:
            self._end(version, str(error) if isinstance(error, ContractError) else f"{type(error).__name__}: {error}")
            raise
        self._end(version)

    def flush(self) -> None:
        """Record transfers that did not come to their end."""
        for version in [*self._passed]:
            self._leave(version)

    def _leave(self, version: int) -> None:
        count, total = self._passed.get(version, 0), len(self._metas)
        of_all = f" of {total}" if total else ""
        self._end(version, "" if count and count == total else f"the sender stopped after {count}{of_all} tensors")

    def _end(self, version: int, refused: str = "") -> None:
        if self._passed.pop(version, None) is not None:
            self._emit(Handover(name=f"transfer of version {version}", version=version, refused=refused))

    def _hold_plan(self, metas: Sequence[TensorMeta], version: int) -> None:
        """Take the first plan; hold later ones to it."""
        plan = build_plan(metas, chunk_bytes=chunk_bytes_of(sum(meta.num_bytes for meta in metas), MAX_GPU_CHUNK_BYTES))
        self._emit_digest(plan, version)
        if self._plan is None:
            self._plan, self._metas = plan, tuple(metas)
            for meta in metas if self._is_first else ():
                self._emit(PlannedTensor(name=meta.name, version=version, dtype=meta.dtype, shape=meta.shape))
        elif plan.digest != self._plan.digest:
            for place, meta in enumerate(metas):
                self._hold(meta, place)
            self._hold_count(len(metas))

    def _emit_digest(self, plan: ChunkPlan, version: int) -> None:
        record = PlanDigest(
            name="chunk plan", version=version, digest=plan.digest, num_chunks=len(plan.chunks),
            num_tensors=sum(len(chunk.names) for chunk in plan.chunks),
        )  # fmt: skip
        self._emit(record)

    def _hold(self, meta: TensorMeta, place: int) -> None:
        if place >= len(self._metas):
            raise ContractError(f"`{meta.name}` comes after the last of {len(self._metas)} planned tensors")
        planned = self._metas[place]
        if meta != planned:
            raise ContractError(f"tensor {place} is {_said(meta)}, the plan has {_said(planned)} there")

    def _hold_count(self, count: int) -> None:
        if count < len(self._metas):
            raise ContractError(
                f"{count} tensors came, the plan has {len(self._metas)}: next {_said(self._metas[count])}"
            )


def told_of(told: Any) -> tuple[TensorMeta, ...]:
    """Tensors that receivers are told of, by the columns of vLLM's update_info: names, dtype_names, shapes.

    Raises:
        UsageError: a column is absent, or they are of different lengths.
    """
    columns = told if isinstance(told, Mapping) else vars(told)
    names, dtypes, shapes = (columns.get(key) for key in ("names", "dtype_names", "shapes"))
    if names is None or dtypes is None or shapes is None or not len(names) == len(dtypes) == len(shapes):
        raise UsageError(
            "`told` has names, dtype_names and shapes, one of each for every tensor, as vLLM's update_info"
        )
    return tuple(
        TensorMeta(name=name, dtype=str(dtype), shape=tuple(map(int, shape)))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    )


def meta_of(name: str, tensor: Any) -> TensorMeta:
    """Name, dtype and shape of a tensor."""
    from verifier.plan.digest import dtype_name

    return TensorMeta(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))


def _said(meta: TensorMeta) -> str:
    return f"`{meta.name}` {meta.dtype} {list(meta.shape)}"
