"""Two ways to run the passes: as a backend of ``torch.compile`` (default), or in Inductor's slots for the length of a block.

::

    step = torch.compile(step, backend=passes.backend())                       # bind, compile by Inductor, verify
    with passes.install(VerifyLanes(ambient="allow")): model(...)              # an engine that sets lanes from outside
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx

from ..errors import PassError
from .base import chain
from .lanes import BindReport, bind_lanes
from .verify import VerifyLanes
from .watch import watched

__all__ = ["LaneBackend", "backend", "install"]

SLOTS = ("post_grad_custom_post_pass", "post_grad_custom_pre_pass", "joint_custom_pre_pass", "joint_custom_post_pass")


@contextlib.contextmanager
def install(*passes: Any, slot: str = "post_grad_custom_post_pass") -> Iterator[None]:
    """Run ``passes`` after whatever is in Inductor's ``slot``, for compilations inside this block.

    On exit, also by an exception, the slot holds the very object that it held before. The combined uuid is None (no caching) when a
    pass that was there has none. Raises PassError for a slot without a cache-safe place for graph passes.
    """
    import torch._inductor.config as config

    if slot not in SLOTS:
        raise PassError(f"install: slot must be one of {', '.join(SLOTS)}, got {slot!r}.")
    with config.patch({slot: chain(getattr(config, slot), *passes)}):
        yield


class LaneBackend:
    """Compiler backend that binds lanes, verifies them, and hands the program to ``inner``."""

    handles_lanes = True

    def __init__(self, inner: str | Callable[..., Any], unmarked: int | None, ambient: str | None, mode: str | None, options: dict[str, Any] | None) -> None:
        self.inner, self.unmarked, self.ambient, self.mode, self.options = inner, unmarked, ambient, mode, dict(options or {})
        self.last: BindReport | None = None
        """What the latest compile bound."""
        self.__name__ = "dsv4_ops_lanes"
        VerifyLanes(ambient or "unmarked")  # a bad value fails here

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any, mode: str | None = None, options: dict[str, Any] | None = None) -> Any:
        inductor = self.inner == "inductor"
        mode, options = self._settings(mode, options or {})
        patches = self._patches(mode, options) if inductor else {}
        verifier = VerifyLanes(self.ambient or ("refuse" if _replays(patches) else "unmarked"))
        self.last = bind_lanes(gm, unmarked=self.unmarked)
        verifier.check(gm)
        if inductor:
            import torch._inductor.config as config
            from torch._inductor.compile_fx import compile_fx

            slot = "post_grad_custom_post_pass"
            # By patches, not by install(): Inductor applies them again to what it compiles later (backward graphs).
            patches[slot] = chain(patches.get(slot, getattr(config, slot)), verifier)
            return watched(gm, compile_fx(gm, example_inputs, config_patches=patches))
        inner = torch._dynamo.lookup_backend(self.inner) if isinstance(self.inner, str) else self.inner
        keywords = ({"mode": mode} if mode else {}) | ({"options": options} if options else {})
        with install(verifier):
            return watched(gm, inner(gm, example_inputs, **keywords))

    def __repr__(self) -> str:
        given = {"unmarked": self.unmarked, "ambient": self.ambient, "mode": self.mode, "options": self.options or None}
        return ", ".join([f"dsv4_ops.passes.backend({self.inner!r}", *(f"{name}={value!r}" for name, value in given.items() if value is not None)]) + ")"

    def _settings(self, mode: str | None, options: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
        """Those given to ``torch.compile``, which hands them on, and those given here."""
        pairs = [("mode", mode, self.mode), *((f"options[{key!r}]", value, self.options.get(key)) for key, value in options.items())]
        for name, theirs, ours in pairs:
            if theirs is not None and ours is not None and theirs != ours:
                raise PassError(f"{name} is {theirs!r} in torch.compile and {ours!r} in passes.backend(). Give it once, to passes.backend().")
        return mode or self.mode, {**self.options, **options}

    @staticmethod
    def _patches(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
        patches = dict(torch._inductor.list_mode_options(mode)) if mode and mode != "default" else {}
        return patches | {key.replace("-", "_"): value for key, value in options.items()}


def _replays(patches: dict[str, Any]) -> bool:
    """Whether Inductor will record CUDA graphs, which replay the lane of the first run."""
    import torch._inductor.config as config

    return bool(patches.get("triton.cudagraphs", config.triton.cudagraphs))


def backend(
    inner: str | Callable[..., Any] = "inductor",
    *called: object,
    unmarked: int | None = None,
    ambient: str | None = None,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> LaneBackend:
    """A backend for ``torch.compile`` that gives every region its workspace lane.

    ``inner``: what compiles the bound program. ``unmarked``: lane of ops outside every ``use_workspace_lane`` (None: the ambient lane when
    they run). ``ambient``: see :class:`VerifyLanes`; by default ``"refuse"`` when ``mode`` or ``options`` make Inductor record CUDA graphs, since
    those replay the lane of the first run, else ``"unmarked"``. ``mode`` and ``options`` are those of ``torch.compile``; given there they
    are honoured as well, and one that is given in both places with two values is refused (PassError). So is ``backend=backend``, not called.
    """
    if called:  # by PyTorch, with a program and its inputs
        raise PassError("passes.backend() makes the backend and is none itself. Call it: torch.compile(..., backend=dsv4_ops.passes.backend()).")
    return LaneBackend(inner, unmarked, ambient, mode, options)
