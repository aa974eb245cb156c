"""What several test files share: short names for index tensors, and a ratio of running times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

INT32_MAX = 2**31 - 1


def i32(values: object, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def i64(values: object, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def yes(n: int, device: str = "cpu") -> torch.Tensor:
    return torch.ones(n, dtype=torch.bool, device=device)


def ratio(function: Callable[[], object], plain: Callable[[], object], runs: int = 15) -> float:
    """Fastest against fastest of interleaved runs, in processor time of one thread: other work on the machine hardly shows."""
    best, threads = [math.inf, math.inf], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(runs):
            for i, call in enumerate((function, plain)):
                start = time.thread_time()
                call()
                best[i] = min(best[i], time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    return best[0] / best[1]
