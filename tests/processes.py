"""Processes of this machine, as the kernel tells of them; one that ends while it is looked at has ended."""

from __future__ import annotations

import os
import re
from pathlib import Path

GONE = (FileNotFoundError, ProcessLookupError)
"""Errors of a file under /proc: its process ended before it was opened, or before it was read."""


_STAGE = re.compile(r"[a-z]+: \d+ s: ")
"""Beginning of a line of progress, in a log file."""


def said(stderr: str) -> str:
    """Text of a command's stderr without its lines of progress."""
    return "".join(line for line in stderr.splitlines(keepends=True) if not _STAGE.match(line)).removesuffix("\n")


def alive(pid: int) -> bool:
    """The process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except GONE:
        return False


def arguments(pid: int) -> list[str]:
    """Words of a command line; none once the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except GONE:
        return []


def command_line(pid: int) -> str:
    """Words of a command line, a space between two; empty once the process has ended."""
    return " ".join(arguments(pid))


def processor_s(pid: int) -> float:
    """Processor seconds that a process has used, in user mode and in the kernel (proc(5), utime and stime)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Process ids that a process has started."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except GONE:
        return []
    found: list[int] = []
    for thread in threads:
        try:
            found += map(int, (thread / "children").read_text().split())
        except GONE:
            continue
    return found
