"""What the attention of a plain or multi-token-prediction decode step reads beside hidden states, as one op and one launch.

``prepare_decode_step`` is ``ragged_context_lens`` for every compress ratio, ``causal_swa_indices`` and ``expand_block_table``: every
request runs one token, or 1 + K to verify K drafts, or a chunk of its prompt, in any mix. All of it follows from where the
requests' tokens start, so no part waits for another part's result: one launch does it.

=======================  =========  ==============  ==================================================================
argument                 dtype      shape           meaning (T tokens, padding included; R requests)
=======================  =========  ==============  ==================================================================
positions                int64      [T]             position of each token in its request
seq_lens                 int32/64   [R]             tokens of each request after this step
query_start_loc          int32      [R+1]           request i owns the tokens ``[query_start_loc[i], query_start_loc[i+1])``
block_table              int32      [R, blocks]     pages of the window group, any strides
compressed_block_table   int32      [R, cblocks]    optional: pages of the compressed group, any strides
block_size               int                        tokens a page of the window group
window                   int                        W, logical: how many positions a token sees
width                    int                        columns of a window row: storage, at least W
compress_ratios          int[]                      tokens a record of each compressed layer type; may be empty
max_seq_len              int                        optional: a length counts at most so many tokens, before the division
lane                     int                        workspace lane, as every fused op has it; no scratch is used
-----------------------  ---------  --------------  ------------------------------------------------------------------
token_to_req_indices     int32      [T]             ``ragged_context_lens``: 0 for padding
is_valid_token           bool       [T]             false for padding
slot_mapping             int64      [T]             where the token's own KV goes in the window group: the last column of its
                                                    window row; -1 for padding and where no page is mapped
swa_indices              int32      [T, width]      ``causal_swa_indices``
swa_lens                 int32      [T]
context_lens             int32      [ratios, T]     ``ragged_context_lens`` of each ratio, in order
expanded_block_table     int32      [T, cblocks]    ``expand_block_table`` of the compressed group; no columns without one
=======================  =========  ==============  ==================================================================

Graph-safe: yes (sizes alone decide what runs, nothing is read back). Replaces the per-step metadata builders of serving
engines' sparse MLA layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from . import _checks, _registry
from ._registry import BadInput, Sample
from .context_lens import EXPAND_BLOCK_TABLE, RAGGED_CONTEXT_LENS
from .errors import ArgumentDtypeError, ArgumentError, ArgumentShapeError
from .swa_indices import CAUSAL_SWA_INDICES

__all__ = ["DecodeStep", "prepare_decode_step"]


class DecodeStep(NamedTuple):
    """Index tensors of one step; see the table of this module."""

    token_to_req_indices: torch.Tensor
    is_valid_token: torch.Tensor
    slot_mapping: torch.Tensor
    swa_indices: torch.Tensor
    swa_lens: torch.Tensor
    context_lens: torch.Tensor
    expanded_block_table: torch.Tensor


PREPARE_DECODE_STEP = _registry.define(
    "prepare_decode_step(Tensor positions, Tensor seq_lens, Tensor query_start_loc, Tensor block_table, Tensor? compressed_block_table=None, *, "
    "int block_size, int window, int width, int[] compress_ratios, SymInt? max_seq_len=None, int lane=-1) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    out=DecodeStep._fields,
)


def prepare_decode_step(
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    compressed_block_table: torch.Tensor | None = None,
    *,
    block_size: int,
    window: int,
    width: int,
    compress_ratios: Sequence[int] = (),
    max_seq_len: int | None = None,
    lane: int = -1,
) -> DecodeStep:
    """Requests, slots, window rows, compressed lengths and pages of every token of a step.

    Rows of tokens are ``[T]``, ``swa_indices`` ``[T, width]``, ``context_lens`` ``[ratios, T]``, ``expanded_block_table`` ``[T, cblocks]``; int32, but
    ``is_valid_token`` bool and ``slot_mapping`` int64.

    Raises ArgumentError (sizes; ``width`` below ``window``), ArgumentDtypeError, ArgumentShapeError, ArgumentDeviceError.
    Arguments: ``python -m dsv4_ops ops prepare_decode_step``.
    """
    return DecodeStep(
        *PREPARE_DECODE_STEP(
            positions, seq_lens, query_start_loc, block_table, compressed_block_table, block_size=block_size, window=window, width=width,
            compress_ratios=list(compress_ratios), max_seq_len=max_seq_len, lane=lane,
        )
    )  # fmt: skip


def _check(
    positions: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, block_table: torch.Tensor, compressed_block_table: torch.Tensor | None = None, *,
    block_size: int, window: int, width: int, compress_ratios: Sequence[int], max_seq_len: int | None = None, lane: int = -1,
) -> None:  # fmt: skip
    where = "prepare_decode_step"
    _checks.tensor(where, "positions", positions, _checks.INT64, 1)
    _checks.tensor(where, "seq_lens", seq_lens, _checks.INDEX, 1)
    requests = seq_lens.shape[0]
    _checks.tensor(where, "query_start_loc", query_start_loc, _checks.INT32, 1)
    if query_start_loc.shape[0] != requests + 1:
        raise ArgumentShapeError(where, "query_start_loc", f"one entry longer than seq_lens ({requests})", f"shape {list(query_start_loc.shape)}")
    for name, table in (("block_table", block_table), ("compressed_block_table", compressed_block_table)):
        if table is not None:
            _checks.tensor(where, name, table, _checks.INT32, 2)
            if table.shape[0] != requests:
                raise ArgumentShapeError(where, name, f"one row a request ({requests}, like seq_lens)", f"shape {list(table.shape)}")
    _checks.same_device(
        where, positions=positions, seq_lens=seq_lens, query_start_loc=query_start_loc, block_table=block_table, compressed_block_table=compressed_block_table
    )
    int32_max = 2**31 - 1
    _checks.integer(where, "block_size", block_size, 1, int32_max)
    _checks.integer(where, "window", window, 1, int32_max)
    _checks.integer(where, "width", width, 1, int32_max)
    if width < window:
        raise ArgumentError(where, "width", f"at least window ({window}): it is the storage of a row", width, "Use decode_swa_width(window).")
    for i, ratio in enumerate(compress_ratios):
        _checks.integer(where, f"compress_ratios[{i}]", ratio, 1)
    if max_seq_len is not None:
        _checks.integer(where, "max_seq_len", max_seq_len, 0)
    _checks.lane(where, lane)


def _reference(
    positions: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, block_table: torch.Tensor, compressed_block_table: torch.Tensor | None = None, *,
    block_size: int, window: int, width: int, compress_ratios: Sequence[int], max_seq_len: int | None = None, lane: int = -1,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    tokens = positions.shape[0]
    _, requests, valid = RAGGED_CONTEXT_LENS.reference(seq_lens, query_start_loc, tokens)
    indices, lens = CAUSAL_SWA_INDICES.reference(positions, requests, valid, block_table, block_size=block_size, window=window, width=width)
    slots = torch.tensor([row[n - 1] if n else _checks.PAD_SLOT_ID for row, n in zip(indices.tolist(), lens.tolist(), strict=True)], dtype=torch.int64, device=positions.device)
    context_lens = lens.new_empty((len(compress_ratios), tokens))
    for i, ratio in enumerate(compress_ratios):
        context_lens[i] = RAGGED_CONTEXT_LENS.reference(seq_lens, query_start_loc, tokens, ratio, max_seq_len=max_seq_len)[0]
    expanded = lens.new_empty((tokens, 0)) if compressed_block_table is None else EXPAND_BLOCK_TABLE.reference(compressed_block_table, requests, valid)
    return requests, valid, slots, indices, lens, context_lens, expanded


def _torch(
    positions: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, block_table: torch.Tensor, compressed_block_table: torch.Tensor | None = None, *,
    block_size: int, window: int, width: int, compress_ratios: Sequence[int], max_seq_len: int | None = None, lane: int = -1,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    ragged, causal, expand = RAGGED_CONTEXT_LENS.torch_impl, CAUSAL_SWA_INDICES.torch_impl, EXPAND_BLOCK_TABLE.torch_impl
    assert ragged is not None and causal is not None and expand is not None
    tokens = positions.shape[0]
    _, requests, valid = ragged(seq_lens, query_start_loc, tokens)
    indices, lens = causal(positions, requests, valid, block_table, block_size=block_size, window=window, width=width)
    own = indices.gather(1, (lens - 1).clamp(min=0).to(torch.int64)[:, None])[:, 0]
    slots = torch.where(lens > 0, own, _checks.PAD_SLOT_ID).to(torch.int64)
    context_lens = lens.new_empty((len(compress_ratios), tokens))
    for i, ratio in enumerate(compress_ratios):
        context_lens[i] = ragged(seq_lens, query_start_loc, tokens, ratio, max_seq_len=max_seq_len)[0]
    expanded = lens.new_empty((tokens, 0)) if compressed_block_table is None else expand(compressed_block_table, requests, valid)
    return requests, valid, slots, indices, lens, context_lens, expanded


def _triton(
    positions: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, block_table: torch.Tensor, compressed_block_table: torch.Tensor | None = None, *,
    block_size: int, window: int, width: int, compress_ratios: Sequence[int], max_seq_len: int | None = None, lane: int = -1,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    from ._triton import decode_step as kernels

    outputs = _outputs(positions, compressed_block_table, width, len(compress_ratios))
    kernels.prepare_decode_step(outputs, positions, seq_lens, query_start_loc, block_table, compressed_block_table, block_size, window, width, compress_ratios, max_seq_len)
    return outputs


def _outputs(positions: torch.Tensor, compressed_block_table: torch.Tensor | None, width: int, ratios: int) -> tuple[torch.Tensor, ...]:
    tokens, pages = positions.shape[0], 0 if compressed_block_table is None else compressed_block_table.shape[1]

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return positions.new_empty(shape, dtype=dtype)

    return new(tokens), new(tokens, dtype=torch.bool), new(tokens, dtype=torch.int64), new(tokens, width), new(tokens), new(ratios, tokens), new(tokens, pages)


def _fake(
    positions: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, block_table: torch.Tensor, compressed_block_table: torch.Tensor | None = None, *,
    block_size: int, window: int, width: int, compress_ratios: Sequence[int], max_seq_len: int | None = None, lane: int = -1,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    return _outputs(positions, compressed_block_table, width, len(compress_ratios))


def _make(
    device: torch.device | str, seed: int, lens: Sequence[int], *, pad: int = 0, blocks: int = 8, cblocks: int | None = 5, block_size: int = 4, high: int = 500,
    longest: int = 24, **sizes: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """A step whose requests run ``lens`` tokens at the end of random sequences, on tables with null and negative entries."""
    g = torch.Generator().manual_seed(seed)
    requests = len(lens)
    base = torch.randint(0, longest, (requests,), generator=g)
    positions = torch.cat([base[i] + torch.arange(n) for i, n in enumerate(lens)] + [torch.randint(0, 9, (pad,), generator=g)])
    starts = torch.tensor([sum(lens[:i]) for i in range(requests + 1)], dtype=torch.int32)
    seq_lens = (base + torch.tensor(list(lens), dtype=torch.int64)).to(torch.int32)

    def table(columns: int) -> torch.Tensor:
        return torch.where(torch.rand(requests, columns, generator=g) < 0.2, torch.randint(-1, 1, (requests, columns), generator=g), torch.randint(1, high, (requests, columns), generator=g)).to(torch.int32)

    args = (positions, seq_lens, starts, table(blocks), None if cblocks is None else table(cblocks))
    kwargs = {"block_size": block_size, "window": 6, "width": 8, "compress_ratios": [4, 128], **sizes}
    return tuple(None if a is None else a.to(device) for a in args), kwargs


def _samples(device: torch.device | str, seed: int = 0) -> Iterator[Sample]:
    yield Sample("decode, padded", *_make(device, seed, [1] * 5, pad=3))
    yield Sample("verification of three drafts", *_make(device, seed, [4] * 6))
    yield Sample("mixed with empty requests and a prefill chunk", *_make(device, seed, [1, 0, 4, 19, 0, 2], pad=2, compress_ratios=[4]))
    yield Sample("no compressed layers", *_make(device, seed, [1, 3], cblocks=None, compress_ratios=[]))
    yield Sample("more columns than a program's part", *_make(device, seed, [2, 1], cblocks=700, window=1040, width=1100, block_size=64, longest=1200, blocks=20))
    yield Sample("one token", *_make(device, seed, [1], block_size=1, window=1, width=1))
    yield Sample("no tokens", *_make(device, seed, [0, 0]))
    yield Sample("no requests", *_make(device, seed, [], pad=4))
    yield Sample("no blocks", *_make(device, seed, [1, 2], blocks=0, cblocks=0))
    yield Sample("ids past the int32 limit of slots, lengths limited", *_make(device, seed, [2] * 4, block_size=64, high=2**31 - 1, max_seq_len=9, lane=1))
    args, kwargs = _make(device, seed, [3] * 6, pad=1, compress_ratios=[1, 4, 2**40])
    low, high = -(2**31), 2**31 - 1
    positions = args[0].clone()
    positions[::3] = torch.tensor([-(2**63), -1, 2**63 - 1, 2**40, 0, 5, 6], device=device)
    lens = torch.tensor([2**63 - 1, -(2**63), 0, -1, 2**31, 7], device=device)
    yield Sample("positions and lengths out of range", (positions, lens, *args[2:]), kwargs)
    for label, starts in (("starts not ascending, tail of zeros", [2, 5, 3, 12, 15, 0, 0]), ("starts out of range", [low, -1, 4, high, 3, high, low])):
        yield Sample(label, (args[0], args[1], torch.tensor(starts, dtype=torch.int32, device=device), *args[3:]), kwargs)
    args, kwargs = _make(device, seed, [1, 4, 4, 1, 2, 2, 5, 5], blocks=16, cblocks=9)
    strided = (args[0][::2], args[1][::2], args[2][::2], args[3][::2, 1:12:2], args[4][:4].t().contiguous().t())
    yield Sample("strided views, transposed table", strided, kwargs | {"max_seq_len": 2**33})


def _sized(device: torch.device | str, n: int, seed: int = 0) -> Sample:
    args, kwargs = _make(device, seed, [4] * n, blocks=40, cblocks=8, block_size=64, longest=2000)
    return Sample(f"{n} requests", args, kwargs | {"window": 128, "width": 128})


def _bad_inputs(device: torch.device | str) -> Iterator[BadInput]:
    args, kwargs = _make(device, 0, [1, 2])

    def bad(label: str, place: int, value: object, error: type[Exception], match: str) -> BadInput:
        return BadInput(label, (*args[:place], value, *args[place + 1 :]), error, match, kwargs)

    def wrong(label: str, match: str, **changed: object) -> BadInput:
        return BadInput(label, args, ArgumentError, match, kwargs | changed)

    yield bad("int32 positions", 0, args[0].int(), ArgumentDtypeError, "positions must be int64, got int32")
    yield bad("float lengths", 1, args[1].float(), ArgumentDtypeError, "seq_lens must be int32 or int64")
    yield bad("one start a request", 2, args[2][:2], ArgumentShapeError, "query_start_loc must be one entry longer than seq_lens (2)")
    yield bad("table of one request", 3, args[3][:1], ArgumentShapeError, "block_table must be one row a request (2")
    yield bad("compressed table of one request", 4, args[4][:1], ArgumentShapeError, "compressed_block_table must be one row a request (2")
    yield bad("int64 compressed table", 4, args[4].long(), ArgumentDtypeError, "compressed_block_table must be int32")
    yield wrong("width below the window", "width must be at least window (6)", width=5)
    yield wrong("block size 0", "block_size must be between 1", block_size=0)
    yield wrong("ratio 0", "compress_ratios[1] must be at least 1, got 0", compress_ratios=[4, 0])
    yield wrong("negative limit", "max_seq_len must be at least 0, got -1", max_seq_len=-1)
    yield wrong("lane -2", "lane must be between -1 and 15, got -2", lane=-2)


PREPARE_DECODE_STEP.implement(check=_check, reference=_reference, torch_impl=_torch, triton=_triton, fake=_fake, samples=_samples, sized=_sized, bad_inputs=_bad_inputs)
