"""Place of a failure in upstream's code: package, file, line and message, out of the text of a traceback."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')
_PACKAGE = re.compile(r".*/(?:site|dist)-packages/(([^/]+).*)")
_OURS = re.compile(r".*/(verifier/.*)")
_PREFIX = re.compile(r"^(?:\([\w ]+ ?pid=\d+\) )?(?:ERROR [\d: -]+\[[\w.]+:\d+\] ?)?")
"""Prefix of each line of a worker's traceback in vLLM's log."""
_FOLDER = re.compile(r"/\S*/(?:site|dist)-packages/")
_ERROR = re.compile(r"^((?:\w+\.)*\w*(?:Error|Exception|Interrupt|NotFound|Failed)\b.*)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Place in which something broke, as far as its traceback tells."""

    package: str
    """First folder under the installed packages, such as `vllm`; `verifier` for ours, empty where it is not known."""
    file: str
    """Below the installed packages."""
    line: int
    message: str

    @property
    def untrue(self) -> bool:
        """Test for an assertion that does not hold, and not for code that could not be run."""
        return self.message.startswith("AssertionError")

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: " if self.file else ""
        return where + self.message


def blame(text: str) -> Blame:
    """Place of the first error in a text, and what it said; the last line of a text without a traceback.

    The innermost frame of an upstream package counts, and ours where there is none: what upstream's code calls in torch
    is torch's refusal of upstream's argument, so frames of torch count only by themselves.
    """
    lines = [_PREFIX.sub("", line) for line in text.rstrip().splitlines()]
    frames: list[tuple[str, int]] = []
    code = ""
    for before, line in zip(["", *lines], lines, strict=False):
        if frame := _FRAME.search(line):
            frames.append((frame[1], int(frame[2])))
        elif _FRAME.search(before):
            code = line.strip()
        elif frames and (error := _ERROR.match(line.strip())):
            said = _FOLDER.sub("", error[1].strip())
            return _placed(frames, f"{said}: {code}" if said == "AssertionError" else said)
    return _placed(frames, lines[-1].strip() if lines else "nothing was said")


def _placed(frames: list[tuple[str, int]], message: str) -> Blame:
    upstream = [(found[2], found[1], line) for file, line in frames if (found := _PACKAGE.match(file))]
    ours = [("verifier", found[1], line) for file, line in frames if (found := _OURS.match(file))]
    for places in ([place for place in upstream if place[0] != "torch"], upstream, ours):
        if places:
            package, file, line = places[-1]
            return Blame(package=package, file=file, line=line, message=message)
    return Blame(package="", file="", line=0, message=message)
