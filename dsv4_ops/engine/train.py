"""Trains the checkpoint that ``run`` uses: a small DeepSeek-V4 that writes documentation strings, and its drafters.

::

    python -m dsv4_ops.engine.train DIR --device cuda --seconds 60 30

The text is that of the running interpreter's standard library: for each module its documentation strings, each under the line of the
class or function that it belongs to (:func:`library_text`). Nothing is fetched. The target is trained first: half of the time with every
record in sight of its indexed layers, then with as many as it will have. Then its three drafters learn together from what it computes.
On a GPU a step is one CUDA graph. The time decides how many steps there are, so two runs give two checkpoints.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import math
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from .drafters import BlockDrafter, MTPDrafter
from .tiny import SIZES, write_checkpoint
from .tokenizer import BOS_ID, EOS_ID, MASK_ID
from .train_models import BlockTrainer, DraftTrainer, MTPTrainer, TargetTrainer

__all__ = ["library_text", "main", "train"]

TARGET: dict[str, Any] = {**SIZES["tiny"], "n_routed_experts": 6, "initializer_range": 0.06}
BLOCK = {"dspark_block_size": 4, "dspark_target_layer_ids": [0, 2], "dspark_noise_token_id": MASK_ID, "dspark_markov_rank": 64, "n_mtp_layers": 1}
OTHERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
"""Folders of a standard library without its text: what others made, tests, and programs."""


# The text


def library_text(root: str | Path | None = None) -> list[bytes]:
    """Each module's documentation, as bytes: strings under the lines that they document, a blank line between them."""
    root = Path(root or sysconfig.get_path("stdlib"))
    modules = []
    for path in sorted(root.rglob("*.py")):
        if OTHERS & set(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        if entries := list(dict.fromkeys(_entries(tree))):
            modules.append("\n\n".join(entries).encode())
    return modules


def _entries(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if not text:
            continue
        if isinstance(node, ast.Module):
            yield text
            continue
        line = f"class {node.name}:" if isinstance(node, ast.ClassDef) else f"def {node.name}({ast.unparse(node.args)}):"
        yield line + "\n" + "\n".join("    " + part if part else "" for part in text.split("\n"))


Loss = Callable[[], tuple[torch.Tensor, torch.Tensor]]


class Windows:
    """Random windows of the text, bos first; every other one begins where an entry does."""

    def __init__(self, modules: Sequence[bytes], length: int, device: str) -> None:
        ids: list[int] = []
        starts: list[int] = []
        for module in modules:
            base = len(ids)
            ids += [*module, EOS_ID]
            starts += [base, *(base + i + 2 for i in range(len(module) - 2) if module[i : i + 2] == b"\n\n" and module[i + 2 : i + 3] not in b" \n")]
        self.length = length
        self.ids = torch.tensor(ids, dtype=torch.int16, device=device)
        last = len(ids) - length
        self._starts, self._last = torch.tensor([s for s in starts if s < last], device=device), last
        self._columns = torch.arange(length - 1, device=device)

    def choose(self, count: int) -> torch.Tensor:
        """Offsets int64 ``[count]``"""
        device = self.ids.device
        anywhere = torch.randint(self._last, (count,), device=device)
        entries = self._starts[torch.randint(len(self._starts), (count,), device=device)]
        return torch.where(torch.arange(count, device=device) % 2 == 0, anywhere, entries)

    def at(self, offsets: torch.Tensor) -> torch.Tensor:
        """int64 ``[count, length]``"""
        ids = self.ids[offsets[:, None] + self._columns].to(torch.int64)
        return torch.cat([torch.full_like(ids[:, :1], BOS_ID), ids], 1)


# Training


class Optimizer:
    """AdamW on a loss; on a GPU the whole step is one CUDA graph, whose inputs change in place.

    ``loss`` gives what is shown (``value``) and what is minimized.
    """

    def __init__(self, loss: Loss, parameters: Iterable[nn.Parameter], rate: float) -> None:
        self.loss, self.rate = loss, rate
        self.parameters = list(parameters)
        device = self.parameters[0].device
        self.on_gpu = device.type == "cuda"
        lr: Any = torch.tensor(0.0, device=device) if self.on_gpu else 0.0
        groups = [{"params": [p for p in self.parameters if (p.dim() > 1) == decay], "weight_decay": 0.1 * decay} for decay in (True, False)]
        self.adam = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), capturable=self.on_gpu, fused=self.on_gpu)
        self.value = torch.zeros((), device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def _step(self) -> None:
        shown, minimized = self.loss()
        minimized.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.adam.step()
        self.adam.zero_grad(set_to_none=False)
        self.value.copy_(shown.detach())

    def capture(self) -> None:
        """Also after ``loss`` has changed."""
        self._graph = None
        if self.on_gpu:
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):  # makes Adam's state and the libraries' workspaces
                for _ in range(3):
                    self._step()
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._step()

    def __call__(self, progress: float) -> None:
        """One step; ``progress`` from 0 to 1 gives the rate: 2 % of warm-up, then a cosine to nothing."""
        rate = self.rate * min(1.0, progress / 0.02) * (0.5 + 0.5 * math.cos(math.pi * min(1.0, progress)))
        for group in self.adam.param_groups:
            if self.on_gpu:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self._graph is not None:
            self._graph.replay()
        else:
            self._step()


def _run(seconds: float, name: str, step: Callable[[float], None], value: torch.Tensor) -> int:
    """Steps until the time is over, each told how much of it has passed; the loss is printed now and then."""
    started, steps, shown = time.perf_counter(), 0, -1
    while (progress := (time.perf_counter() - started) / seconds) < 1:
        step(progress)
        steps += 1
        if value.is_cuda and steps % 8 == 0:
            torch.cuda.synchronize()
        if int(5 * progress) > shown:
            shown = int(5 * progress)
            print(f"{name}: step {steps}, loss {float(value):.3f}", flush=True)
    print(f"{name}: {steps} steps, loss {float(value):.3f}", flush=True)
    return steps


def train(
    directory: str | Path, *, device: str = "cpu", seconds: Sequence[float] = (60.0, 30.0), batch: int = 16, length: int = 512, anchors: int = 32, text: Sequence[bytes] | None = None
) -> dict[str, int]:
    """Train, and write the checkpoint to ``directory``, its matrices as bfloat16. How many steps the target and the drafters got.

    ``seconds``: for the target and for the drafters. ``batch`` windows of ``length`` bytes a step, with ``anchors`` draft blocks each.
    """
    torch.manual_seed(0)
    windows = Windows(library_text() if text is None else text, length, device)
    print(f"{len(windows.ids):,} bytes of text, Python {sys.version.split()[0]}", flush=True)
    chosen = windows.choose(batch)
    with torch.device(device):
        model = _new_target()
        target = TargetTrainer(model, length)
        steps = {"target": _train_target(target, windows, chosen, seconds[0])}
        model.eval().requires_grad_(False)
        for parameter in model.parameters():  # what a loader will get is what the drafters learn from
            if parameter.dim() > 1:
                parameter.copy_(parameter.bfloat16())
        block_config = DeepseekV4Config.from_dict({**model.config.to_dict(), **BLOCK})
        mtp, blocks = MTPDrafter(model.config, model), {kind: BlockDrafter(block_config, model, kind, 1) for kind in ("dspark", "dflash")}
        trainers = [MTPTrainer(mtp, model, length), *(BlockTrainer(block, model, length) for block in blocks.values())]
        steps["drafters"] = _train_drafters(target, trainers, windows, chosen, anchors, seconds[1])
        blocks_with_config = {kind: (block_config, block) for kind, block in blocks.items()}
        write_checkpoint(Path(directory), model.config, model, mtp, blocks_with_config, stored=torch.bfloat16, loaded=torch.float32)
    return steps


def _new_target() -> Any:
    model: Any = DeepseekV4ForCausalLM(DeepseekV4Config(**{**TARGET, "attn_implementation": "eager"}))
    for layer in model.model.layers:
        if hasattr(layer.mlp.gate, "tid2eid"):
            table = layer.mlp.gate.tid2eid
            table.copy_(torch.rand(table.shape[0], model.config.n_routed_experts).topk(table.shape[1]).indices)
        with torch.no_grad():  # streams are mixed evenly at first
            for connection in (layer.attn_hc, layer.ffn_hc):
                connection.fn.mul_(0.2)
    return model.train()


def _train_target(target: TargetTrainer, windows: Windows, chosen: torch.Tensor, seconds: float) -> int:
    steps = 0
    optimizer = Optimizer(lambda: target.loss(windows.at(chosen)), target.model.parameters(), 3e-3)
    for half, records in enumerate((windows.length // target.ratio, int(TARGET["index_topk"]))):
        target.keep_records(records)
        optimizer.capture()

        def step(progress: float, half: int = half) -> None:
            chosen.copy_(windows.choose(len(chosen)))
            optimizer((half + progress) / 2)

        steps += _run(seconds / 2, f"target, {records} records", step, optimizer.value)
    return steps


def _train_drafters(target: TargetTrainer, trainers: Sequence[DraftTrainer], windows: Windows, chosen: torch.Tensor, anchors: int, seconds: float) -> int:
    last = windows.length - 8
    places = torch.randint(1, last, (anchors,))

    def loss() -> tuple[torch.Tensor, torch.Tensor]:
        ids = windows.at(chosen)
        with torch.no_grad():
            teacher, after = target(ids)
        total = torch.stack([trainer.loss(ids, after, teacher, places) for trainer in trainers]).sum()
        return total, total

    def step(progress: float) -> None:
        chosen.copy_(windows.choose(len(chosen)))
        places.copy_(torch.randint(1, last, (anchors,)))
        optimizer(progress)

    optimizer = Optimizer(loss, itertools.chain(*(trainer.parameters() for trainer in trainers)), 2e-3)
    optimizer.capture()
    return _run(seconds, "drafters", step, optimizer.value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, nargs=2, default=(60.0, 30.0), metavar=("TARGET", "DRAFTERS"))
    parser.add_argument("--batch", type=int, default=16, help="windows of 512 bytes a step (default: 16)")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    train(options.directory, device=options.device, seconds=options.seconds, batch=options.batch)


if __name__ == "__main__":
    main()
