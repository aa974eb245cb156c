"""What every pass has: an identity that changes with its source and its settings, and chaining with other passes."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

__all__ = ["LanePass", "PassChain", "chain", "flatten"]

logger = logging.getLogger("dsv4_ops.passes")

_HERE = Path(__file__).resolve().parent
_InferenceAware: type | None = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)


class LanePass(CustomGraphPass):  # type: ignore[misc, unused-ignore]
    """Base of this package's Inductor passes.

    Inductor caches compiled code by graph and by ``uuid()`` of the passes, and node metadata is in neither: the uuid must contain
    whatever else the output depends on. It covers the source files of the pass (``files``, beside this module's own and the marks'),
    :meth:`config` and the version of PyTorch.
    """

    files: tuple[Path, ...] = ()
    handles_lanes = True
    """In a slot, ``use_workspace_lane`` need not warn that no one reads its marks."""

    def config(self) -> dict[str, Any]:
        """Settings that change what the pass does; JSON-serializable."""
        return {}

    def uuid(self) -> Any:
        digest = hashlib.sha256()
        names = {_HERE / "base.py", _HERE / "fx_utils.py", Path(inspect.getfile(type(self))), *self.files}
        for path in sorted(names):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        digest.update(json.dumps([type(self).__qualname__, self.config(), torch.__version__], sort_keys=True).encode())
        return digest.hexdigest()


class PassChain(CustomGraphPass):  # type: ignore[misc, unused-ignore]
    """Several passes in one slot (torch 2.11 takes one object, 2.13 also a list). Its uuid is None when any part has none."""

    def __init__(self, passes: Sequence[Callable[..., None]]) -> None:
        self.passes = tuple(passes)

    def uuid(self) -> Any:
        parts = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes]
        return None if any(part is None for part in parts) else tuple(parts)

    def __call__(self, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
        for single in self.passes:
            if _InferenceAware is not None and isinstance(single, _InferenceAware):
                single(graph, is_inference)
            else:
                single(graph)


if _InferenceAware is not None:

    class _InferenceAwareChain(PassChain, _InferenceAware):  # type: ignore[misc, valid-type]
        """A chain that Inductor tells whether it compiles for inference, because a part wants to know."""


def flatten(slot: Any) -> list[Any]:
    """The passes that a slot's value stands for."""
    if slot is None:
        return []
    if isinstance(slot, list | tuple):
        return [single for part in slot for single in flatten(part)]
    return list(slot.passes) if isinstance(slot, PassChain) else [slot]


def chain(slot: Any, *passes: Any) -> Any:
    """A value for a slot that runs what is there now, then ``passes`` (once each)."""
    all_passes = flatten(slot)
    all_passes += [p for p in passes if not any(p is other for other in all_passes)]
    if len(all_passes) == 1:
        return all_passes[0]
    aware = _InferenceAware is not None and any(isinstance(p, _InferenceAware) for p in all_passes)
    return _InferenceAwareChain(all_passes) if aware else PassChain(all_passes)
