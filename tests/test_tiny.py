"""The tiny checkpoint: what it is made of, that its text is worth decoding, and that its drafters are sometimes right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from safetensors.torch import load_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from dsv4_ops.engine import tiny
from dsv4_ops.engine.drafters import BlockDrafter, load_drafter
from dsv4_ops.engine.tokenizer import BOS_ID, MASK_ID, VOCAB_SIZE
from dsv4_ops.errors import ArgumentError

FILES = ("model.safetensors", "dspark/model.safetensors", "dflash/model.safetensors", "config.json", "dspark/config.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny.make_tiny(path)
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> DeepseekV4ForCausalLM:
    return DeepseekV4ForCausalLM.from_pretrained(folder, attn_implementation="eager").requires_grad_(False).eval()


def greedy(target: DeepseekV4ForCausalLM, prompt: str, tokens: int = 64) -> list[int]:
    ids, start, _ = tiny._greedy(target, [BOS_ID, *prompt.encode()], tokens)
    return ids[start:].tolist()


def test_one_seed_gives_the_same_bytes_and_another_does_not(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(12345)  # The global generator must not matter, and must not be moved.
    state = torch.get_rng_state()
    report = tiny.make_tiny(tmp_path / "same", seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    tiny.make_tiny(tmp_path / "other", seed=1)
    for file in FILES:
        assert (tmp_path / "same" / file).read_bytes() == (folder / file).read_bytes()
        assert file.endswith("json") or (tmp_path / "other" / file).read_bytes() != (folder / file).read_bytes()
    assert 1e6 < report.parameters < 5e6 and report.seconds < 10
    assert sum((folder / file).stat().st_size for file in FILES) < 32e6


def test_transformers_loads_it_without_a_missing_or_unexpected_tensor(folder: Path) -> None:
    model, info = DeepseekV4ForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    config = model.config
    assert set(config.layer_types) == {"sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"}
    assert set(config.mlp_layer_types) == {"moe", "hash_moe"}
    assert (config.head_dim, config.sliding_window, config.vocab_size) == (512, 128, VOCAB_SIZE)
    assert model.generation_config.eos_token_id == 257 and not model.generation_config.do_sample


def test_target_tensors_have_published_names(folder: Path) -> None:
    names = {name for name in load_file(folder / "model.safetensors") if not name.startswith("mtp.")}
    assert not [name for name in names if name.startswith("model.") or "self_attn" in name or "mlp" in name]
    assert names >= {"embed.weight", "head.weight", "norm.weight", "hc_head_fn", "layers.1.attn.kv_norm.weight", "layers.1.attn.indexer.compressor.ape"}
    assert names >= {"layers.1.ffn.gate.tid2eid", "layers.0.ffn.gate.bias", "layers.2.attn.compressor.norm.weight", "layers.3.ffn.experts.7.w2.weight"}


def test_loaded_weights_are_those_that_were_built(folder: Path, target: DeepseekV4ForCausalLM) -> None:
    with torch.no_grad():
        built = tiny._Builder(0, DeepseekV4Config(**tiny.SIZES["tiny"])).target().state_dict()
    loaded = target.state_dict()
    assert built.keys() == loaded.keys()
    assert all(torch.equal(built[name], loaded[name]) for name in built)


PROMPTS = (*tiny.PROMPTS, "x" * 200, "The ferry left at seven, and nobody on the quay thought it would come back before the spring. " * 6)


@pytest.mark.parametrize("seed", [0, 1])
def test_greedy_text_is_varied(folder: Path, target: DeepseekV4ForCausalLM, seed: int) -> None:
    if seed:
        with torch.no_grad():
            target = tiny._Builder(seed, DeepseekV4Config(**tiny.SIZES["tiny"])).target()
    outputs = [greedy(target, prompt) for prompt in PROMPTS]
    for prompt, out in zip(PROMPTS, outputs, strict=True):
        shown = f"{prompt[:20]!r} -> {bytes(out)!r}"
        assert len(set(out)) >= 12, shown
        assert len(set(zip(out, out[1:], out[2:], strict=False))) >= 30, shown
        tail = out[-32:]
        assert not any(all(a == b for a, b in zip(tail, tail[period:], strict=False)) for period in range(1, 13)), shown
        assert all(chr(token) in tiny.ALPHABET for token in out), shown
    assert len({tuple(out[:8]) for out in outputs}) == len(outputs)


def test_every_part_of_the_target_decides_tokens(target: DeepseekV4ForCausalLM) -> None:
    """Silencing any one part changes the best token of some position: an engine that gets it wrong is caught."""
    ids = tiny._greedy(target, [BOS_ID, *PROMPTS[-1].encode()], 64)[0][None]
    with torch.no_grad():
        best = target(ids).logits[0].argmax(-1)
        weights = {f"attention of layer {i}": layer.self_attn.o_b_proj.weight for i, layer in enumerate(target.model.layers)}
        weights |= {f"experts of layer {i}": layer.mlp.experts.down_proj for i, layer in enumerate(target.model.layers)}
        weights |= {f"compressed records of layer {i}": target.model.layers[i].self_attn.compressor.kv_norm.weight for i in (1, 2, 3)}
        weights |= {f"indexer of layer {i}": target.model.layers[i].self_attn.compressor.indexer.scorer.weights_proj.weight for i in (1, 3)}
        for name, weight in weights.items():
            saved = weight.clone()
            weight.mul_(-1.0 if name.startswith("indexer") else 0.0)
            changed = (target(ids).logits[0].argmax(-1) != best)[-400:].sum().item()
            weight.copy_(saved)
            assert changed >= 3, name


@pytest.fixture(scope="module")
def acceptance(folder: Path) -> dict[str, list[int]]:
    return tiny.measure_acceptance(folder, num_tokens=3)


@pytest.mark.parametrize("kind", ["mtp", "dspark", "dflash"])
def test_drafts_are_accepted_rejected_and_partly_accepted(acceptance: dict[str, list[int]], kind: str) -> None:
    counts = acceptance[kind]
    assert len(counts) == 4
    assert counts[0] >= 5 and sum(counts[1:-1]) >= 5 and counts[-1] >= 2, counts
    # Steps emit accepted + 1 tokens, 64 and a little more for each of the four prompts.
    assert 4 * 64 <= sum((n + 1) * count for n, count in enumerate(counts)) <= 4 * (64 + 3)


def test_a_drafter_that_reads_wrong_states_is_right_less_often(folder: Path, target: DeepseekV4ForCausalLM) -> None:
    """The acceptance hangs on what the drafter reads, so a wrong slot, position or layer in an engine shows in it."""
    ids, start, streams = tiny._greedy(target, [BOS_ID, *tiny.PROMPTS[2].encode()], 132)
    drafter = load_drafter(folder, target, "dspark")

    def mean(states: list[torch.Tensor]) -> float:
        lengths = tiny._accepted_lengths(drafter, ids, start, start + 128, states, 4)
        return sum(lengths) / len(lengths)

    assert mean([torch.roll(layer, 5, 0) for layer in streams]) < 0.7 * mean(streams)


def test_block_drafters_have_two_blocks_two_taps_and_a_silent_mask(folder: Path, target: DeepseekV4ForCausalLM) -> None:
    for kind, queries in (("dspark", 4), ("dflash", 5)):
        drafter = load_drafter(folder, target, kind)
        assert isinstance(drafter, BlockDrafter)
        assert (drafter.num_layers, drafter.target_layer_ids, drafter.block_queries, drafter.mask_token_id) == (2, (0, 2), queries, MASK_ID)
    scores = target.lm_head.weight @ target.model.embed_tokens.weight[MASK_ID]
    assert scores.abs().max() < 2 < (target.lm_head.weight @ target.model.embed_tokens.weight[ord("a")]).max()


def test_report_draws_a_histogram(acceptance: dict[str, list[int]]) -> None:
    report = tiny.TinyReport(Path("x"), "tiny", 0, 3_000_000, 0.5, {"mtp": [2, 1, 1]})
    assert report.histogram().splitlines()[0] == "mtp: 0.75 draft tokens accepted a step, 4 steps"
    assert report.histogram().splitlines()[1] == "  0 " + "#" * 20 + " " * 20 + " 2"
    assert "3.0M parameters" in tiny.summary(report) and "mtp: 0.75" in tiny.summary(report)
    assert set(acceptance) == {"mtp", "dspark", "dflash"}


def test_flash_has_the_published_attention_sizes() -> None:
    config = DeepseekV4Config(**tiny.SIZES["flash"])
    assert (config.num_attention_heads, config.head_dim, config.index_topk, config.q_lora_rank, config.o_groups, config.hidden_size) == (64, 512, 512, 1024, 8, 4096)
    assert config.compress_rates == {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def test_flash_is_stored_in_bfloat16_and_its_drafters_are_right_sometimes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an eighth of its width, so that it fits here: still wider than a KV row, unlike the tiny one."""
    narrow = {"hidden_size": 512, "num_attention_heads": 8, "q_lora_rank": 128, "moe_intermediate_size": 64, "o_groups": 4, "o_lora_rank": 64, "index_n_heads": 8}
    monkeypatch.setitem(tiny.SIZES, "flash", tiny.SIZES["flash"] | narrow)
    tiny.make_tiny(tmp_path, size="flash")
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["layers.1.attn.wq_b.weight"].dtype == stored["mtp.0.e_proj.weight"].dtype == torch.bfloat16 and stored["norm.weight"].dtype == torch.float32
    target = DeepseekV4ForCausalLM.from_pretrained(tmp_path)
    assert target.lm_head.weight.dtype == load_drafter(tmp_path, target, "dspark").main_proj.weight.dtype == torch.bfloat16
    for kind, counts in tiny.measure_acceptance(tmp_path, prompts=tiny.PROMPTS[:2], max_tokens=32, num_tokens=3).items():
        assert counts[0] and sum(counts[1:]) > 2, kind


def test_unknown_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="size must be one of 'tiny', 'flash', got 'huge'"):
        tiny.make_tiny(tmp_path, size="huge")
