"""Content digest of tensors on whatever device they are: `digest_definition.py` says what it is."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from verifier.errors import ContractError
from verifier.plan.digest_definition import PREFIX, finish, finish_all

if TYPE_CHECKING:
    import torch


def digest_tensor(tensor: torch.Tensor | np.ndarray) -> str:
    """Return the digest of one tensor's bytes in row-major order, "vd1:" and 32 hex digits; see `digest_tensors`."""
    return digest_tensors([tensor])[0]


def digest_tensors(tensors: Iterable[torch.Tensor | np.ndarray]) -> list[str]:
    """Return the digests of many tensors, in order; a GPU takes one kernel and one copy for all of them.

    Args:
        tensors: strided, with storage; any dtype, any devices; a non-contiguous one is copied first. Or arrays.

    Raises:
        ContractError: a tensor has no bytes of its own (meta or sparse).
    """
    data = [raw_bytes(tensor) for tensor in tensors]
    found: dict[int, str] = {}
    devices = [None if isinstance(item, np.ndarray) else item.device for item in data]
    for device in {*devices}:
        places = [place for place, own in enumerate(devices) if own == device]
        found |= zip(places, _digests_of([data[place] for place in places]), strict=True)
    return [found[place] for place in range(len(data))]


def described(tensor: torch.Tensor | np.ndarray, digest: str = "") -> dict[str, Any]:
    """Digest of a tensor, if it is not known yet, with its dtype's name and its shape."""
    return {"digest": digest or digest_tensor(tensor), "dtype": dtype_name(tensor.dtype), "shape": tuple(tensor.shape)}


def dtype_name(dtype: torch.dtype | np.dtype[Any]) -> str:
    """Return the name of a dtype without prefix, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def raw_bytes(tensor: Any) -> Any:
    """Return the tensor's bytes as a contiguous uint8 vector [num_bytes] on its device; a view wherever possible.

    Raises:
        ContractError: the tensor has no bytes of its own (meta or sparse).
    """
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    import torch

    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        what = "meta device" if tensor.device.type == "meta" else str(tensor.layout)
        raise ContractError(f"a tensor of shape {list(tensor.shape)} ({what}) has no bytes to digest")
    if tensor.is_complex() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _digests_of(data: Sequence[Any]) -> list[str]:
    sizes = [item.nbytes for item in data]
    are_arrays = isinstance(data[0], np.ndarray)
    if not are_arrays and data[0].is_cuda and has_triton():
        from verifier.plan.digest_triton import LINE_BYTES, lane_sums_of_pieces, table_of

        aligned = [item if item.data_ptr() % LINE_BYTES == 0 else item.clone() for item in data]
        begins = [item.data_ptr() - aligned[0].data_ptr() for item in aligned]
        table = table_of(begins, begins, sizes).to(aligned[0].device)
        return finish_all(lane_sums_of_pieces(aligned[0], table, len(sizes)).cpu(), sizes)
    from verifier.plan.digest_numba import lane_sums_numba

    held = data if are_arrays else [item.cpu() for item in data]
    words = [finish(*lane_sums_numba(item), size) for item, size in zip(held, sizes, strict=True)]
    return [f"{PREFIX}{first:016x}{second:016x}" for first, second in words]


@functools.cache
def has_triton() -> bool:
    """Test for the library that compiles the GPU's kernels."""
    return importlib.util.find_spec("triton") is not None


class Digests:
    """Digests that a GPU may still be computing.

    Args:
        found: the digests; or both lanes' sums of each piece, int64 [num_pieces, 2] on a GPU.
        sizes: size of each piece, in bytes; needed for sums.
    """

    def __init__(self, found: list[str] | torch.Tensor, sizes: Sequence[int] | np.ndarray = ()) -> None:
        self._sizes = sizes
        self._found = found
        if not isinstance(found, list):
            import torch

            self._found = torch.empty(found.shape, dtype=found.dtype, device="cpu", pin_memory=True)
            self._found.copy_(found, non_blocking=True)

    def result(self) -> list[str]:
        """Return one digest per piece; on a GPU, call it only after the stream that computes them has passed them."""
        return self._found if isinstance(self._found, list) else finish_all(self._found, self._sizes)


class Pieces:
    """Byte ranges of a buffer that is digested repeatedly, such as the tensors of a transfer's chunk.

    Args:
        begins: offset of each piece in the buffer, in bytes; multiples of 16.
        sizes: size of each piece, in bytes.
    """

    def __init__(self, begins: Sequence[int], sizes: Sequence[int]) -> None:
        self._begins, self._sizes = begins, np.asarray(sizes, dtype=np.uint64)
        self._table: torch.Tensor | None = None
        self._copied: torch.Tensor | None = None
        self._sources = np.empty(0, dtype=np.int64)

    def start(self, buffer: torch.Tensor) -> Digests:
        """Start to digest every piece; on a GPU this is queued on its current stream, and nothing waits for it.

        Args:
            buffer: uint8 vector; on a GPU its address is a multiple of 16 bytes.
        """
        if buffer.is_cuda and has_triton():
            from verifier.plan.digest_triton import lane_sums_of_pieces, table_of

            if self._table is None or self._table.device != buffer.device:
                self._table = table_of(self._begins, self._begins, self._sizes).to(buffer.device)
            return Digests(lane_sums_of_pieces(buffer, self._table, len(self._sizes)), self._sizes)
        pieces = [buffer[begin : begin + size] for begin, size in zip(self._begins, self._sizes.tolist(), strict=True)]
        return Digests(_digests_of(pieces))

    def copy(self, base: torch.Tensor, sources: np.ndarray, into: torch.Tensor) -> Digests:
        """Queue one pass of a GPU that copies every piece to its place in a buffer and digests it; see `start`.

        The kernel's table is kept, and made anew for other sources.

        Args:
            base: uint8 vector on the GPU that the sources are relative to.
            sources: where each piece lies now, in bytes from the base, int64 [num_pieces]; multiples of 16.
            into: uint8 vector on the same GPU.
        """
        from verifier.plan.digest_triton import lane_sums_of_pieces, table_of

        if self._copied is None or self._copied.device != into.device or not np.array_equal(self._sources, sources):
            table = table_of(sources, self._begins, self._sizes).pin_memory()
            self._sources, self._copied = sources, table.to(into.device, non_blocking=True)
        return Digests(lane_sums_of_pieces(base, self._copied, len(self._sizes), copy=into), self._sizes)
