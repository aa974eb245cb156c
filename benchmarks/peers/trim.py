"""Leaves out what is not measured: machine code of other GPUs, and kernel variants that would compile for most of an hour."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

FATBIN, MACHINE_CODE, SM = 0xBA55ED50, 2, 90


def _section(library: bytes, wanted: bytes) -> tuple[int, int]:
    """Offset and size of a section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", library, table + i * size) for i in range(count)]
    for head in heads:
        name = heads[names][4] + head[0]
        if library[name : library.index(b"\0", name)] == wanted:
            return head[4], head[5]
    raise LookupError(f"no section {wanted.decode()}: not a CUDA library")


def _entries(library: bytes) -> Iterator[tuple[int, int, int, int]]:
    """(kind, architecture, offset of the payload, its size) of all entries of all fat binaries."""
    at, length = _section(library, b".nv_fatbin")
    end = at + length
    while at < end:
        magic, _, head, body = struct.unpack_from("<IHHQ", library, at)
        if magic != FATBIN:  # padding
            at += 8
            continue
        at, stop = at + head, at + head + body
        while at < stop:
            kind, _, head, size = struct.unpack_from("<HHIQ", library, at)
            (architecture,) = struct.unpack_from("<I", library, at + 28)
            yield kind, architecture, at + head, size
            at += head + size


def hopper_only(library: bytes) -> bytes:
    """The same library with zeros in place of code that an sm_90 GPU does not load (PTX too): it packs to an eighth.

    Headers, sm_90 code and all host code stay byte for byte. Raises LookupError where there is no sm_90 code.
    """
    entries, trimmed = list(_entries(library)), bytearray(library)
    if not any(entry[:2] == (MACHINE_CODE, SM) for entry in entries):
        raise LookupError(f"no machine code for sm_{SM}")
    for kind, architecture, at, size in entries:
        if (kind, architecture) != (MACHINE_CODE, SM):
            trimmed[at : at + size] = bytes(size)
    return bytes(trimmed)


# The dispatch over dtypes of FlashInfer's header, with one left.
_FLOAT32_ONLY = """#undef DISPATCH_DLPACK_DTYPE_TO_CTYPE_FP32_FP16
#define DISPATCH_DLPACK_DTYPE_TO_CTYPE_FP32_FP16(dtype, c_type, ...) \\
  [&]() -> bool { using c_type = float; return __VA_ARGS__(); }()

"""
RAGGED = ("cub_topk_ragged_transform", "cub_topk_ragged_transform_workspace_size")


def _after_block(text: str, at: int) -> int:
    """The index behind the brace that closes the first one from ``at`` on."""
    depth, at = 1, text.index("{", at) + 1
    while depth:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return at


def _only(text: str, wanted: str) -> int:
    if text.count(wanted) != 1:
        raise LookupError(f"{text.count(wanted)} of {wanted!r} in cub_topk.cu: is this the FlashInfer of requirements.txt?")
    return text.index(wanted)


def ragged_cub(source: str) -> str:
    """FlashInfer's ``cub_topk.cu`` with its ragged float32 top-k alone: no order of ties, rows that start at column 0.

    The kernels that are left are those of the whole file.
    """
    end = _only(source, "\n}  // namespace\n")
    head, functions = source[:end], source[end:]
    start = at = _only(head, "if (tie_break == 1) {")
    after = _after_block(head, at)
    while head[after:].lstrip().startswith("else"):
        at, after = after, _after_block(head, after)
    head = head[:start] + head[head.index("{", at) : after] + head[after:]  # the last branch alone
    start = _only(head, "if (row_starts != nullptr) {")
    head = head[:start] + head[_after_block(head, start) :].lstrip()
    start = _only(head, "\nnamespace {\n") + 1
    parts = [head[:start] + _FLOAT32_ONLY + head[start:], "}  // namespace", ""]
    for name in RAGGED:
        found = re.search(rf"^(void|int64_t) {name}\(.*?^}}\n", functions, re.S | re.M)
        if found is None:
            raise LookupError(f"cub_topk.cu has no {name}")
        parts.append(f"{found[0]}TVM_FFI_DLL_EXPORT_TYPED_FUNC({name}, {name});\n")
    return "\n".join(parts)
