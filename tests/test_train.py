"""Training: the text, and dense forward passes with gradients that are those of transformers and of the paged drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from dsv4_ops import new_kv_cache
from dsv4_ops.engine import tiny, train
from dsv4_ops.engine.drafters import BlockDrafter, BlockInputs, MTPDrafter, MTPInputs, load_drafter, mean_streams
from dsv4_ops.engine.tokenizer import BOS_ID, EOS_ID
from dsv4_ops.engine.train_models import DRAFT_TOKENS, BlockTrainer, MTPTrainer, TargetTrainer

LENGTH = 160
TEXT = "The harbour master keeps two lists, one of ships and one of promises. " * 3


def window() -> torch.Tensor:
    return torch.tensor([[BOS_ID, *TEXT.encode()[: LENGTH - 1]]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny.make_tiny(path)
    return path


def load(folder: Path) -> Any:
    return DeepseekV4ForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def test_text_is_what_the_library_documents(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""About a."""\nclass B(int):\n    """A b.\n\n    Its rest."""\n    def c(self, x: int = 3):\n        "Does c."\n    def undocumented(self): ...\n')
    for folder in ("test", "site-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").write_text('"""Not this."""')
    (tmp_path / "broken.py").write_text('"""Not this either."""\nclass:')
    assert train.library_text(tmp_path) == [b"About a.\n\nclass B:\n    A b.\n\n    Its rest.\n\ndef c(self, x: int=3):\n    Does c."]
    own = train.library_text()
    assert sum(map(len, own)) > 500_000 and any(b"def dumps(" in module for module in own)


def test_windows_begin_anywhere_and_at_entries() -> None:
    modules = [b"abc\n\ndef f():\n    one\n\n    two\n\nxyz", b"second one"] * 9
    windows = train.Windows(modules, 16, "cpu")
    ids = windows.at(windows.choose(400))
    assert ids.shape == (400, 16) and (ids[:, 0] == BOS_ID).all() and (ids == EOS_ID).any()
    assert {bytes(row[1:4].tolist()) for row in ids[1::2]} == {b"abc", b"def", b"xyz", b"sec"}, "every other one at an entry, never inside one"
    assert len({bytes(t % 256 for t in row[1:4].tolist()) for row in ids[::2]}) > 10


def test_target_forward_is_that_of_transformers_and_gradients_reach_all_of_it(folder: Path) -> None:
    model = load(folder)
    ids = window()
    with torch.no_grad():
        expected = model(ids).logits
    trainer = TargetTrainer(model, LENGTH)
    torch.testing.assert_close(trainer(ids)[0], expected, rtol=1e-4, atol=1e-3)
    model.train()
    text, minimized = trainer.loss(ids.expand(2, -1))
    assert minimized > text > 0
    minimized.backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert silent == []


def test_the_indexers_loss_moves_the_indexers_alone(folder: Path) -> None:
    model = load(folder)
    trainer = TargetTrainer(model, LENGTH)
    text, minimized = trainer.loss(window())
    (minimized - text).backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 1e-9}
    assert moved and all(".indexer." in name for name in moved)


def test_experts_that_are_chosen_too_rarely_get_a_higher_bias(folder: Path) -> None:
    model = load(folder)
    TargetTrainer(model, LENGTH)
    gate = model.model.layers[0].mlp.gate
    before, hidden = gate.e_score_correction_bias.clone(), torch.randn(40, model.config.hidden_size)
    counts = torch.bincount(gate(hidden)[2].flatten(), minlength=gate.num_experts)
    assert torch.equal(gate.e_score_correction_bias, before), "evaluation changes nothing"
    gate.train()
    gate(hidden)
    assert torch.equal((gate.e_score_correction_bias - before).sign(), (counts.float().mean() - counts).sign())


@pytest.mark.parametrize("kind", ["mtp", "dspark", "dflash"])
def test_dense_drafts_are_those_of_the_paged_drafter(kind: str, folder: Path) -> None:
    """At one place near the window's edge, where the drafts before were right: logits of every draft token."""
    model = load(folder).requires_grad_(False)
    ids, at, page = window(), 140, 64
    drafter = load_drafter(folder, model, kind)
    trainer: Any = (MTPTrainer if kind == "mtp" else BlockTrainer)(drafter, model, LENGTH)  # takes other weights
    drafter.eval()  # in training each pass moves the routers' bias
    with torch.no_grad():
        _, after = TargetTrainer(model, LENGTH)(ids)
        anchors = torch.tensor([at])
        dense = [logits[0, (rows == at + j).nonzero()[0, 0]] for j, (logits, rows) in enumerate(trainer.draft(ids, after, anchors))]
        assert len(dense) == DRAFT_TOKENS == 4
        paged = paged_logits(drafter, ids[0], [streams[0] for streams in after], at, page)
    for j, (a, b) in enumerate(zip(dense, paged, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-3, msg=lambda text, j=j: f"draft token {j}: {text}")


def paged_logits(drafter: Any, ids: torch.Tensor, after: list[torch.Tensor], at: int, page: int) -> torch.Tensor:
    """What the drafter's own ``propose`` scores after ``ids[:at]`` ran and ``ids[at]`` was sampled, if it drafts the tokens of the text."""
    from dsv4_ops.engine import drafters

    for i, attention in enumerate(drafter.attention):  # back to the attention that serves
        drafter.layers[i].self_attn = drafter.attention[i] = drafters._DraftAttention(attention.inner)
        del drafter.layers[i].mlp.experts.forward
    caches = tuple(new_kv_cache(5, page, dtype=torch.float32) for _ in range(drafter.num_layers))
    table, rows = torch.arange(1, 5, dtype=torch.int32)[None], torch.arange(at)
    common = {"block_table": table, "temperature": torch.zeros(1), "seeds": torch.zeros(1, dtype=torch.int64)}
    following = iter(ids[at + 1 :])
    options = {"num_tokens": DRAFT_TOKENS, "block_size": page, "max_model_len": 4096}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafters, "_sample", lambda logits, mapping, temperature, seeds, positions: next(following)[None])
        if isinstance(drafter, MTPDrafter):
            last = torch.tensor([at - 1])
            inputs: Any = MTPInputs(ids[1 : at + 1], rows, after[-1][:at], torch.zeros(at, dtype=torch.int32), torch.ones(at, dtype=torch.bool), last, torch.zeros(1, dtype=torch.int32), **common)
            return drafter.propose(inputs, caches, **options).logits[0]
        assert isinstance(drafter, BlockDrafter)
        queries = drafter.block_queries
        positions = at + torch.arange(queries)
        tokens = torch.cat([ids[at : at + 1], torch.full((queries - 1,), drafter.mask_token_id)])
        inputs = BlockInputs(
            mean_streams([after[i][:at] for i in drafter.target_layer_ids]), rows, page + rows, tokens, positions, torch.zeros(queries, dtype=torch.bool), page + positions,
            torch.arange(queries - 4, queries), at + 1 + torch.arange(4), torch.zeros(4, dtype=torch.int32), **common,
        )  # fmt: skip
        return drafter.propose(inputs, caches, **options).logits[0]


def test_training_writes_a_checkpoint_that_serves(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    steps = train.train(tmp_path, seconds=(0.2, 0.1), batch=1, length=128, anchors=2, text=[b"def f(x):\n    Return the value of x." * 40])
    assert min(steps.values()) >= 1 and "target" in capsys.readouterr().out
    files = list(tmp_path.rglob("*.safetensors"))
    assert len(files) == 3 and sum(f.stat().st_size for f in files) < 8e6
    assert DeepseekV4Config.from_pretrained(tmp_path).dtype == torch.float32
    for kind, counts in tiny.measure_acceptance(tmp_path, prompts=["def f"], max_tokens=4, num_tokens=2).items():
        assert sum(counts), kind
