"""Block pools and tables: nothing is handed out twice, null stays null, and what may still be read is never evicted."""

from __future__ import annotations

import random

import pytest

from dsv4_ops.engine.blocks import BlockPool, BlockTable, KVGroup
from dsv4_ops.errors import ArgumentError


def test_pool_never_hands_out_the_null_block_or_a_used_one() -> None:
    pool = BlockPool(6)
    taken = [pool.take() for _ in range(5)]
    assert sorted(taken) == [1, 2, 3, 4, 5] and pool.num_free == 0 and pool.capacity == 5
    pool.give_back(3)
    assert pool.take() == 3
    with pytest.raises(RuntimeError, match="block 0"):
        pool.give_back(0)
    pool.give_back(1)
    with pytest.raises(RuntimeError, match="not in use"):
        pool.give_back(1)
    with pytest.raises(ArgumentError, match="null block"):
        BlockPool(1)


def test_table_grows_by_whole_blocks_and_evicts_behind_the_window() -> None:
    group, table = KVGroup("window", 64, 20, keep=127), BlockTable()
    group.grow(table, 1)
    assert len(table.blocks) == 1 and group.missing(table, 64) == 0 and group.missing(table, 65) == 1
    group.grow(table, 300)
    assert len(table.blocks) == 5 and group.pool.num_free == 14
    # The query at 191 sees 64..191 (keep 127 before it): block 0 goes, block 1 stays. At 190 it still sees 63.
    group.evict(table, 190)
    assert table.evicted == 0
    group.evict(table, 191)
    assert table.evicted == 1 and table.blocks[0] == 0 and 0 not in table.blocks[1:] and group.pool.num_free == 15
    group.evict(table, 100)  # never comes back
    assert table.evicted == 1
    group.release(table)
    assert table.blocks == [] and table.evicted == 0 and group.pool.num_free == 19


def test_group_without_window_keeps_everything() -> None:
    group, table = KVGroup("compressed", 256, 5), BlockTable()
    group.grow(table, 1000)
    group.evict(table, 10_000)
    assert len(table.blocks) == 4 and 0 not in table.blocks


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_conserves_blocks_and_keeps_to_the_bound(seed: int) -> None:
    """Requests advance by random steps: owners never share a block, the visible stretch is mapped, ``blocks_for`` holds."""
    rng = random.Random(seed)
    block_size, keep, step = rng.choice([1, 4, 64]), rng.choice([0, 1, 7, 127]), rng.choice([1, 5, 64, 256])
    length = 700
    bound = KVGroup.blocks_for(length, block_size, keep, step)
    group = KVGroup("window", block_size, 1 + 3 * bound, keep)
    tables, positions = [BlockTable() for _ in range(3)], [0, 0, 0]
    for _ in range(400):
        i = rng.randrange(3)
        end = min(length, positions[i] + rng.randint(1, step))
        group.evict(tables[i], positions[i])
        group.grow(tables[i], end)
        live = [b for table in tables for b in table.blocks if b]
        assert len(live) == len(set(live)) == group.pool.capacity - group.pool.num_free
        assert all(len([b for b in table.blocks if b]) <= bound for table in tables)
        # Everything that the step's first query sees, and all that the step writes, has a block.
        assert all(tables[i].blocks[p // block_size] for p in range(max(0, positions[i] - keep), end))
        positions[i] = end if rng.random() < 0.8 else max(positions[i], end - rng.randint(0, 3))
        if positions[i] >= length or rng.random() < 0.02:
            group.release(tables[i])
            positions[i] = 0
    for table in tables:
        group.release(table)
    assert group.pool.num_free == group.pool.capacity


def test_pool_of_any_size_costs_what_was_used() -> None:
    pool = BlockPool(2**40)
    assert [pool.take(), pool.take()] == [1, 2] and pool.num_free == pool.capacity - 2
