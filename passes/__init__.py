"""FX passes that give draft subgraphs their own workspace lane.

====================================  =================================================================================
your program                          what to use
====================================  =================================================================================
you call ``torch.compile``            ``torch.compile(step, backend=backend())``: binds, verifies, compiles by Inductor.
                                      ``mode`` and ``options`` go into it: ``backend(mode="reduce-overhead")``
an engine owns the backend,           ``BindLanes()`` and ``VerifyLanes()`` in the post-grad slot by ``install(...)`` or the
the program enters lanes              engine's own setting, its backend wrapped by ``with_marks``
an engine enters lanes,               nothing to bind; ``install(VerifyLanes(ambient="allow"))`` finds contradictions
around compiled calls
====================================  =================================================================================

Two mistakes leave ops in the ambient lane, and warn: ``use_workspace_lane`` in a program compiled without any of these (at trace time),
and an op that takes the current lane but was never given to ``register_workspace_op`` (when it asks, under ``backend()`` and ``with_marks``:
a post-grad pass does not see the program run).

Importing this imports parts of Inductor, so ``import dsv4_ops`` does not.
"""

if __name__ != "dsv4_ops.passes":
    raise ImportError("import dsv4_ops.passes, not the checkout's passes/ folder")

from .base import LanePass, PassChain, chain
from .fx_utils import OpCall, find_op_nodes, graph_text
from .install import LaneBackend, backend, install
from .lanes import BindLanes, BindReport, bind_lanes, marks_digest, with_marks
from .verify import VerifyLanes
from .workspace_ops import WorkspaceOp, register_workspace_op, workspace_op

__all__ = [
    "BindLanes",
    "BindReport",
    "LaneBackend",
    "LanePass",
    "OpCall",
    "PassChain",
    "VerifyLanes",
    "WorkspaceOp",
    "backend",
    "bind_lanes",
    "chain",
    "find_op_nodes",
    "graph_text",
    "install",
    "marks_digest",
    "register_workspace_op",
    "with_marks",
    "workspace_op",
]
