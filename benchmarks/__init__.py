"""Measurements that a GPU machine repeats with ``bash benchmarks/gpu.sh``."""
