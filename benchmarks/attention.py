"""Sparse MLA decode over FP8 pages at the sizes of DeepSeek-V4: ours, plain PyTorch for few tokens, FlashMLA where PEERS_DIR holds it.

Window rows of a sliding window (consecutive positions, pages anywhere), records anywhere in a cache far larger than L2; a sink, bf16 queries.
Every provider's output is first compared with the fp64 reference (``rel_err``: norm of the difference over the norm): one above LIMIT has no
time. ``floor_us`` is what the copy rate of this run takes to read keys and queries and to write the output.

PEERS_DIR may hold ``flash_mla_interface.py`` and ``_flashmla_C.abi3.so`` (or ``.so.xz``). FlashMLA has its plan from the check
before, "planned" makes it anew in each call; "backend flashmla" is the op with ``backend="flashmla"``, which masks its rows first. ATTENTION_TOKENS (comma-separated) narrows the run; what is narrowed is written as ``attention-part.json``.
"""

from __future__ import annotations

import importlib
import lzma
import os
import shutil
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsv4_ops import kv_cache_insert, new_kv_cache, sparse_mla_decode, testing
from dsv4_ops.bench.timing import ColdReplays, copy_rate, launches
from dsv4_ops.sparse_decode import SPARSE_MLA_DECODE

from . import results

DEVICE, PAGE, PAGE_STRIDE, PAGES, DIM = "cuda", 64, 37440, 8192, 512
TOKENS, HEADS = (1, 6, 8, 16, 32, 64, 128), (64, 128)
KEYS = {"window": (128, 128, 0), "draft block": (192, 133, 0), "draft block, width 256": (256, 133, 0), "window and records": (128, 128, 512)}
"""Width and length of window rows, and records."""
SCALE, SETS, LIMIT, FEW = DIM**-0.5, 16, 1e-2, 8
METHOD = f"cold L2 (256 MB read before each replay), CUDA graph of one call for each of {SETS} input sets, us a call over 11 replays; hot_us: the same on one set, nothing read"


@dataclass(frozen=True)
class Case:
    name: str
    heads: int
    tokens: int

    @property
    def params(self) -> dict[str, Any]:
        width, length, records = KEYS[self.name]
        return {"heads": self.heads, "tokens": self.tokens, "width": width, "window_keys": length, "records": records, "page": PAGE, "cache": "fp8"}

    @property
    def bytes(self) -> int:
        width, length, records = KEYS[self.name]
        return self.tokens * ((length + records) * 584 + 2 * self.heads * DIM * 2 + 4 * (width + records))


def cases() -> Iterator[Case]:
    for heads in HEADS:
        for name in KEYS:
            for tokens in TOKENS:
                yield Case(name, heads, tokens)


def filled_cache(generator: torch.Generator) -> torch.Tensor:
    cache = new_kv_cache(PAGES, PAGE, page_stride=PAGE_STRIDE, device=DEVICE)
    for first in range(1, PAGES, 1024):
        slots = torch.arange(first * PAGE, min(first + 1024, PAGES) * PAGE, device=DEVICE)
        kv_cache_insert(torch.randn(len(slots), DIM, generator=generator, device=DEVICE).bfloat16(), cache, slots)
    return cache


def inputs(case: Case, swa_cache: torch.Tensor, extra_cache: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor | None, ...]:
    """Arguments of the op."""
    width, length, records = KEYS[case.name]

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device=DEVICE)

    pages = whole(1, PAGES, case.tokens, length // PAGE + 2)
    place = whole(0, PAGE, case.tokens, 1) + torch.arange(length, device=DEVICE)
    indices = torch.full((case.tokens, width), -1, dtype=torch.int32, device=DEVICE)
    indices[:, :length] = (pages.gather(1, place // PAGE) * PAGE + place % PAGE).int()
    q = torch.randn(case.tokens, case.heads, DIM, generator=generator, device=DEVICE).bfloat16()
    extra: tuple[torch.Tensor | None, ...] = (None, None, None)
    if records:
        extra = (extra_cache, whole(PAGE, PAGES * PAGE, case.tokens, records).int(), torch.full((case.tokens,), records, dtype=torch.int32, device=DEVICE))
    lens = torch.full((case.tokens,), length, dtype=torch.int32, device=DEVICE)
    return (q, swa_cache, indices, lens, *extra, torch.randn(case.heads, generator=generator, device=DEVICE))


# ---- FlashMLA --------------------------------------------------------------------------------------------------------


def flashmla(folder: Path) -> types.ModuleType | None:
    """FlashMLA's own interface over its library alone; None where the folder lacks either.

    Both are laid out as they lie in vLLM, on the import path, so that the op's back end finds them too.
    """
    name, interface = "_flashmla_C.abi3.so", folder / "flash_mla_interface.py"
    library, packed = folder / name, folder / f"{name}.xz"
    if not interface.exists() or not (library.exists() or packed.exists()):
        return None
    root = Path(tempfile.mkdtemp()) / "vllm"
    place = root / "third_party" / "flashmla"
    place.mkdir(parents=True)
    for package in (root, place.parent, place):
        (package / "__init__.py").touch()
    shutil.copy(interface, place)
    (root / name).write_bytes(library.read_bytes() if library.exists() else lzma.decompress(packed.read_bytes()))
    sys.path.insert(0, str(root.parent))
    importlib.invalidate_caches()
    return importlib.import_module("vllm.third_party.flashmla.flash_mla_interface")


def flashmla_call(peer: types.ModuleType, args: tuple[Any, ...], plan: Any) -> Callable[[], Any]:
    """``plan`` is kept from call to call; None makes one in each."""
    q, cache, indices, lens, extra_cache, extra_indices, extra_lens, sink = args
    out = torch.empty_like(q)[:, None]

    def call() -> Any:
        found = peer.flash_mla_with_kvcache(
            q=q[:, None], k_cache=cache.unsqueeze(2), block_table=None, head_dim_v=DIM, cache_seqlens=None, is_fp8_kvcache=True,
            tile_scheduler_metadata=peer.get_mla_metadata()[0] if plan is None else plan, indices=indices[:, None], topk_length=lens, softmax_scale=SCALE,
            attn_sink=sink, extra_k_cache=None if extra_cache is None else extra_cache.unsqueeze(2),
            extra_indices_in_kvcache=None if extra_indices is None else extra_indices[:, None], extra_topk_length=extra_lens, out=out,
        )  # fmt: skip
        return found[0][:, 0], found[1]

    return call


# ---- the run ---------------------------------------------------------------------------------------------------------


class Bench:
    def __init__(self) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        self.caches = filled_cache(generator), filled_cache(generator)
        self.replays, self.copy_GBps, self.rows = ColdReplays(), copy_rate(), list[dict[str, Any]]()
        self.peer, self.without_peer = None, "PEERS_DIR is not set or lacks it"
        folder = os.environ.get("PEERS_DIR")
        try:
            self.peer = flashmla(Path(folder).resolve()) if folder else None
        except Exception as error:
            self.without_peer = f"{type(error).__name__}: {str(error)[:200]}"

    def providers(self, case: Case, sets: list[tuple[Any, ...]]) -> Iterator[tuple[str, list[Callable[[], Any]]]]:
        yield "dsv4_ops", [lambda s=s: sparse_mla_decode(*s, scale=SCALE) for s in sets]  # type: ignore[misc]
        if case.tokens <= FEW:
            yield "torch", [lambda s=s: SPARSE_MLA_DECODE.torch_impl(*s, scale=SCALE) for s in sets]  # type: ignore[misc]
        if self.peer is not None:
            plan = self.peer.get_mla_metadata()[0]
            yield "flashmla", [flashmla_call(self.peer, s, plan) for s in sets]
            yield "flashmla, planned", [flashmla_call(self.peer, s, None) for s in sets]
            yield "dsv4_ops, backend flashmla", [lambda s=s: sparse_mla_decode(*s, scale=SCALE, backend="flashmla") for s in sets]  # type: ignore[misc]

    def run(self, case: Case, seed: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        sets = [inputs(case, *self.caches, generator) for _ in range(SETS)]
        right = {i: SPARSE_MLA_DECODE.reference(*sets[i], scale=SCALE)[0].double() for i in (0, SETS - 1)}

        def error(result: Any, i: int) -> float:
            return round(float((result[0].double() - right[i]).norm() / right[i].norm()), 6)

        for name, calls in self.providers(case, sets):
            row: dict[str, Any] = {"op": "sparse_mla_decode", "case": case.name, "params": case.params, "provider": name, "floor_us": round(case.bytes / self.copy_GBps / 1e3, 2)}
            try:
                row["rel_err"] = error(calls[0](), 0)
                row["ok"] = row["rel_err"] < LIMIT
                if row["ok"]:
                    times, last = self.replays.measure(calls)
                    row["ok"] = error(last, SETS - 1) < LIMIT
                    hot, _ = self.replays.measure(calls[:1] * SETS, cold=False)
                    if row["ok"]:
                        row.update(times, hot_us=hot["us_p50"], launches=launches(calls[0]))
            except Exception as failure:
                row.update(ok=False, skipped=f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:200]}")
            self.rows.append(row)


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device")
        return 1
    start, chosen = time.perf_counter(), results.chosen_by("ATTENTION_TOKENS")
    wanted = [case for case in cases() if chosen(case.tokens)]
    bench = Bench()
    backend = next(op.backends["cuda"] for op in testing.ops() if op.name == "sparse_mla_decode")
    for seed, case in enumerate(wanted):
        bench.run(case, seed)
    env = {"copy_GBps": bench.copy_GBps, "backend": backend, "flashmla": bench.without_peer if bench.peer is None else "measured"}
    results.write("attention-part" if os.environ.get("ATTENTION_TOKENS") else "attention", env, method=METHOD, wall_s=round(time.perf_counter() - start, 1), rows=bench.rows)
    for row in bench.rows:
        p = row["params"]
        print(f"{row['case']:24} {p['heads']:4} heads {p['tokens']:4} tokens {row['provider']:18} {row.get('us_p50', row.get('skipped', 'WRONG'))!s:>9} hot {row.get('hot_us', '-')!s:>8} floor {row['floor_us']:6} err {row.get('rel_err')}")
    return 0 if all(row["ok"] for row in bench.rows if row["provider"] == "dsv4_ops") else 1


if __name__ == "__main__":
    sys.exit(main())
