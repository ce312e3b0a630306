"""Every exception that verifier raises on purpose, each with the exit code that the command line answers with."""

from __future__ import annotations

import signal


class VerifierError(Exception):
    """Base of all deliberate errors: one clear sentence, and the exit code it ends the command with."""

    exit_code: int = 3


class UsageError(VerifierError):
    """The user can mend it: unknown model, mesh that does not divide, damaged checkpoint, no GPU, wrong version."""

    exit_code = 4


class ContractError(VerifierError):
    """A room was handed something that it must refuse: a duplicate name, a shape that disagrees, an unmapped tensor."""


class Stopped(BaseException):
    """A signal asked the command to end: everything that was started is ended on the way out.

    Attributes:
        signum: number of the signal.
        exit_code: 128 and the signal's number, as a shell reports it.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"ended by {signal.Signals(signum).name}")
        self.signum, self.exit_code = signum, 128 + signum


class ViolationFound(VerifierError):
    """A step of a training run does not hold: the report, and the exit code that it calls for."""

    def __init__(self, report: str, exit_code: int) -> None:
        super().__init__(report)
        self.exit_code = exit_code


class InternalError(VerifierError):
    """Something broke that is neither the user's nor the verified system's doing: a dead process, a lost socket."""
