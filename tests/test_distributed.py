"""Ranks of one group go on with one decision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dsv4_ops import rejection_sample
from dsv4_ops.distributed import broadcast_samples

STEPS, REQUESTS, DRAFTS, VOCABULARY = 1000, 3, 2, 5


def rank_main(rank: int, folder: str, compiled: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    decide = torch.compile(broadcast_samples, backend="aot_eager", fullgraph=True) if compiled else broadcast_samples
    generator = torch.Generator().manual_seed(0)
    temperature, seeds, mapping = torch.tensor([0.0, 0.8, 1.0]), torch.tensor([1, 2, 3]), torch.arange(REQUESTS, dtype=torch.int32)
    own, agreed = [], []
    for step in range(50 if compiled else STEPS):
        # Every row has a tie of its two best, which rounding breaks the other way on the other rank.
        target = torch.randn(REQUESTS, 1 + DRAFTS, VOCABULARY, generator=generator)
        target[..., 0] = target[..., 3] = 4.0
        target[..., 3 if rank else 0] += 1e-6
        drafts = torch.randint(0, VOCABULARY, (REQUESTS, DRAFTS), generator=generator)
        drafts[:, 0] = 0
        sampled, count = rejection_sample(target, drafts, None, temperature, seeds, mapping, torch.full((REQUESTS,), 3 * step))
        own.append((sampled, count))
        agreed.append(decide(sampled, count))
    torch.save((own, agreed), Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("compiled", [False, True])
def test_case_H13_ranks_accept_the_same_tokens(tmp_path: Path, compiled: bool) -> None:
    mp.spawn(rank_main, (str(tmp_path), compiled), nprocs=2)
    (own0, agreed0), (own1, agreed1) = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    apart = [not (torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])) for a, b in zip(own0, own1, strict=True)]
    assert sum(apart) > len(apart) // 2, "the ranks' own decisions must differ, or this shows nothing"
    for mine, other, first in zip(agreed0, agreed1, own0, strict=True):
        assert torch.equal(mine[0], other[0]) and torch.equal(mine[1], other[1])
        assert torch.equal(mine[0], first[0]) and torch.equal(mine[1], first[1]), "rank 0 decides"
        assert mine[0].dtype == torch.int64 and mine[1].dtype == torch.int32


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_sampled must be of shape \[2\]"):
        broadcast_samples(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="sampled must be int64"):
        broadcast_samples(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32))
