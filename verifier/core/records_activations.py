"""Records of what modules put out, token by token, and of the gradients with respect to it; runs of `bisect` alone."""

from __future__ import annotations

from verifier.core.record import ArrayRecord, Count, Record


class ActivationRecord(ArrayRecord, frozen=True, kw_only=True):
    """Values at one point of the model on one rank; the record's name is the point's, such as "layers.0.output".

    Arrays: ``values`` [N, W] float32, the rows of real tokens; ``sequence`` and ``position`` [N] int32, the token of
    each row; ``columns`` [W] int32, the place of each column in the whole vector as the oracle orders it.
    """

    step: str
    """Pass over the tokens: "score" or "train"."""
    order: Count
    """Place of the point in the order of the data flow."""
    coordinate: str = ""
    """Mesh coordinate of the rank."""


class Activation(ActivationRecord, frozen=True, kw_only=True, tag="logprob/activation"):
    """Output of a module, or where the name says so what goes into one."""


class ActivationGradient(ActivationRecord, frozen=True, kw_only=True, tag="loss/activation"):
    """Gradient of the sum of all tokens' losses with respect to the values at a point."""


class PointsLeftOut(Record, frozen=True, kw_only=True, tag="logprob/left-out"):
    """Points that one side does not have in a form to be compared with the other's; the name is the side's."""

    points: tuple[str, ...]
