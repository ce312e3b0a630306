"""Archives of the files of a trace: tar within xz, as `tar xf` takes it. What repeats in any of them is stored once."""

from __future__ import annotations

import functools
import io
import lzma
import os
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from verifier.errors import UsageError

OF_BATCHES = "batches/"
"""Beginning of the names of batches in an archive."""
IN_MEMORY, MAX_BYTES = 2**26, 2**36
"""Bytes of an archive's contents above which they are read from a temporary file, and are refused."""
MAX_WINDOW = 2**27
"""Most bytes between two repeats that are stored once; packing takes some 6 times as much memory."""
_FILTER = {"id": lzma.FILTER_LZMA2, "preset": 1, "lc": 1, "lp": 2, "pb": 2}
"""Fast, and made for numbers of 4 bytes: noise of float32 is most of what is left."""


def write_archive(file: Path, contents: Iterable[tuple[str, bytes]], size: int) -> None:
    """Write names and contents, of about so many bytes; all is on the disk before the file has its name."""
    filters = [{**_FILTER, "dict_size": min(max(size, 2**16), MAX_WINDOW)}]
    aside = file.with_name(f"{file.name}.partial")
    try:
        with open(aside, "wb") as stream:
            with (
                lzma.open(stream, "wb", filters=filters) as packed,
                tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
            ):
                for name, found in contents:
                    member = tarfile.TarInfo(name)
                    member.size = len(found)
                    archive.addfile(member, io.BytesIO(found))
            os.fsync(stream.fileno())
        aside.rename(file)
        folder = os.open(file.parent, os.O_RDONLY)
        os.fsync(folder)  # the name too, before what it stands for is removed
        os.close(folder)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def members(file: Path) -> dict[str, Callable[[], bytes]]:
    """Name of each file of an archive -> what reads its contents.

    Raises:
        UsageError: it cannot be read, or is damaged.
    """
    unpacked = tempfile.SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            raise UsageError(f"`{file}` is no regular file")
        with lzma.open(file) as stream:
            while part := stream.read(2**20):
                unpacked.write(part)
                if unpacked.tell() > MAX_BYTES:
                    raise UsageError(f"`{file}` is damaged: its contents are more than {MAX_BYTES:,} bytes")
        unpacked.seek(0)
        archive = tarfile.open(fileobj=unpacked, mode="r:")  # noqa: SIM115
        return {item.name: functools.partial(_contents, archive, item) for item in archive if item.isreg()}
    except (EOFError, lzma.LZMAError, tarfile.TarError) as problem:
        raise UsageError(f"`{file}` is damaged: {problem}") from problem
    except OSError as problem:
        raise UsageError(f"`{file}` cannot be read: {problem.strerror}") from problem


def _contents(archive: tarfile.TarFile, item: tarfile.TarInfo) -> bytes:
    found = archive.extractfile(item)
    assert found is not None
    return found.read()
