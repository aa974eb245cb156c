"""Takes single fixes out of the package, one at a time, and shows that a test notices.

    python tests/mutations.py [NAME ...] [--table FILE]

Each mutation replaces one piece of source text in a copy of the project (the text must occur there, so that a mutation cannot
silently become a no-op when the code moves), then runs the named tests on the copy with the compiled parts off. The
unchanged copy must pass the same tests first. Exit code 1 when a mutation survives.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutation:
    name: str
    what: str
    file: str
    old: str
    new: str
    tests: str
    """Arguments for pytest."""


MUTATIONS: tuple[Mutation, ...] = (
    # Clamp of lengths.
    Mutation("length-unsigned", "a length of -1 counts as 0", "dsv4_ops/topk.py", "lengths.flatten().to(torch.int64).clamp(0, width)", "(lengths.flatten().to(torch.int64) & 0xFFFFFFFF).clamp(0, width)", "tests/test_topk.py -k A01"),
    Mutation("length-past-limit", "columns past max_seq_len are never read", "dsv4_ops/topk.py", "width if max_seq_len is None else min(width, max_seq_len)", "width", "tests/test_topk.py -k A11"),
    Mutation("nan-selected", "NaN is never selected", "dsv4_ops/topk.py", "torch.where(magnitude > 0x7F800000, 0, key)", "key", "tests/test_topk.py -k A09"),
    Mutation("mtp-negative", "the length of a padded request is not negative", "dsv4_ops/context_lens.py", "back).clamp(min=0, max=max_seq_len)", "back)", "tests/test_context_lens.py -k B01"),
    # Rejected suffix.
    Mutation("rejected-suffix", "context rows of rejected tokens have slot -1", "dsv4_ops/dflash.py", " & (token - _load(start, (owner,), owned) < _load(kept, (owner,), owned))", "", "tests/test_dflash.py -k D04"),
    # -1 in a mapping.
    Mutation("draft-mapping", "rows past the batch map to no request", "dsv4_ops/dflash.py", "padded(mapping[:, sampling], a.max_reqs * samples, -1, torch.int32)", "padded(mapping[:, sampling], a.max_reqs * samples, 0, torch.int32)", "tests/test_dflash.py -k D12"),
    Mutation("inert-rows", "sampling does nothing for mapping -1", "dsv4_ops/sampling.py", "(idx_mapping >= 0) & (idx_mapping < count)", "idx_mapping < count", "tests/test_sampling.py -k inert"),
    Mutation("placeholder-draft", "a draft id of -1 is rejected", "dsv4_ops/rejection.py", "proposed & (chance * q < p)", "(chance * q < p)", "tests/test_sampling.py -k H07"),
    Mutation("hole-attended", "attention masks holes", "dsv4_ops/sparse_decode.py", "masked = block < 0", "masked = block < -1", "tests/test_sparse_decode.py -k C06"),
    # The null block.
    Mutation("null-block-insert", "nothing is written to block 0", "dsv4_ops/kv_cache.py", "valid = (slots >= block_size)", "valid = (slots >= 0)", "tests/test_kv_cache.py"),
    Mutation("null-block-index", "a null block gives slot -1", "dsv4_ops/_slots.py", "(physical > _checks.NULL_BLOCK)", "(physical >= _checks.NULL_BLOCK)", "tests/test_swa_indices.py"),
    Mutation("null-block-draft", "draft KV never goes to the null block", "dsv4_ops/dflash.py", "mapped = block > _checks.NULL_BLOCK", "mapped = block >= _checks.NULL_BLOCK", "tests/test_dflash.py -k D01"),
    Mutation("model-limit", "positions past the limit have no slot", "dsv4_ops/dflash.py", "inside = alive & (position < a.max_model_len)", "inside = alive", "tests/test_dflash.py -k D02"),
    # Width and window.
    Mutation("width-as-window", "the storage width is not the window", "dsv4_ops/swa_indices.py", "first = (a.positions - (a.window - 1)).clamp(min=0)", "first = (a.positions - (a.width - 1)).clamp(min=0)", "tests/test_swa_indices.py -k C02"),
    # Noise.
    Mutation("shared-noise", "recovery has noise of its own", "dsv4_ops/_philox.py", "STREAM_RECOVERY = 3", "STREAM_RECOVERY = 1", "tests/test_sampling.py -k H01"),
    Mutation("one-hot-proposal", "a greedy proposal has a one-hot law", "dsv4_ops/rejection.py", "draft_logits is None or greedy_draft or drafts == 0", "draft_logits is None or drafts == 0", "tests/test_sampling.py -k H04"),
    Mutation("kernel-noise", "the kernel's recovery has noise of its own", "dsv4_ops/_triton/rejection.py", "tl.where(rejected, STREAM_RECOVERY, STREAM_PLAIN)", "tl.where(rejected, 1, STREAM_PLAIN)", "tests/test_sampling_cuda.py -k interpreted"),
    Mutation("kernel-counter", "each call counts its programs from zero", "dsv4_ops/_triton/rejection.py", "tl.store(finished_ptr + request, 0)", "pass", "tests/test_sampling_cuda.py -k interpreted"),
    Mutation("kernel-scale", "tiles are compared on one scale", "dsv4_ops/_triton/sampling.py", "arrival * exp2((top - level) * scale)", "arrival", "tests/test_sampling_cuda.py -k interpreted"),
    Mutation("kernel-nothing-left", "a tile with nothing left does not draw", "dsv4_ops/_triton/rejection.py", "level = tl.where(left, 0.0, -INFINITY)", "level = tl.where(left, 0.0, 0.0)", "tests/test_sampling_cuda.py -k interpreted"),
    Mutation("kernel-placeholder", "a placeholder is followed by the target's own law", "dsv4_ops/_triton/rejection.py", "rejected = count < end", "rejected = count < DRAFTS", "tests/test_sampling_cuda.py -k interpreted"),
    # Kernels of draft inputs, steps, KV rows and the activation.
    Mutation("kernel-running-start", "starts that are not ascending are read as their running maximum", "dsv4_ops/_triton/dflash.py", "running = tl.maximum(tl.associative_scan(own, 0, _larger), ", "running = tl.maximum(own, ", "tests/test_dflash_cuda.py -k interpreted"),
    Mutation("kernel-rejected", "context rows of rejected tokens have slot -1", "dsv4_ops/_triton/dflash.py", " - tl.maximum(rejected, 0))", ")", "tests/test_dflash_cuda.py -k interpreted"),
    Mutation("kernel-null-block", "draft KV never goes to the null block", "dsv4_ops/_triton/dflash.py", "mapped = block > 0", "mapped = block >= 0", "tests/test_dflash_cuda.py -k interpreted"),
    Mutation("kernel-late-draft", "a drafter sees nothing from before it started", "dsv4_ops/_triton/dflash.py", "first = tl.maximum(first, tl.load(draft_start_ptr", "first = tl.minimum(first, tl.load(draft_start_ptr", "tests/test_dflash_cuda.py -k interpreted"),
    Mutation("kernel-second-chunk", "requests past the first chunk are searched", "dsv4_ops/_triton/decode_step.py", "            begin += MANY_REQUESTS", "            begin = num_reqs + 1", "tests/test_decode_step.py -k interpreted"),
    Mutation("kernel-last-row-wins", "of equal slots the last row wins", "dsv4_ops/_triton/kv_cache.py", " & (later == 0)", "", "tests/test_kv_cache_cuda.py -k interpreted"),
    Mutation("kernel-scale-up", "a scale is rounded up past 448", "dsv4_ops/_triton/kv_cache.py", "((amax + 0x1FFFFF) >> 23) - 8", "(amax >> 23) - 8", "tests/test_kv_cache_cuda.py -k interpreted"),
    Mutation("kernel-ties", "codes are rounded to even", "dsv4_ops/_triton/kv_cache.py", "0x7FFFF + ((rounded >> 20) & 1)", "0x80000", "tests/test_kv_cache_cuda.py -k interpreted"),
    Mutation("kernel-wait", "a kernel touches nothing before it has waited for the one before it", "dsv4_ops/_triton/launching.py", "        tl.extra.cuda.gdc_wait()", "        pass", "tests/test_triton.py -k local_context_lens-90"),
    Mutation("kernel-exp-range", "the exponential of -inf is 0, not NaN", "dsv4_ops/_triton/swiglu.py", "bounded = tl.where(x < -105.0, -105.0, x)", "bounded = x", "tests/test_swiglu_cuda.py -k special"),
    # SwiGLU parameters.
    Mutation("gpt-oss-everywhere", "the model type decides the parameters", "dsv4_ops/swiglu.py", 'if model_type == "gpt_oss":', "if True:", "tests/test_swiglu.py -k F01"),
    Mutation("limit-dropped", "the limit clamps", "dsv4_ops/swiglu.py", "if limit is not None:\n        g, u", "if False:\n        g, u", "tests/test_swiglu.py -k F02"),
    # Lanes under torch.compile.
    Mutation("lane-clone", "a region that two lanes share is cloned", "passes/lanes.py", "elif self._lane_of[key] != lane and self._depends_on_caller(body.module):", "elif False:", "tests/test_program_campaign.py -k dynamos"),
    Mutation("lane-inherited", "a body's inherited mark gives way to its caller's", "passes/lanes.py", "return caller if inherited else mark", "return caller if mark is None else mark", "tests/test_program_campaign.py -k dynamos"),
    Mutation("lane-bodies", "bodies of higher-order ops are bound", "passes/lanes.py", "            self.visit(body.module, lane)\n", "            pass\n", "tests/test_program_campaign.py -k dynamos"),
    Mutation("lane-slot-first", "the slot sees a body before its callers", "passes/lanes.py", "        call.node.meta[BOUND_HERE] = True\n", "", "tests/test_passes_install.py -k region_shared"),
    Mutation("lane-eager-values", "arguments of eager mode follow", "passes/fx_utils.py", "if EAGER_VALUES in self.node.meta:", "if False:", "tests/test_passes_install.py -k I12"),
    Mutation("lane-uuid", "the digest of the marks is in the uuid", "passes/lanes.py", '"marks": _digest.get()', '"marks": 0', "tests/test_passes_install.py -k I09"),
    Mutation("lane-shadow-gradient", "no gradient is lost in a shadow op", "passes/workspace_ops.py", "if not schema.is_mutable:", "if False:", "tests/test_passes_lanes.py -k gradient"),
    Mutation("lane-deaf-slot", "a slot that is not run binds nothing", "dsv4_ops/lane_context.py", "runs_slots and any(map(_handles_lanes, slots))", "any(map(_handles_lanes, slots))", "tests/test_lane_warnings.py -k does_not_run"),
    Mutation("lane-verify-allow", "a verifier that allows ambient ops binds nothing", "passes/verify.py", 'self.handles_lanes = ambient != "allow"', "self.handles_lanes = True", "tests/test_lane_warnings.py -k through"),
    # Captured steps.
    Mutation("padding-left", "rows behind those given are filled in every call", "dsv4_ops/graphs.py", "buffer[given.shape[0] :].fill_(spec.pad)", "pass", "tests/test_graphs.py -k written_whole"),
    Mutation("staged-early", "memory is staged again only after its copy", "dsv4_ops/_step_inputs.py", "self._copied.synchronize()", "pass", "tests/test_graphs.py -k staged_again"),
    Mutation("staged-left", "staged inputs begin as padding", "dsv4_ops/_step_inputs.py", "            staged._data.copy_(padding)\n", "", "tests/test_graphs.py -k padding_to_write"),
    Mutation("follow-stale", "a step does not follow a call that was written over", "dsv4_ops/graphs.py", "return outputs.inputs(), outputs.read()", "return outputs._inputs, outputs._value", "tests/test_graphs.py -k in_place"),
    Mutation("follow-live", "a step that follows warms up on padding", "dsv4_ops/graphs.py", "given = self.leader._run_padding(size)", "given = self._inputs(size)", "tests/test_graphs.py -k warms_up"),
    Mutation("host-tensors", "a step's inputs are no small tensors of the host", "dsv4_ops/engine/step.py", "        step.seq_lens[i] = ", "        step.seq_lens[i] = torch.zeros(()) + ", "tests/test_engine_host.py -k read"),
    Mutation("stale-read", "outputs of an earlier call are refused", "dsv4_ops/graphs.py", "return self._writes != self._step._writes", "return False", "tests/test_graphs.py -k run_again"),
    Mutation("own-lane", "a step runs in its lane", "dsv4_ops/graphs.py", "use_workspace_lane(self.lane), use_workspace_ubatch", "use_workspace_ubatch", "tests/test_graphs.py -k own_lane"),
    Mutation("pool-locks", "captured pools lock the workspace", "dsv4_ops/graphs.py", "                self.manager.lock(self)\n", "", "tests/test_graphs.py -k locks"),
    Mutation("moved-scratch", "a graph whose scratch has moved is captured again", "dsv4_ops/workspace.py", "if not entry[1].is_current:", "if False:", "tests/test_graphs.py -k moved"),
    Mutation("output-in-pool", "outputs are copied out of the pool", "dsv4_ops/graphs.py", "        view.copy_(leaf)\n        return view", "        return leaf", "tests/test_graphs.py -k run_again"),
    Mutation("retired-freed", "storage that a graph has seen is kept", "dsv4_ops/workspace.py", "if buffer.leases or buffer.pinned:", "if buffer.pinned:", "tests/test_graphs.py -k growth_without_retirement"),
)


def run_tests(copy: Path, arguments: str) -> tuple[int, str]:
    env = {**os.environ, "PYTHONPATH": str(copy), "DSV4_OPS_DISABLE_C": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))", "-x", "-q", "-p", "no:cacheprovider", *arguments.split()]
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, (failed[0].split(" ", 1)[1].split(" - ")[0] if failed else done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-300:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if not options.names or m.name in options.names]
    rows, survived = ["| fix taken out | change | test that fails |", "|---|---|---|"], 0
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "build", "*.so", "__pycache__", "*.egg-info"))
        for tests in sorted({m.tests for m in chosen}):
            code, line = run_tests(copy, tests)
            if code != 0:
                print(f"the unchanged project fails {tests}: {line}")
                return 1
        for mutation in chosen:
            path = copy / mutation.file
            source = path.read_text()
            if mutation.old not in source:
                print(f"{mutation.name}: {mutation.old!r} is not in {mutation.file} any more")
                return 1
            path.write_text(source.replace(mutation.old, mutation.new))
            code, line = run_tests(copy, mutation.tests)
            path.write_text(source)
            caught = code == 1
            survived += not caught
            shown = f"`{line}`" if caught else "**none**"
            old, new = (" ".join(text.split()) for text in (mutation.old, mutation.new))  # a row is a line
            rows.append(f"| {mutation.name}: {mutation.what} | `{old}` to `{new}` in `{mutation.file}` | {shown} |")
            print(("caught  " if caught else "SURVIVED"), mutation.name, line, flush=True)
    if options.table:
        options.table.write_text("# Each fix taken out, and the test that notices\n\nWritten by `python tests/mutations.py --table docs/mutations.md`.\n\n" + "\n".join(rows) + "\n")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
