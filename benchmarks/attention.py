"""Sparse MLA decode over FP8 pages at the sizes of DeepSeek-V4: what ``auto`` takes of our kernels, Triton's by name, plain PyTorch for few tokens, FlashMLA
where PEERS_DIR holds it.

Window rows of a sliding window (consecutive positions, pages anywhere), records anywhere in a cache far larger than L2; a sink, bf16 queries.
Every provider's output is first compared with the fp64 reference (``rel_err``: norm of the difference over the norm): one above LIMIT has no
time. ``floor_us`` is what the copy rate of this run takes to read keys and queries and to write the output.

PEERS_DIR may hold ``flash_mla_interface.py`` and ``_flashmla_C.abi3.so`` (or ``.so.xz``; ``benchmarks/peers``). FlashMLA has its plan from the check
before, "planned" makes it anew in each call (16 heads, those of a rank among four, it does not take); "backend flashmla" is the op with ``backend="flashmla"``, which masks its rows first, "backend triton" with ``backend="triton"``,
and "fastest" with ``backend="fastest"``.

The case "draft step" is what a draft block costs with rows of 192 and of 256 columns: index rows of 1, 8 and 32 requests of 5 tokens each, then attention.
ATTENTION_TOKENS (comma-separated; of draft steps, requests) narrows the run; what is narrowed is written as ``attention-part.json``.
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

from dsv4_ops import _decode_backends, _flashmla, draft_swa_indices, kv_cache_insert, new_kv_cache, sparse_mla_decode
from dsv4_ops._decode_backends import Faster
from dsv4_ops.bench.timing import ColdReplays, copy_rate, launches
from dsv4_ops.sparse_decode import SPARSE_MLA_DECODE
from dsv4_ops.swa_indices import DRAFT_SWA_INDICES

from . import results

DEVICE, PAGE, PAGE_STRIDE, PAGES, DIM = "cuda", 64, 37440, 8192, 512
TOKENS, HEADS = (1, 6, 8, 16, 32, 64, 128), _decode_backends.MEASURED_HEADS
KEYS = {"window": (128, 128, 0), "draft block": (192, 133, 0), "draft block, width 256": (256, 133, 0), "window and records": (128, 128, 512)}
"""Width and length of window rows, and records."""
WINDOW, QUERIES, REQUESTS, WIDTHS = 128, 5, (1, 8, 32), (192, 256)
"""Of draft steps."""
BACK_END, TRITON = "dsv4_ops, backend flashmla", "dsv4_ops, backend triton"
SCALE, SETS, LIMIT = DIM**-0.5, 16, 1e-2
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


@dataclass(frozen=True)
class DraftStep:
    heads: int
    requests: int
    width: int

    @property
    def params(self) -> dict[str, Any]:
        tokens = self.requests * QUERIES
        return {"heads": self.heads, "tokens": tokens, "requests": self.requests, "width": self.width, "window_keys": WINDOW + QUERIES, "records": 0, "page": PAGE, "cache": "fp8"}

    @property
    def bytes(self) -> int:
        return self.requests * ((WINDOW + QUERIES) * 584 + QUERIES * (2 * self.heads * DIM * 2 + 2 * 4 * self.width))


def cases() -> Iterator[Case]:
    for heads in HEADS:
        for name in KEYS:
            for tokens in TOKENS:
                yield Case(name, heads, tokens)


def draft_steps() -> Iterator[DraftStep]:
    for heads in HEADS:
        for requests in REQUESTS:
            for width in WIDTHS:
                yield DraftStep(heads, requests, width)


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


def draft_inputs(step: DraftStep, cache: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Query, cache, committed tokens, block table, which requests are real, sink."""
    most = 64 * PAGE
    committed = torch.randint(WINDOW, most - QUERIES, (step.requests,), generator=generator, device=DEVICE).int()
    table = torch.randint(1, PAGES, (step.requests, most // PAGE), generator=generator, device=DEVICE).int()
    q = torch.randn(step.requests * QUERIES, step.heads, DIM, generator=generator, device=DEVICE).bfloat16()
    return q, cache, committed, table, torch.ones(step.requests, dtype=torch.bool, device=DEVICE), torch.randn(step.heads, generator=generator, device=DEVICE)


def draft_call(width: int, s: tuple[torch.Tensor, ...], backend: str) -> Any:
    q, cache, committed, table, real, sink = s
    rows = draft_swa_indices(committed, table, real, block_size=PAGE, window=WINDOW, block_queries=QUERIES, width=width)
    return sparse_mla_decode(q, cache, *rows, attn_sink=sink, scale=SCALE, backend=backend)


def draft_reference(width: int, s: tuple[torch.Tensor, ...]) -> Any:
    q, cache, committed, table, real, sink = s
    rows = DRAFT_SWA_INDICES.reference(committed.cpu(), table.cpu(), real.cpu(), block_size=PAGE, window=WINDOW, block_queries=QUERIES, width=width)
    return SPARSE_MLA_DECODE.reference(q, cache, *(r.to(DEVICE) for r in rows), attn_sink=sink, scale=SCALE)


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

    def run(self, case: Case, seed: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        sets = [inputs(case, *self.caches, generator) for _ in range(SETS)]
        providers: dict[str, list[Callable[[], Any]]] = {"dsv4_ops": [lambda s=s: sparse_mla_decode(*s, scale=SCALE) for s in sets]}  # type: ignore[misc]
        providers[TRITON] = [lambda s=s: sparse_mla_decode(*s, scale=SCALE, backend="triton") for s in sets]  # type: ignore[misc]
        if case.tokens == 1:
            providers["torch"] = [lambda s=s: SPARSE_MLA_DECODE.torch_impl(*s, scale=SCALE, backend="reference") for s in sets]  # type: ignore[misc]
        if self.peer is not None:
            if case.heads in _flashmla.HEADS:
                plan = self.peer.get_mla_metadata()[0]
                providers["flashmla"] = [flashmla_call(self.peer, s, plan) for s in sets]
                providers["flashmla, planned"] = [flashmla_call(self.peer, s, None) for s in sets]
            providers["dsv4_ops, fastest"] = [lambda s=s: sparse_mla_decode(*s, scale=SCALE, backend="fastest") for s in sets]  # type: ignore[misc]
            providers[BACK_END] = [lambda s=s: sparse_mla_decode(*s, scale=SCALE, backend="flashmla") for s in sets]  # type: ignore[misc]
        self.measure("sparse_mla_decode", case.name, case, providers, lambda i: SPARSE_MLA_DECODE.reference(*sets[i], scale=SCALE))

    def run_draft(self, step: DraftStep, seed: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        sets = [draft_inputs(step, self.caches[0], generator) for _ in range(SETS)]
        backends = {"dsv4_ops": "auto", TRITON: "triton"} | ({} if self.peer is None else {BACK_END: "flashmla"})
        providers: dict[str, list[Callable[[], Any]]] = {name: [lambda s=s, b=b: draft_call(step.width, s, b) for s in sets] for name, b in backends.items()}  # type: ignore[misc]
        self.measure("draft_swa_indices, sparse_mla_decode", "draft step", step, providers, lambda i: draft_reference(step.width, sets[i]))

    def measure(self, op: str, name: str, case: Case | DraftStep, providers: dict[str, list[Callable[[], Any]]], reference: Callable[[int], Any]) -> None:
        """A row for each provider: one call for each set. The first and the last are compared with ``reference(set)``."""
        right = {i: reference(i)[0].double() for i in (0, SETS - 1)}

        def error(result: Any, i: int) -> float:
            return round(float((result[0].double() - right[i]).norm() / right[i].norm()), 6)

        for provider, calls in providers.items():
            row: dict[str, Any] = {"op": op, "case": name, "params": case.params, "provider": provider, "floor_us": round(case.bytes / self.copy_GBps / 1e3, 2)}
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


def cells_of(rows: list[dict[str, Any]]) -> dict[tuple[int, int], dict[int, dict[str, float]]]:
    """(heads, columns) -> tokens -> microseconds of ``auto`` and of the FlashMLA back end, where measured and right."""
    cells: dict[tuple[int, int], dict[int, dict[str, float]]] = {}
    for row in rows:
        if row["op"] == "sparse_mla_decode" and row["provider"] in ("dsv4_ops", BACK_END) and row.get("ok") and "us_p50" in row:
            p = row["params"]
            cells.setdefault((p["heads"], p["width"] + p["records"]), {}).setdefault(p["tokens"], {})[row["provider"]] = row["us_p50"]
    return cells


def regions(rows: list[dict[str, Any]]) -> list[Faster]:
    """Where the FlashMLA back end beats ``auto`` from some number of tokens on: what FASTER_FLASHMLA of dsv4_ops/_decode_backends.py should hold."""
    cells, found = cells_of(rows), []
    for heads in sorted({heads for heads, _ in cells}):
        below = 0
        for columns in sorted(columns for h, columns in cells if h == heads):
            first = None
            for tokens, cell in sorted(cells[heads, columns].items(), reverse=True):
                both = "dsv4_ops" in cell and BACK_END in cell
                if both and cell[BACK_END] >= cell["dsv4_ops"]:
                    break
                first = tokens if both else first
            if first is not None:
                found.append(Faster(heads, range(below + 1, columns + 1), first))
            below = columns
    return found


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device")
        return 1
    start, chosen = time.perf_counter(), results.chosen_by("ATTENTION_TOKENS")
    wanted = [case for case in cases() if chosen(case.tokens)]
    bench = Bench()
    shape = _decode_backends.shape_of(torch.empty(1, 64, DIM, dtype=torch.bfloat16), bench.caches[0], torch.empty(1, WINDOW), None, None)
    env = {"copy_GBps": bench.copy_GBps, "auto": _decode_backends.ours("triton", shape, torch.cuda.get_device_capability()), "flashmla": bench.without_peer if bench.peer is None else "measured"}

    def record(name: str) -> None:
        results.write(name, env, method=METHOD, wall_s=round(time.perf_counter() - start, 1), rows=bench.rows)

    with results.measuring("attention", os.environ.get("ATTENTION_TOKENS"), record):
        for seed, case in enumerate(wanted):
            bench.run(case, seed)
        for seed, step in enumerate(step for step in draft_steps() if chosen(step.requests)):
            bench.run_draft(step, seed)
    for row in bench.rows:
        p = row["params"]
        print(f"{row['case']:24} {p['heads']:4} heads {p['tokens']:4} tokens {p['width']:4} columns {row['provider']:26} {row.get('us_p50', row.get('skipped', 'WRONG'))!s:>9} hot {row.get('hot_us', '-')!s:>8} floor {row['floor_us']:6} err {row.get('rel_err')}")
    print(f"FASTER_FLASHMLA = ({''.join(f'{region}, ' for region in regions(bench.rows))})  # for dsv4_ops/_decode_backends.py")
    return 0 if all(row["ok"] for row in bench.rows if row["provider"] in ("dsv4_ops", TRITON)) else 1


if __name__ == "__main__":
    sys.exit(main())
