"""Every error a user can see, one class a kind, so that callers can catch exactly what they mean.

All messages say four things: what was wrong, what is expected, what was given, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "ArgumentDeviceError",
    "ArgumentDtypeError",
    "ArgumentError",
    "ArgumentShapeError",
    "BuildError",
    "Dsv4OpsError",
    "GradientError",
    "GraphError",
    "LaneError",
    "PassError",
    "RequestError",
    "StaleOutputError",
    "UnsupportedError",
    "WorkspaceError",
    "WorkspaceLockedError",
]


class Dsv4OpsError(Exception):
    """Base of every error that this package raises on purpose."""


class ArgumentError(Dsv4OpsError, ValueError):
    """A value that an op does not take: out of range, contradictory or unknown."""

    def __init__(self, where: str, name: str, expected: str, got: object, fix: str = "") -> None:
        self.where, self.name = where, name
        super().__init__(f"{where}: {name} must be {expected}, got {got}." + (f" {fix}" if fix else ""))


class ArgumentShapeError(ArgumentError):
    """A tensor of the wrong shape or stride."""


class ArgumentDtypeError(ArgumentError, TypeError):
    """A tensor of the wrong dtype, or an argument of the wrong Python type."""


class ArgumentDeviceError(ArgumentError):
    """Tensors of one call on different devices, or a device that the op does not serve."""


class GradientError(Dsv4OpsError, RuntimeError):
    """An input that requires grad: these ops serve inference only."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where}: inputs must not require grad (inference only), got one that does while grad mode is on. "
            "Call it under torch.no_grad() or torch.inference_mode(), or detach the input."
        )


class UnsupportedError(Dsv4OpsError, RuntimeError):
    """A capability gate that is not met. Lists every unmet requirement, not only the first."""

    def __init__(self, what: str, unmet: Sequence[str]) -> None:
        self.what, self.unmet = what, list(unmet)
        super().__init__(f"{what} cannot run here:\n" + "\n".join(f"  - {line}" for line in unmet))


class WorkspaceError(Dsv4OpsError, RuntimeError):
    """A workspace request that cannot be served (negative size, growth under capture, unknown lane)."""


class WorkspaceLockedError(WorkspaceError):
    """A locked workspace was asked to grow."""


class LaneError(Dsv4OpsError, ValueError):
    """A lane that does not exist, or a lane context used in a way that cannot be kept."""


class GraphError(Dsv4OpsError, RuntimeError):
    """A step that cannot be captured, or not be replayed here."""


class StaleOutputError(GraphError):
    """Outputs of a captured step that a later call of the step has overwritten."""


class PassError(Dsv4OpsError, RuntimeError):
    """A graph pass found a program that it must refuse."""


class RequestError(Dsv4OpsError, ValueError):
    """A request to the decode engine that cannot be served; says why, and on which line it stood."""


class BuildError(Dsv4OpsError, ImportError):
    """A compiled part that was asked for is missing or does not fit this torch."""
