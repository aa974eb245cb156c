"""Byte tokenizer: one token a byte of UTF-8, and four special tokens. Needs no files and no library.

========  =============================================
id        token
========  =============================================
0 - 255   the byte of that value
256       bos: begins every prompt
257       eos: a model that emits it has finished
258       pad
259       mask: what block drafters put in unknown places
260 - 319 unused, so that the vocabulary is a multiple of 64
========  =============================================

A model with another vocabulary brings its own tokenizer (``tokenizer.json`` in its folder, read with transformers): see
:func:`load_tokenizer`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from ..errors import RequestError

__all__ = ["BOS_ID", "EOS_ID", "MASK_ID", "PAD_ID", "VOCAB_SIZE", "ByteTokenizer", "Tokenizer", "load_tokenizer"]

BOS_ID, EOS_ID, PAD_ID, MASK_ID = 256, 257, 258, 259
VOCAB_SIZE = 320


class Tokenizer(Protocol):
    """What the command line needs of a tokenizer."""

    eos_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class ByteTokenizer:
    """Text to UTF-8 bytes and back. Stateless."""

    vocab_size = VOCAB_SIZE
    bos_id, eos_id, pad_id, mask_id = BOS_ID, EOS_ID, PAD_ID, MASK_ID
    eos_ids: tuple[int, ...] = (EOS_ID,)

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Token ids of ``text``, begun by bos. Raises RequestError for text that UTF-8 cannot hold (lone surrogates)."""
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"text must be encodable as UTF-8, got a lone surrogate {text[error.start]!r} at character {error.start}. Replace it.") from None
        return [BOS_ID, *data] if bos else list(data)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``. Special and unused ids have no text; bytes that are not UTF-8 become U+FFFD."""
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")


class _HubTokenizer:
    """A tokenizer of transformers, reduced to :class:`Tokenizer`."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.eos_ids: tuple[int, ...] = () if inner.eos_token_id is None else (int(inner.eos_token_id),)

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self.inner.encode(text)]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.inner.decode(list(ids), skip_special_tokens=True))


def load_tokenizer(model_dir: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint: its own when the folder has one (local files only), else bytes."""
    if not (Path(model_dir) / "tokenizer.json").is_file():
        return ByteTokenizer()
    from transformers import AutoTokenizer

    try:
        return _HubTokenizer(AutoTokenizer.from_pretrained(model_dir, local_files_only=True))
    except Exception as error:  # the readers of these files raise many kinds, the base class among them
        raise RequestError(f"{Path(model_dir) / 'tokenizer.json'}: cannot be loaded: {(str(error) or type(error).__name__).splitlines()[0]}") from None
