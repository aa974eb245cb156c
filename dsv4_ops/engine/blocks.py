"""Pages of the KV groups: who owns which block, and what may be given back.

Each group has a pool of its own and, for each request, a block table: entry ``p // block_size`` is the block that holds
position p. Block 0 is the null block: it is never handed out, and a table entry 0 means "no block here" (not yet
allocated, or evicted). Groups of the engine:

==========  =================  ========================================================================================
group       positions a block  content
==========  =================  ========================================================================================
window      64                 KV rows of every layer, and each compressor's raw kv and gate; evicted behind the window
compressed  256                compressed records and indexer keys: 256 / ratio of them a block; kept to the end
draft       64                 KV rows of the drafter's layers; evicted behind the window
==========  =================  ========================================================================================
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .._checks import NULL_BLOCK
from ..errors import ArgumentError

__all__ = ["BlockPool", "BlockTable", "KVGroup"]


class BlockPool:
    """Blocks 1 .. num_blocks - 1: first those that were never used, then the oldest-freed."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ArgumentError("BlockPool", "num_blocks", "at least 2 (block 0 is the null block)", num_blocks)
        self.num_blocks = num_blocks
        # Not one list of all blocks: a pool costs memory only for what was in use.
        self._next_unused = 1
        self._freed: deque[int] = deque()
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return self.num_blocks - self._next_unused + len(self._freed)

    @property
    def capacity(self) -> int:
        return self.num_blocks - 1

    def take(self) -> int:
        if self._next_unused < self.num_blocks:
            block, self._next_unused = self._next_unused, self._next_unused + 1
        else:
            block = self._freed.popleft()
        self._used.add(block)
        return block

    def give_back(self, block: int) -> None:
        if block not in self._used:
            raise RuntimeError(f"block {block} is given back but is not in use")
        self._used.remove(block)
        self._freed.append(block)


@dataclass
class BlockTable:
    """Blocks of one request in one group, by logical block. ``evicted`` leading entries are null again."""

    blocks: list[int] = field(default_factory=list)
    evicted: int = 0


class KVGroup:
    """A pool and its rules. ``keep``: how many positions before the next one to run stay readable (None: all of them)."""

    def __init__(self, name: str, block_size: int, num_blocks: int, keep: int | None = None) -> None:
        self.name, self.block_size, self.keep = name, block_size, keep
        self.pool = BlockPool(num_blocks)

    @staticmethod
    def blocks_for(positions: int, block_size: int, keep: int | None, step_tokens: int) -> int:
        """Most blocks that a request of ``positions`` ever holds when each step runs at most ``step_tokens`` of them."""
        total = -(-positions // block_size)
        if keep is None:
            return total
        # The live stretch is keep + step_tokens long and may start anywhere inside a block.
        return min(total, (keep + step_tokens + block_size - 2) // block_size + 1)

    def missing(self, table: BlockTable, end: int) -> int:
        """How many blocks ``table`` lacks to hold positions up to ``end`` (exclusive)."""
        return max(0, -(-end // self.block_size) - len(table.blocks))

    def grow(self, table: BlockTable, end: int) -> None:
        """Allocate up to position ``end`` (exclusive). The caller has made sure that the pool has the blocks."""
        for _ in range(self.missing(table, end)):
            table.blocks.append(self.pool.take())

    def evict(self, table: BlockTable, next_position: int) -> None:
        """Give back blocks that no query at ``next_position`` or later can see. Their table entries become null."""
        if self.keep is None:
            return
        first = min(max(0, next_position - self.keep) // self.block_size, len(table.blocks))
        for logical in range(table.evicted, first):
            self.pool.give_back(table.blocks[logical])
            table.blocks[logical] = NULL_BLOCK
        table.evicted = max(table.evicted, first)

    def release(self, table: BlockTable) -> None:
        """Give everything back."""
        for block in table.blocks[table.evicted :]:
            self.pool.give_back(block)
        table.blocks.clear()
        table.evicted = 0
