"""How kernels are timed on a GPU: as by ``python -m dsv4_ops bench``."""

from dsv4_ops.bench.timing import Call, ColdReplays, copy_rate, launches

__all__ = ["Call", "ColdReplays", "copy_rate", "launches"]
