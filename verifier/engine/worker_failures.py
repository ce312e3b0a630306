"""Failures of vLLM's workers, which log the exceptions that end a request or their start, for their driver.

The driver learns of a worker's failure as of one whose trace stands in a log. A worker that was forked from the driver
has its handlers of logs; one that is an interpreter of its own finds the folder in its environment.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from verifier.launch.failures import failure_of
from verifier.stages.load.records import StackFailure

LOGGER = "vllm"
_DRIVER, _FOLDER = "VERIFIER_ENGINE_DRIVER", "VERIFIER_ENGINE_FAILURES"


class WorkerFailures(logging.Handler):
    """Keeps the exceptions that this process's workers log.

    The folder, made with the first that fails, gets a file for each. What `driver`, by default this process, logs
    itself is not kept.
    """

    def __init__(self, folder: Path, driver: int | None = None) -> None:
        super().__init__(logging.ERROR)
        self._folder, self._driver = folder, driver or os.getpid()

    def listen(self) -> None:
        """Listen to what vLLM logs in this process, and in those that it starts from now on (`listen_in_worker`)."""
        os.environ.update({_DRIVER: str(self._driver), _FOLDER: str(self._folder)})
        logger = logging.getLogger(LOGGER)
        if not any(isinstance(item, WorkerFailures) for item in logger.handlers):
            logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the exception that a worker logs, as a failure of the stack or as none."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None or os.getpid() == self._driver:
            return
        try:
            self._folder.mkdir(exist_ok=True)
            aside = self._folder / f"{os.getpid()}.partial"
            aside.write_bytes(msgspec.json.encode(failure_of(error)))
            aside.rename(aside.with_suffix(".json"))
        except OSError:
            self.handleError(record)

    def clear(self) -> None:
        """Forget what was kept before a request."""
        for file in self._files():
            file.unlink()

    @property
    def heard(self) -> bool:
        """True if a worker has logged an exception."""
        return bool(self._files())

    def of(self, error: Exception) -> StackFailure | None:
        """The first failure of a worker, or else that of an exception of the driver; None if it is not the stack's."""
        files = self._files()
        if not files:
            return failure_of(error)
        return msgspec.json.decode(files[0].read_bytes(), type=StackFailure | None)

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)


def listen_in_worker() -> None:
    """Listen in a worker, if its driver listens and it was not forked."""
    if _FOLDER in os.environ:
        WorkerFailures(Path(os.environ[_FOLDER]), int(os.environ[_DRIVER])).listen()
