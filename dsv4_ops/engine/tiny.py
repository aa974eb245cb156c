"""A small DeepSeek-V4 checkpoint with its drafters, made from a seed in seconds, in the published format.

The folder that :func:`make_tiny` writes loads with ``DeepseekV4ForCausalLM.from_pretrained`` (config.json,
generation_config.json, model.safetensors); ``mtp.*`` tensors of the MTP module lie beside the target's, and the DSpark
and DFlash drafters in the folders ``dspark`` and ``dflash`` (one checkpoint holds one drafter under ``mtp.*``).

Nothing is trained, the weights are built so that decoding is worth watching:

* **A letter chain.** The letters, space and line end of :data:`ALPHABET` have orthogonal embeddings. The head's row of a
  letter is the sum of the embeddings of the letters it may follow, so an embedding scores its successors close together
  and far above all else. A consonant follows two of the vowels and is followed by the others, so output reads like words.
  Every other id (capitals, digits, bytes) is embedded near one letter, plus a direction of its own.
* **Tiredness.** Half of the first layer's heads look some ten tokens back, whatever stands there, and record its letters in
  directions that lower the scores of just these letters. So greedy output does not fall into a loop.
* **Context decides.** All other attention is sharp (KV norms above 1) and random, and each layer's part is of the size of the
  gaps between successors: which of them comes next hangs on the window, on the compressed records, on the indexer's
  choice and on the experts. A mistake in any of these changes tokens.
* **Drafters see a part of it.** Their first block is a copy of the target's first layer (sliding attention), their Markov bias
  holds the letter chain, and they know nothing of the deeper layers. So they are right about as often as the first layer
  decides: all of a draft, some of it, or none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, GenerationConfig

from ..errors import ArgumentError
from ..kv_cache import new_kv_cache
from .drafters import (
    BlockDrafter,
    BlockInputs,
    Drafter,
    MTPDrafter,
    MTPInputs,
    load_drafter,
    mean_streams,
    next_token_ids,
    published_block_name,
    published_tensors,
    split_experts,
)
from .tokenizer import BOS_ID, EOS_ID, MASK_ID, PAD_ID, VOCAB_SIZE

__all__ = ["ALPHABET", "SIZES", "TinyReport", "make_tiny", "measure_acceptance", "summary", "write_checkpoint"]

VOWELS, CONSONANTS, MARKS = "aeiouy", "bcdfghjklmnpqrstvwxz", " \n"
ALPHABET = VOWELS + CONSONANTS + MARKS
BLOCK_SIZE = 4
"""Draft tokens of the block drafters: ``dspark_block_size``."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "head_dim": 512,
    "sliding_window": 128,
    "num_nextn_predict_layers": 1,
    "hc_mult": 4,
    "tie_word_embeddings": False,
}

SIZES: dict[str, dict[str, Any]] = {
    # Every layer type, both routers; 3M parameters.
    "tiny": {
        **_COMMON,
        "hidden_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "q_lora_rank": 64,
        "o_groups": 2,
        "o_lora_rank": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "index_n_heads": 4,
        "index_head_dim": 64,
        "index_topk": 64,
        # The published model runs 20; on a CPU each is four small ops in every hyper-connection.
        "hc_sinkhorn_iters": 6,
        "max_position_embeddings": 8192,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["moe", "hash_moe", "moe", "moe"],
    },
    # The attention of DeepSeek-V4-Flash (64 heads, top-k 512, grouped output of 8 x 1024) on few, narrow-experted layers.
    "flash": {
        **_COMMON,
        "hidden_size": 4096,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "max_position_embeddings": 131072,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["moe", "hash_moe", "moe", "moe"],
    },
}

PROMPTS = (
    "The lamp on the pier was lit before the boats came home.",
    "a",
    "Nobody had opened the small green door in forty years, and the key was still in the lock. " * 4,
    "12 apples, 7 pears and 1 quince",
)
"""What :func:`measure_acceptance` continues when no prompts are given."""


@dataclass
class TinyReport:
    """What was written, and how well its drafters do."""

    path: Path
    size: str
    seed: int
    parameters: int
    seconds: float
    acceptance: dict[str, list[int]] = field(default_factory=dict)
    """Drafter -> how many verify steps accepted 0, 1, .. N draft tokens (empty when not measured)."""

    def histogram(self) -> str:
        """The acceptance counts as text, one line a drafter and count."""
        lines = []
        for kind, counts in self.acceptance.items():
            total = max(1, sum(counts))
            mean = sum(i * n for i, n in enumerate(counts)) / total
            lines.append(f"{kind}: {mean:.2f} draft tokens accepted a step, {sum(counts)} steps")
            lines += [f"  {i} {'#' * round(40 * n / total):<40} {n}" for i, n in enumerate(counts)]
        return "\n".join(lines)


def make_tiny(directory: str | Path, seed: int = 0, size: str = "tiny", *, measure: bool = False, device: str = "cpu") -> TinyReport:
    """Write the checkpoint of ``size`` to ``directory`` (made if absent; its files are replaced).

    The same seed gives the same bytes on the same kind of device. "tiny" is stored as float32 (19 MB with its drafters), "flash" as
    bfloat16 (3 GB, half a minute on two cores, seconds on a GPU). ``measure`` also runs :func:`measure_acceptance`. Raises
    ArgumentError for an unknown size.
    """
    if size not in SIZES:
        raise ArgumentError("make_tiny", "size", "one of " + ", ".join(map(repr, SIZES)), repr(size))
    started = time.perf_counter()
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    # Constructing modules draws initial weights from the global generators: all are replaced, and those are left as they were.
    with torch.no_grad(), torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.device(device).type == "cuda" else []), torch.device(device):
        builder = _Builder(seed, DeepseekV4Config(**SIZES[size]))
        target, block_config = builder.target(), builder.block_config()
        mtp, blocks = builder.mtp(target), {kind: (block_config, builder.block(target, block_config, kind)) for kind in ("dspark", "dflash")}
        write_checkpoint(path, builder.config, target, mtp, blocks, stored=torch.float32 if size == "tiny" else torch.bfloat16)
    report = TinyReport(path, size, seed, sum(p.numel() for p in target.parameters()), time.perf_counter() - started)
    if measure:
        report.acceptance = measure_acceptance(path)
    return report


class _Builder:
    """Draws the weights. All randomness comes from one generator, in a fixed order."""

    score, gap = 16.0, 0.6
    """Score of a letter's first successor, and how much less each further one gets."""
    fatigue = 60.0
    """What a letter loses when all of the first layer's recency heads look at it."""
    recency = 6.0
    """Attention logit that those heads give to the distance ``lag``; it is halved some ten tokens from there."""
    lag = 12.0
    """Longer than a draft block, whose queries cannot know the letters drafted beside them."""
    kv_gain = 2.0
    """Weight of the KV norms: attention logits of random keys have this standard deviation, so it is sharp."""
    attention_gain = 0.4
    expert_gain = 0.3
    deep = 0.4
    """How much of these gains the layers after the first have: what no drafter can know."""
    markov = 0.6
    """Share of the chain's scores in the Markov bias: about what the final norm leaves of them in the target."""

    def __init__(self, seed: int, config: DeepseekV4Config) -> None:
        self.config = config
        self.generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
        self.hidden = int(config.hidden_size)
        letters = len(ALPHABET)
        # Orthogonal rows of unit mean square: one for each letter, one for "lately seen" of each, one that all tokens share, free ones.
        directions = torch.linalg.qr(self.normal(self.hidden, self.hidden))[0] * math.sqrt(self.hidden)
        self.directions = directions
        self.letters, self.seen, self.common, self.free = directions[:letters], directions[letters : 2 * letters], directions[2 * letters], directions[2 * letters + 1 :]

    def normal(self, *shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator) * std

    def successors(self) -> list[list[int]]:
        """Letters that each letter may be followed by, best first.

        Each consonant follows two of the six vowels and is followed by the other four, so no two letters can follow each
        other back and forth; words end after a vowel and begin with a consonant.
        """
        following: list[list[int]] = [[] for _ in ALPHABET]
        vowels, consonants = range(len(VOWELS)), range(len(VOWELS), len(ALPHABET) - len(MARKS))
        for i in consonants:
            order = self.order(len(vowels))
            for vowel in order[:2]:
                following[vowel].append(i)
            following[i] = order[2:]
        for i, ends in zip(range(len(ALPHABET) - len(MARKS), len(ALPHABET)), (3, 1), strict=True):
            for vowel in self.order(len(vowels))[:ends]:
                following[vowel].append(i)
            following[i] = [consonants[j] for j in self.order(len(consonants))[:6]]
        shuffled = [[letters[j] for j in self.order(len(letters))] for letters in following]
        # The ends of words come first where they may come at all, or lines would hardly have any.
        return [sorted(letters, key=lambda j: ALPHABET[j] not in MARKS) for letters in shuffled]

    def order(self, count: int) -> list[int]:
        return [int(i) for i in torch.randperm(count, generator=self.generator)]

    def embeddings(self) -> torch.Tensor:
        table = torch.empty(self.config.vocab_size, self.hidden)
        for token in range(self.config.vocab_size):
            if token < 256 and chr(token) in ALPHABET:
                own = self.letters[ALPHABET.index(chr(token))]
            else:
                lower = chr(token).lower() if token < 256 else ""
                near = ALPHABET.index(lower) if lower and lower in ALPHABET else token % len(ALPHABET)
                own = self.normal(len(self.free)) @ self.free
                own = 0.8 * self.letters[near] + 0.6 * own * (self.hidden / own.square().sum()).sqrt()
            table[token] = 0.9 * own + math.sqrt(0.19) * self.common
        # A direction that the head does not answer to, and so little of the common part that the recency heads of a mask
        # query work (queries are normalized) while its key draws no attention away from real letters.
        table[MASK_ID] = math.sqrt(1 - 0.15**2) * self.free[0] + 0.15 * self.common
        return table

    def head(self) -> torch.Tensor:
        table = self.normal(self.config.vocab_size, self.hidden, std=0.02)
        for i, following in enumerate(self.successors()):
            table[ord(ALPHABET[i])] -= self.fatigue * self.seen[i] / self.hidden
            for rank, j in enumerate(following):
                table[ord(ALPHABET[j])] += (self.score - self.gap * rank) * self.letters[i] / self.hidden
        return table

    def recency_heads(self, attention: Any) -> None:
        """Turn the first half of a sliding layer's heads into a record of the letters seen lately.

        Their queries are one fixed vector on some rotary pairs, keys hold the same vector, so the score depends on the distance
        alone; values are the embeddings, read out letter by letter into the ``seen`` directions.
        """
        size, rope = int(self.config.head_dim), int(self.config.qk_rope_head_dim)
        heads, letters = int(self.config.num_attention_heads) // 2, len(ALPHABET)
        pairs = torch.arange(6, 13)
        # A key's pair turns by its position times this angle, so a query turned back by `lag` angles matches best at that distance.
        angle = -self.lag / self.config.rope_theta ** (2.0 * pairs / rope)
        key, query = torch.zeros(2, size)
        key[size - rope + 2 * pairs] = math.sqrt(size / len(pairs))
        query[size - rope + 2 * pairs] = math.sqrt(size / len(pairs)) * angle.cos()
        query[size - rope + 2 * pairs + 1] = math.sqrt(size / len(pairs)) * angle.sin()
        unit = self.common / math.sqrt(self.hidden)
        # Values hold the whole embedding where it fits, else its part in the first directions, which are the letters'.
        fits = self.hidden <= size - rope
        keep = torch.linalg.qr(self.normal(size - rope, self.hidden))[0] if fits else self.directions[: size - rope] / math.sqrt(self.hidden)
        kv = torch.zeros(size, self.hidden)
        kv[: size - rope] = keep * math.sqrt(size / self.hidden)
        # |key| is kv_gain * sqrt(size); of it this part, against a query of length sqrt(size), gives the score `recency`.
        share = self.recency / (self.kv_gain * math.sqrt(size))
        kv += share * torch.outer(key, unit) / math.sqrt(0.19) / math.sqrt(self.hidden)
        attention.kv_proj.weight.copy_(kv)
        attention.q_a_proj.weight[0] = 4.0 * unit
        queries = attention.q_b_proj.weight.view(-1, size, attention.q_b_proj.in_features)
        queries[:heads] *= 0.05
        queries[:heads, :, 0] = query
        # Group 0 of the output projection holds these heads (o_groups is even).
        rank, groups = int(self.config.o_lora_rank), int(self.config.o_groups)
        down = attention.o_a_proj.weight.view(groups, rank, -1)
        up = attention.o_b_proj.weight.view(self.hidden, groups, rank)
        for group in range(groups // 2):
            down[group] = 0.0
            for head in range(down.shape[-1] // size):
                # An embedding's letter part has weight 0.9, its value 2 (= sqrt(size / hidden)) times that before the norm's gain.
                down[group, :letters, head * size : (head + 1) * size - rope] = (keep @ self.letters.T).T / (0.9 * math.sqrt(size * self.hidden) * self.kv_gain)
            up[:, group] = 0.0
            up[:, group, :letters] = self.seen.T / heads

    def target(self) -> DeepseekV4ForCausalLM:
        target = DeepseekV4ForCausalLM(self.config)
        target.requires_grad_(False)
        target.train(False)
        for i, layer in enumerate(target.model.layers):
            self.layer(layer, self.deep if i else 1.0)
        self.recency_heads(target.model.layers[0].self_attn)
        self.hyper_head(target.model)
        target.model.norm.weight.fill_(1.0)
        target.model.embed_tokens.weight.copy_(self.embeddings())
        target.lm_head.weight.copy_(self.head())
        return target

    def layer(self, layer: Any, gain: float = 1.0) -> None:
        """Random weights of unit gain, then the gains that matter."""
        for name, parameter in layer.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif parameter.dim() > 1:
                parameter.copy_(self.normal(*parameter.shape, std=1 / math.sqrt(parameter.shape[-1])))
        attention = layer.self_attn
        attention.sinks.copy_(self.normal(*attention.sinks.shape))
        attention.kv_norm.weight.fill_(self.kv_gain)
        attention.o_b_proj.weight.mul_(gain * self.attention_gain / self.kv_gain)
        compressors = [attention.compressor, getattr(attention.compressor, "indexer", None)]
        for compressor in filter(None, compressors):
            compressor.position_bias.copy_(self.normal(*compressor.position_bias.shape, std=0.5))
        if attention.compressor is not None:
            # Records of 128 tokens are few beside the window's keys: louder, or they would decide nothing.
            few = attention.layer_type == "heavily_compressed_attention"
            attention.compressor.kv_norm.weight.fill_(self.kv_gain * (2.0 if few else 1.0))
        layer.mlp.experts.down_proj.mul_(gain * self.expert_gain)
        layer.mlp.shared_experts.down_proj.weight.mul_(gain * self.expert_gain)
        for connection in (layer.attn_hc, layer.ffn_hc):
            connection.fn.mul_(0.5)
            connection.scale.fill_(1.0)
            connection.base.copy_(self.normal(*connection.base.shape, std=0.5))
        gate = layer.mlp.gate
        if hasattr(gate, "tid2eid"):
            scores = torch.rand(gate.tid2eid.shape[0], gate.num_experts, generator=self.generator)
            gate.tid2eid.copy_(scores.topk(gate.top_k).indices)
        else:
            gate.e_score_correction_bias.copy_(self.normal(gate.num_experts, std=0.1))

    def hyper_head(self, owner: Any) -> None:
        owner.hc_head.hc_fn.copy_(self.normal(*owner.hc_head.hc_fn.shape, std=0.3 / math.sqrt(owner.hc_head.hc_fn.shape[-1])))
        owner.hc_head.hc_base.zero_()
        owner.hc_head.hc_scale.fill_(1.0)

    def drafter(self, drafter: Drafter, target: DeepseekV4ForCausalLM) -> None:
        """First block: the target's first. Further ones: random, small. Final norm and stream collapse: the target's."""
        first = {name.replace("self_attn.", "self_attn.inner."): tensor for name, tensor in target.model.layers[0].state_dict().items()}
        drafter.layers[0].load_state_dict(first)
        for layer, attention in list(zip(drafter.layers, drafter.attention, strict=True))[1:]:
            layer.self_attn = attention.inner
            self.layer(layer, 0.1)
            layer.self_attn = attention
        drafter.hc_head.load_state_dict(target.model.hc_head.state_dict())
        drafter.norm.weight.fill_(1.0)

    def mtp(self, target: DeepseekV4ForCausalLM) -> MTPDrafter:
        drafter = MTPDrafter(self.config, target)
        self.drafter(drafter, target)
        drafter.enorm.weight.fill_(1.0)
        drafter.hnorm.weight.fill_(1.0)
        drafter.e_proj.weight.copy_(torch.eye(self.hidden))
        drafter.h_proj.weight.copy_(self.normal(self.hidden, self.hidden, std=0.1 / math.sqrt(self.hidden)))
        return drafter

    def block_config(self) -> DeepseekV4Config:
        fields = {"dspark_block_size": BLOCK_SIZE, "dspark_target_layer_ids": [0, 2], "dspark_noise_token_id": MASK_ID, "dspark_markov_rank": len(ALPHABET), "n_mtp_layers": 2}
        return DeepseekV4Config.from_dict({**self.config.to_dict(), **fields})

    def block(self, target: DeepseekV4ForCausalLM, config: DeepseekV4Config, kind: str) -> BlockDrafter:
        drafter = BlockDrafter(config, target, kind, int(config.n_mtp_layers))
        self.drafter(drafter, target)
        drafter.main_norm.weight.fill_(1.0)
        # The first tap less the first layer's record is close to the embedding, which the copied block's keys are made from.
        second = self.normal(self.hidden, self.hidden, std=0.1 / math.sqrt(self.hidden))
        drafter.main_proj.weight.copy_(torch.cat([torch.eye(self.hidden) - self.seen.T @ self.seen / self.hidden, second], 1))
        assert drafter.markov_head is not None
        # The chain's scores, exactly: project on the letters, then the head's answer to each letter.
        drafter.markov_head.load_state_dict(
            {
                "markov_w1.weight": target.model.embed_tokens.weight @ self.letters.T / self.hidden,
                "markov_w2.weight": self.markov * target.lm_head.weight @ self.letters.T,
            }
        )
        return drafter


def write_checkpoint(
    path: Path, config: DeepseekV4Config, target: DeepseekV4ForCausalLM, mtp: MTPDrafter, blocks: Mapping[str, tuple[DeepseekV4Config, BlockDrafter]],
    *, stored: torch.dtype = torch.float32, loaded: torch.dtype | None = None,
) -> None:  # fmt: skip
    """The folder of a target with its drafters, in the published format.

    Matrices are stored as ``stored``, vectors as float32; config.json tells a loader to make them ``loaded`` (default: ``stored``).
    """
    loaded = loaded or stored
    _write(path, config, {**_target_tensors(target), **published_tensors(mtp)}, stored, loaded)
    _generation().save_pretrained(path)
    for kind, (block_config, drafter) in blocks.items():
        _write(path / kind, block_config, published_tensors(drafter), stored, loaded)


def _target_tensors(target: DeepseekV4ForCausalLM) -> dict[str, torch.Tensor]:
    """The target's tensors under their published names."""
    compressor = [
        ("compressor.indexer.scorer.weights_proj", "indexer.weights_proj"),
        ("compressor.indexer.q_b_proj", "indexer.wq_b"),
        ("compressor.indexer.", "indexer.compressor."),
        ("compressor.kv_norm", "compressor.norm"),
        ("compressor.kv_proj", "compressor.wkv"),
        ("compressor.gate_proj", "compressor.wgate"),
        ("position_bias", "ape"),
    ]
    top = {"embed_tokens.weight": "embed.weight", "lm_head.weight": "head.weight"}
    result: dict[str, torch.Tensor] = {}
    for name, tensor in target.state_dict().items():
        name = name.removeprefix("model.")
        if name.startswith("layers."):
            for ours, published in compressor:
                name = name.replace(ours, published)
            result.update(split_experts(published_block_name(name), tensor))
        else:
            result[top.get(name, name.replace("hc_head.hc_", "hc_head_"))] = tensor
    return result


def _generation(**options: Any) -> GenerationConfig:
    fields = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "do_sample": False, **options}
    return GenerationConfig.from_dict(fields)


def _write(path: Path, config: DeepseekV4Config, tensors: dict[str, torch.Tensor], stored: torch.dtype, loaded: torch.dtype) -> None:
    path.mkdir(parents=True, exist_ok=True)
    config.architectures = ["DeepseekV4ForCausalLM"]
    config.dtype = loaded
    config.save_pretrained(path)
    narrow = {name: tensor.detach().to(stored if tensor.is_floating_point() and tensor.dim() > 1 else tensor.dtype) for name, tensor in tensors.items()}
    save_file({name: tensor.contiguous().clone() for name, tensor in narrow.items()}, path / "model.safetensors", metadata={"format": "pt"})


# Acceptance, without an engine: transformers decodes, the drafters guess from what it left.


def measure_acceptance(model_dir: str | Path, kinds: Iterable[str] = ("mtp", "dspark", "dflash"), prompts: Sequence[str] = PROMPTS, max_tokens: int = 64, num_tokens: int = BLOCK_SIZE) -> dict[str, list[int]]:
    """Drafter -> counts of verify steps that accept 0, 1, .. ``num_tokens`` draft tokens, greedy, over all prompts.

    The truth is transformers' own greedy decode; each step drafts from the context that an engine would have then (only
    kept tokens), and accepts the longest prefix that agrees.
    """
    kinds = tuple(kinds)
    target = DeepseekV4ForCausalLM.from_pretrained(model_dir, attn_implementation="eager")
    target.requires_grad_(False)
    drafters = {kind: load_drafter(model_dir, target, kind) for kind in kinds}
    counts = {kind: [0] * (num_tokens + 1) for kind in kinds}
    for prompt in prompts:
        ids, start, streams = _greedy(target, [BOS_ID, *prompt.encode()], max_tokens + num_tokens)
        for kind, drafter in drafters.items():
            for accepted in _accepted_lengths(drafter, ids, start, start + max_tokens, streams, num_tokens):
                counts[kind][accepted] += 1
    return counts


@torch.no_grad()
def _greedy(target: DeepseekV4ForCausalLM, prompt: list[int], max_tokens: int) -> tuple[torch.Tensor, int, list[torch.Tensor]]:
    """Token ids of prompt and continuation, the prompt's length, and the streams ``[T, hc_mult, D]`` after each layer."""
    ids = cast(Any, target).generate(torch.tensor([prompt]), generation_config=_generation(max_new_tokens=max_tokens))
    streams: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda _module, _args, output: streams.append(output[0])) for layer in target.model.layers]
    try:
        target.model(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return ids[0], len(prompt), streams


@torch.no_grad()
def _accepted_lengths(drafter: Drafter, ids: torch.Tensor, start: int, end: int, streams: list[torch.Tensor], num_tokens: int) -> list[int]:
    """Accepted draft tokens of each verify step of one greedy request."""
    page, limit = 64, ids.shape[0] + drafter.config.sliding_window
    blocks = limit // page + 2
    caches = tuple(new_kv_cache(blocks, page, dtype=torch.float32) for _ in range(drafter.num_layers))
    table = torch.arange(1, blocks, dtype=torch.int32)[None]
    sampling = {"temperature": torch.zeros(1), "seeds": torch.zeros(1, dtype=torch.int64)}
    lengths, done, kept = [], 0, start
    while kept < min(end, ids.shape[0] - num_tokens):
        # Rows done..kept-1 went through the target since the last draft; ids[kept] is what it sampled.
        rows = torch.arange(done, kept)
        if isinstance(drafter, MTPDrafter):
            valid, last = torch.ones(1, dtype=torch.bool), torch.tensor([kept - 1 - done])
            mtp_inputs = MTPInputs(
                next_token_ids(ids[rows], last, ids[kept : kept + 1], valid), rows, streams[-1][rows], torch.zeros(len(rows), dtype=torch.int32),
                torch.ones(len(rows), dtype=torch.bool), last, torch.zeros(1, dtype=torch.int32), table, **sampling,
            )  # fmt: skip
            proposal = drafter.propose(mtp_inputs, caches, num_tokens=num_tokens, block_size=page, max_model_len=limit)
        else:
            assert isinstance(drafter, BlockDrafter)
            queries = num_tokens if drafter.sample_from_anchor else 1 + num_tokens
            positions, sampled = kept + torch.arange(queries), torch.arange(queries - num_tokens, queries)
            block_inputs = BlockInputs(
                mean_streams([streams[i][rows] for i in drafter.target_layer_ids]), rows, page + rows,
                torch.cat([ids[kept : kept + 1], torch.full((queries - 1,), drafter.mask_token_id)]), positions, torch.zeros(queries, dtype=torch.bool), page + positions,
                sampled, kept + 1 + torch.arange(num_tokens), torch.zeros(num_tokens, dtype=torch.int32), table, **sampling,
            )  # fmt: skip
            proposal = drafter.propose(block_inputs, caches, num_tokens=num_tokens, block_size=page, max_model_len=limit)
        agree = proposal.token_ids[0] == ids[kept + 1 : kept + 1 + num_tokens]
        accepted = int(agree.int().cumprod(0).sum())
        lengths.append(accepted)
        done, kept = kept, kept + 1 + accepted
    return lengths


def summary(report: TinyReport) -> str:
    """One screen about a checkpoint that was just made."""
    head = f"{report.path}: {report.size}, seed {report.seed}, {report.parameters / 1e6:.1f}M parameters, {report.seconds:.1f} s"
    return head + ("\n" + report.histogram() if report.acceptance else "")
