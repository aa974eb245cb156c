"""FX passes that give draft subgraphs their own workspace lane.

``backend()`` is the usual door: ``torch.compile(step, backend=dsv4_ops.passes.backend())``. Importing this imports parts of Inductor, so
``import dsv4_ops`` does not.
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
