"""The conformance kit run on functions of others: which cases of ``dsv4_ops.testing`` differ, and in what.

PEERS_DIR holds ``peers.py`` with ``TOPK_PEERS`` (as for ``benchmarks.topk``) and ``triton_extracted.py`` with ``build_mixed_kernel`` and
``_prepare_dflash_inputs_kernel`` (as for ``benchmarks.kernels``), as ``benchmarks/peers`` makes them. Every case that a peer can be called with is run once, and its result
is judged by the contract, then by the relaxations of LADDERS, one after the other. A row of the result is a case of a provider:

=============  =========================================================================================================
``verdict``    ``contract``; the relaxation that it needs (``order any``); ``wrong``; ``raises``; ``hangs``; ``crashes``;
               ``not called`` (outside what the peer takes, ``why`` says in what); ``not run``, ``not loaded`` (``message`` says why)
``in_range``   whether lengths, ids and positions of the case are in range, and its block tables full
``message``    what differs: from the contract, or for ``wrong`` from the most relaxed judgement
=============  =========================================================================================================

A provider runs in a process of its own, AT_ONCE of them beside each other, which is killed when a case takes longer than CASE_S seconds (15): a kernel that waits for
ever is a result. Then another process goes on with the next case, RESTARTS times at most. CONFORMANCE_PROVIDERS (separated by semicolons) narrows the run;
CONFORMANCE_DEVICE=cpu is for peers that run there (Triton's interpreter). A run that is stopped is written as ``conformance-part.json``.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsv4_ops import testing
from dsv4_ops.dflash import DFlashInputs
from dsv4_ops.mixed_indices import mixed_row_width
from dsv4_ops.testing import Case, ConformanceError

from . import results

DEVICE = os.environ.get("CONFORMANCE_DEVICE", "cuda")
CASE_S, START_S, RESTARTS = float(os.environ.get("CASE_S", "15")), 180.0, 3
AT_ONCE = 8 if (os.cpu_count() or 1) >= 16 else 1
STOPPED = threading.Event()
NOT_KERNELS = ("empty", "torch_bare", "torch_compiled")

_SAMPLING = tuple(name for name in DFlashInputs._fields if name not in ("temperature", "seeds"))
LADDERS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "topk": [("contract", {}), ("order any", {"order": "any"}), ("order, ties any", {"order": "any", "ties": "any"}), ("order, ties, nan any", {"order": "any", "ties": "any", "nan": "any"})],
    "build_mixed_sparse_indices": [("contract", {}), ("beyond_length any", {"beyond_length": "any"})],
    "prepare_dflash_inputs": [("contract", {}), ("without copies of temperature and seeds", {"fields": _SAMPLING}), ("and inert_samples any", {"fields": _SAMPLING, "inert_samples": "any"})],
}
CASES: dict[str, Callable[..., list[Case]]] = {"topk": testing.topk_cases, "build_mixed_sparse_indices": testing.mixed_indices_cases, "prepare_dflash_inputs": testing.dflash_inputs_cases}
IN_RANGE: dict[str, dict[str, Any]] = {"topk": {"lengths_in_range": True}, "build_mixed_sparse_indices": {"in_range": True, "mapped": True}, "prepare_dflash_inputs": {"in_range": True, "mapped": True}}


@dataclass(frozen=True)
class Provider:
    """``fn`` is called as the op; ``refuses(case)`` says why a case cannot be given to it, or nothing."""

    name: str
    op: str
    fn: Callable[..., Any]
    refuses: Callable[[Case], str]
    options: dict[str, Any]


def judged(provider: Provider) -> Iterator[tuple[Case, bool, list[tuple[str, Case]]]]:
    """(case, whether it is in range, its ladder), those in range first: what may hang comes last."""
    by_rung = [(name, {c.id: c for c in CASES[provider.op](DEVICE, **provider.options, **relaxed)}) for name, relaxed in LADDERS[provider.op]]
    inside = {c.id for c in CASES[provider.op](DEVICE, **provider.options, **IN_RANGE[provider.op])}
    for wanted in (True, False):
        for label, case in by_rung[0][1].items():
            if (label in inside) == wanted:
                yield case, wanted, [(name, cases[label]) for name, cases in by_rung]


def verdict(provider: Provider, case: Case, ladder: list[tuple[str, Case]]) -> dict[str, Any]:
    why = provider.refuses(case)
    if why:
        return {"verdict": "not called", "why": why}
    try:
        got = case.call(provider.fn)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    except ConformanceError as error:
        return {"verdict": "wrong", "message": first_lines(error)}
    except Exception as error:
        return {"verdict": "raises", "message": f"{type(error).__name__}: {first_lines(error)}", "fatal": "CUDA error" in str(error)}
    message = ""
    for name, rung in ladder:
        try:
            rung.check(got)
        except ConformanceError as error:
            message = message or first_lines(error)
            last = error
        else:
            return {"verdict": name, **({"message": message} if message else {})}
    return {"verdict": "wrong", "message": first_lines(last), "reproduction": last.reproduction}


def first_lines(error: Exception) -> str:
    text = " ".join(str(error).split("\n\nTo repeat it")[0].split())
    return re.sub(r"^\w+: case .*?: (?=Tensor|[a-z]\w*: |row \d|the function)", "", text)[:400]


# Providers


def peers_folder() -> Path:
    folder = Path(os.environ["PEERS_DIR"]).resolve()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return folder


def topk_provider(name: str, k: int | None) -> Provider:
    peers = importlib.import_module("peers")
    prepare, accepts = peers.TOPK_PEERS[name]

    def refuses(case: Case) -> str:
        logits, lengths, count = case.args[:3]
        rows, width = logits.shape
        if rows == 0 or width == 0:
            return "no rows or columns"
        if lengths.dtype != torch.int32 or lengths.dim() != 1 or not lengths.is_contiguous() or lengths.numel() != rows:
            return "lengths other than int32 [rows]"
        if logits.dtype != torch.float32 and name not in getattr(peers, "BFLOAT16", ()):
            return "bfloat16"
        return "" if accepts(rows, count, width, logits.stride(0)) else f"rows {rows}, k {count}, width {width}, stride {logits.stride(0)}"

    def fn(logits: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
        out = torch.full((logits.shape[0], k), -7, dtype=torch.int32, device=logits.device)
        prepare(logits.shape[0], k, logits.shape[1], logits.shape[1])(logits, lengths, out)
        return out

    return Provider(name if k else f"{name}, k of each case", "topk", fn, refuses, {"k": k, "max_seq_len": False})


def kernels() -> Any:
    peers_folder()
    return importlib.import_module("triton_extracted")


def mixed_provider() -> Provider:
    module = kernels()

    def refuses(case: Case) -> str:
        a = case.inputs
        valid, records = a["is_valid_token"], a["prefill_topk_indices"]
        decodes, requests, ids = a["decode_swa_indices"].shape[0], a["block_table"].shape[0], a["token_to_req_indices"]
        if not valid.numel() or not requests or not a["block_table"].shape[1] or not a["compressed_block_table"].shape[1]:
            return "no tokens, requests or blocks"
        if a["decode_swa_indices"].shape[1] > a["window"] and decodes < valid.numel():
            return "prefill rows beside storage that is wider than the window"
        if a.get("decode_topk_lens") is not None and not a.get("decode_indices_are_global"):
            return "records with lengths"
        if not all(t.stride(-1) == 1 for t in (a["decode_swa_indices"], a["decode_topk_indices"], a["block_table"], a["compressed_block_table"])):
            return "columns that are not dense"
        tokens, compressed = a["block_table"].shape[1] * a["block_size"], a["compressed_block_table"].shape[1] * a["compressed_block_size"]
        positions, entries = a["positions"][decodes:], a["decode_topk_indices"]
        lens = a["decode_swa_lens"]
        safe = ((ids >= 0) & (ids < requests)).all() and ((positions >= 0) & (positions < tokens)).all() and ((lens >= 0) & (lens <= a["decode_swa_indices"].shape[1])).all()
        safe = safe and (a.get("decode_indices_are_global") or bool((entries < compressed).all())) and (records is None or bool((records < compressed).all()))
        if not bool(safe):
            return "ids, positions, lengths or records out of range: read out of bounds"
        if records is not None and records.numel():
            seen = ((positions + 1) // a.get("compress_ratio", 1)).clamp(max=records.shape[1])
            listed = torch.arange(records.shape[1], device=records.device) < seen[:, None]
            if not bool(((records >= 0) == listed).all()):
                return "records of a prefill token that are not the first (position + 1) // ratio columns"
        return ""

    def fn(
        swa: torch.Tensor, swa_lens: torch.Tensor, topk: torch.Tensor, prefill: torch.Tensor | None, positions: torch.Tensor, requests: torch.Tensor, valid: torch.Tensor,
        table: torch.Tensor, compressed: torch.Tensor, *, block_size: int, compressed_block_size: int, window: int, compress_ratio: int = 1,
        decode_topk_lens: torch.Tensor | None = None, decode_indices_are_global: bool = False, block_span: int | None = None, compressed_block_span: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        (decodes, width), k, tokens, device = swa.shape, topk.shape[1], positions.shape[0], positions.device
        columns = mixed_row_width(width, k)
        out, lens = torch.full((tokens, columns), -7, dtype=torch.int32, device=device), torch.full((tokens,), -7, dtype=torch.int32, device=device)
        # The peer finds a row's window from the lengths of its request. So each token gets a request of its own: committed tokens and
        # queries of a draft block that make its window length, or a query of one token at its position.
        committed = (swa_lens - 1).clamp(0, window)
        queries = torch.cat([swa_lens - committed, torch.ones_like(requests[decodes:])]).clamp(min=0)
        seq_lens = torch.cat([committed, positions[decodes:].to(torch.int32)]) + queries
        ids = 2 * torch.arange(tokens, device=device, dtype=torch.int32)
        starts = torch.stack([ids // 2, ids // 2 + queries], 1).flatten().to(torch.int32)
        each = [t[requests.long()].repeat_interleave(2, 0).contiguous() for t in (table, compressed)]
        if prefill is None:
            prefill = torch.arange(k, dtype=torch.int32, device=device).expand(tokens - decodes, k).contiguous()
        prefill = prefill.contiguous()
        padded, lengths = columns - width, decode_topk_lens if decode_topk_lens is not None else ids
        module.build_mixed_kernel[(tokens,)](
            out, out.stride(0), lens, swa, swa.stride(0), topk, topk.stride(0), lengths.contiguous(), valid.contiguous(), prefill, prefill.stride(0), ids, ids, starts,
            seq_lens.repeat_interleave(2), ids, each[0], each[0].stride(0), block_size, block_span or block_size, each[1], each[1].stride(0), compressed_block_size,
            compressed_block_span or compressed_block_size, decodes, WINDOW_SIZE=window, SWA_INDEX_WIDTH=width, IMAGE_WIDTH=0, COMPRESS_RATIO=compress_ratio, TOP_K=k,
            PADDED_TOP_K=padded, PREFILL_TOPK_STRIDE=k, DECODE_COMPRESSED_TOPK=k, DECODE_COMPRESSED_INDICES_ARE_LOCAL=not decode_indices_are_global,
            HAS_DECODE_COMPRESSED_LENS=decode_topk_lens is not None, WINDOW_BLOCK_SIZE=power_of_2(width), TOPK_BLOCK_SIZE=power_of_2(padded), num_warps=1,
        )  # fmt: skip
        return out, lens

    return Provider("vllm build_flashinfer_mixed_sparse_indices", "build_mixed_sparse_indices", fn, refuses, {})


def dflash_provider() -> Provider:
    module = kernels()

    def refuses(case: Case) -> str:
        a = case.inputs
        starts, states, positions = a["query_start_loc"], a["last_sampled"].shape[0], a["target_positions"]
        lens = starts.diff()
        if len(a["block_tables"]) != 1 or lens.numel() == 0 or a["block_tables"][0].shape[1] == 0:
            return "no requests, no blocks, or other than one KV group"
        if a.get("cp_sharded") is not None:
            return "flags of sharded groups"
        safe = (lens > 0).all() and int(starts[0]) == 0 and int(starts[-1]) <= positions.shape[0] and ((a["idx_mapping"] >= 0) & (a["idx_mapping"] < states)).all()
        safe = bool(safe) and bool((starts[1:] - a["num_rejected"] >= 1).all()) and bool((a["num_rejected"] >= 0).all())
        return "" if safe and bool(((positions >= 0) & (positions < 2**31)).all()) else "requests without tokens or state, or values out of range: read out of bounds"

    def fn(
        positions: torch.Tensor, starts: torch.Tensor, mapping: torch.Tensor, sampled: torch.Tensor, rejected: torch.Tensor, last: torch.Tensor, following: torch.Tensor,
        temperature: torch.Tensor, seeds: torch.Tensor, tables: list[torch.Tensor], sizes: list[int], *, mask_token_id: int, num_speculative_tokens: int, max_reqs: int,
        max_tokens: int, max_model_len: int, sample_from_anchor: bool = False, cp_rank: int = 0, cp_size: int = 1, cp_interleave: int = 1, **_: Any,
    ) -> DFlashInputs:  # fmt: skip
        n, requests, device = num_speculative_tokens, starts.shape[0] - 1, positions.device
        queries, table = n + (0 if sample_from_anchor else 1), tables[0].contiguous()

        def stale(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.full(shape, 1 if dtype == torch.bool else 77, dtype=dtype, device=device)

        i4, i8 = torch.int32, torch.int64
        out = DFlashInputs(
            stale(i4, max_tokens), stale(i8, max_tokens), stale(torch.bool, max_tokens), stale(i4, max_reqs + 1), stale(i4, max_reqs), stale(i8, 1, max_tokens), stale(i8, positions.shape[0]),
            stale(i8, 1, positions.shape[0]), stale(i8, max_reqs * n), stale(i8, max_reqs * n), stale(i4, max_reqs * n), stale(torch.float32, last.shape[0]), stale(i8, last.shape[0]),
        )  # fmt: skip
        span = int(starts.diff().max()) + queries
        block = min(256, power_of_2(span))
        module._prepare_dflash_inputs_kernel[(requests, -(-span // block))](
            *out, positions, starts, mapping, last, following, sampled, rejected, temperature, seeds, table, table.stride(0), mask_token_id, sizes[0], queries, n, max_reqs, max_tokens,
            max_model_len, cp_rank, SAMPLE_FROM_ANCHOR=sample_from_anchor, PAD_SLOT_ID=-1, CP_SIZE=cp_size, CP_INTERLEAVE=cp_interleave, BLOCK_SIZE=block,
        )  # fmt: skip
        return out

    return Provider("vllm _prepare_dflash_inputs", "prepare_dflash_inputs", fn, refuses, {})


def power_of_2(n: int) -> int:
    return 1 << (max(n, 1) - 1).bit_length()


def providers() -> dict[str, Callable[[], Provider]]:
    """What PEERS_DIR has, each made in the process that runs it."""
    folder, found = peers_folder(), {}
    if (folder / "peers.py").exists():
        for name, (_, accepts) in importlib.import_module("peers").TOPK_PEERS.items():
            if name in NOT_KERNELS:
                continue
            found[name] = lambda name=name: topk_provider(name, 512)
            if accepts(1, 8, 4096, 4096):
                found[f"{name}, k of each case"] = lambda name=name: topk_provider(name, None)
    if (folder / "triton_extracted.py").exists():
        found |= {"vllm build_flashinfer_mixed_sparse_indices": mixed_provider, "vllm _prepare_dflash_inputs": dflash_provider}
    return found


# Processes


def child(name: str, first: int, path: Path) -> int:
    """Run the cases of a provider from number ``first`` on; a line before each and one after."""
    with path.open("a") as file:

        def say(**line: Any) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        provider = providers()[name]()
        for i, (case, inside, ladder) in enumerate(judged(provider)):
            if i >= first:
                head = {"i": i, "op": provider.op, "provider": name, "case": case.id, "in_range": inside}
                say(state="start", **head)
                row = verdict(provider, case, ladder)
                fatal = row.pop("fatal", False)
                say(state="done", **head, **row)
                if fatal:
                    return 3
        say(state="end")
    return 0


def lines_of(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def run_provider(name: str, case_s: float = CASE_S, start_s: float = START_S) -> list[dict[str, Any]]:
    rows: dict[int, dict[str, Any]] = {}
    first, restarts = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        while True:
            path = Path(folder) / f"{first}.jsonl"
            with (Path(folder) / "log").open("w") as log:
                process = subprocess.Popen([sys.executable, "-m", "benchmarks.conformance", "--run", name, str(first), str(path)], cwd=results.ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)
                seen, since = 0, time.monotonic()
                while process.poll() is None:
                    time.sleep(0.05)
                    count = len(lines_of(path))
                    if count != seen:
                        seen, since = count, time.monotonic()
                    if STOPPED.is_set() or time.monotonic() - since > (case_s if seen else start_s):
                        process.kill()
                        process.wait()
                        break
            lines = lines_of(path)
            for line in lines:
                if line["state"] == "done":
                    rows[line["i"]] = {key: value for key, value in line.items() if key not in ("state", "i")}
            started = [line for line in lines if line["state"] == "start"]
            if STOPPED.is_set() or (lines and lines[-1]["state"] == "end"):
                break
            if not started:
                said = (Path(folder) / "log").read_text().strip().splitlines() or ["no output"]
                rows[first] = {"provider": name, "verdict": "not run" if rows else "not loaded", "message": f"cases from number {first} on: {said[-1][:400]}"}
                break
            last = started[-1]
            if last["i"] not in rows:
                killed = process.returncode is not None and process.returncode < 0 and time.monotonic() - since > case_s
                head = {key: value for key, value in last.items() if key not in ("state", "i")}
                rows[last["i"]] = {**head, "verdict": "hangs" if killed else "crashes", "message": f"no answer in {case_s:g} s" if killed else f"exit status {process.returncode}"}
            first, restarts = last["i"] + 1, restarts + 1
            if restarts > RESTARTS:
                rows[first] = {"provider": name, "verdict": "not run", "message": f"cases from number {first} on, after {restarts} that hang, crash or leave a CUDA error"}
                break
    return [rows[i] for i in sorted(rows)]


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for row in rows:
        mine = counts.setdefault(row["provider"], {})
        mine[row["verdict"]] = mine.get(row["verdict"], 0) + 1
    return counts


def main() -> int:
    if sys.argv[1:2] == ["--run"]:
        return child(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    if DEVICE == "cuda" and not torch.cuda.is_available():
        print("no CUDA device (CONFORMANCE_DEVICE=cpu runs peers that need none)")
        return 1
    if not os.environ.get("PEERS_DIR"):
        print("PEERS_DIR is not set: no function to run the kit on")
        return 1
    wanted = [part.strip() for part in os.environ.get("CONFORMANCE_PROVIDERS", "").split(";") if part.strip()]
    chosen = [name for name in providers() if not wanted or name in wanted]
    if not chosen:
        print(f"no provider is left of {wanted}; PEERS_DIR has {', '.join(providers())}")
        return 1
    start, done = time.perf_counter(), dict[str, list[dict[str, Any]]]()

    def record(topic: str) -> None:
        rows = [row for name in chosen for row in done.get(name, [])]
        missing = [name for name in chosen if name not in done]
        results.write(topic, {"device": DEVICE}, quiet=True, summary=summary(rows), wall_s=round(time.perf_counter() - start, 1), **({"missing": missing} if missing else {}), rows=rows)

    with results.measuring("conformance", None, record), concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        running = {pool.submit(run_provider, name): name for name in chosen}
        try:
            for ended in concurrent.futures.as_completed(running):
                done[running[ended]] = ended.result()
                record("conformance-part")
        except BaseException:
            STOPPED.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    rows = [row for name in chosen for row in done[name]]
    for name, counts in summary(rows).items():
        print(f"{name}: {', '.join(f'{count} {what}' for what, count in counts.items())}")
        for row in rows:
            if row["provider"] == name and row["verdict"] in ("wrong", "raises", "hangs", "crashes", "not loaded"):
                print(f"    {row['verdict']}{'' if row.get('in_range', True) else ' (out of range)'}: {row.get('case', '')}: {row.get('message', '')[:160]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
