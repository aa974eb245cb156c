"""The API reference as one Markdown page, made from docstrings and signatures: the same on every machine.

``python -m dsv4_ops ops --reference --write docs/api.md`` renews the page. Docstrings are written to be read by ``help()``; here their
double quotes, tables and indented blocks become Markdown.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from . import _registry, doctor, envs
from ._registry import Op

__all__ = ["MODULES", "markdown", "reference_text"]

COMMAND = "python -m dsv4_ops ops --reference --write docs/api.md"
MODULES = ("dsv4_ops", "dsv4_ops.graphs", "dsv4_ops.passes", "dsv4_ops.attention_backends", "dsv4_ops.parallel", "dsv4_ops.distributed", "dsv4_ops.testing", "dsv4_ops.engine")
"""Modules whose ``__all__`` is public, in the order of the page; ``errors`` and environment variables have tables of their own."""


def reference_text() -> str:
    """The page."""
    parts = {"Ops": _ops(), **{name: "\n".join(_module(name)) for name in MODULES}, "Errors": _errors(), "Environment": _environment()}
    contents = "".join(f"- [{title}](#{re.sub(r'[^a-z0-9_ -]', '', title.lower()).replace(' ', '-')})\n" for title in parts)
    head = f"# API reference\n\nMade from the docstrings by `{COMMAND}`; a test compares it. In Python: `help(dsv4_ops.topk)`, and `python -m dsv4_ops ops topk` for one op.\n\n"
    page = head + contents + "".join(f"\n## {title}\n\n{body.strip()}\n" for title, body in parts.items())
    return re.sub(r"\n{3,}", "\n\n", page)


# Parts.


def _ops() -> str:
    families: dict[str, list[Op]] = {}
    for op in _registry.ops():
        families.setdefault(op.family, []).append(op)
    lines = [
        "One section a file of `dsv4_ops/`: what its ops have in common, the table of arguments and results, then each op. Every op is also `torch.ops.dsv4_ops.NAME`, and those with "
        "an out form `torch.ops.dsv4_ops.NAME.out(..., out=buffer)`, which writes your buffers and returns nothing."
    ]
    for family, ops in families.items():
        lines += [f"\n### {family}\n", markdown(sys.modules[f"{__package__}.{family}"].__doc__ or "")]
        for op in ops:
            lines += _op(op)
    return "\n".join(lines)


def _op(op: Op) -> Iterator[str]:
    function = getattr(sys.modules[str(__package__)], op.name, None)
    yield f"\n#### {op.name}\n"
    yield _fenced(f"{op.name}{_signature(function)}" if function is not None else op.schema)
    yield markdown("\n".join(line for line in (inspect.getdoc(function) or "").splitlines() if not line.startswith("Arguments: ``")))
    row = next(row for row in doctor.ops_table() if row["op"] == op.name)
    out = f"out form with {', '.join(f'`{name}`' for name in op.out_names)}" if op.out_names else f"writes {', '.join(f'`{name}`' for name in op.mutates)}" if op.mutates else "no out form"
    safe = "may be captured in a CUDA graph" if op.graph_safe else f"no CUDA graph may hold it: {op.graph_note}"
    yield f"\nCPU: {', '.join(row['backends']['cpu'])}. CUDA: {', '.join(row['backends']['cuda'])}. {out[0].upper()}{out[1:]}; {safe}."


def _module(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    yield markdown(module.__doc__ or "")
    ops = {op.name for op in _registry.ops()} if name == __package__ else set()
    values = {item: getattr(module, item) for item in sorted(module.__all__, key=str.lower) if item not in ops and not item.startswith("__")}
    constants = [item for item, value in values.items() if not callable(value)]
    if constants:
        yield "\nConstants: " + ", ".join(f"`{item}`" + (f" = `{values[item]!r}`" if isinstance(values[item], int | float | str) else "") for item in constants) + "."
    for item, value in values.items():
        if callable(value) and not isinstance(value, ModuleType):
            yield from _callable(item, value)


def _callable(name: str, value: Any) -> Iterator[str]:
    yield f"\n### {name}\n"
    value = inspect.unwrap(value)
    if not inspect.isclass(value) and not inspect.isfunction(value):
        yield f"`{name}` is the type `{value}`.".replace("collections.abc.", "").replace("typing.", "")
        return
    yield _fenced(f"{'class ' if inspect.isclass(value) else ''}{name}{_signature(value)}")
    yield markdown(inspect.getdoc(value) or "")
    if inspect.isclass(value):
        own = {key: item for base in reversed(value.__mro__) if base.__module__.startswith(str(__package__)) for key, item in vars(base).items()}
        for key, item in own.items():
            target = item.fget if isinstance(item, property) else item.__func__ if isinstance(item, staticmethod | classmethod) else item
            if key.startswith("_") or not inspect.isfunction(target) or not inspect.getdoc(target):
                continue
            signature = "" if isinstance(item, property) else _signature(target, skip_self=not isinstance(item, staticmethod))
            yield f"\n`{name}.{key}{signature}`\n"
            yield "> " + markdown(inspect.getdoc(target) or "").replace("\n", "\n> ").replace("> \n", ">\n")


def _errors() -> str:
    from . import errors

    rows = [(name, getattr(errors, name)) for name in errors.__all__]
    lines = ["In `dsv4_ops.errors`; a call that is refused has done nothing.\n", "| error | is a | meaning |", "|---|---|---|"]
    lines += [f"| `{name}` | {', '.join(f'`{base.__name__}`' for base in error.__bases__)} | {_cell(' '.join((inspect.getdoc(error) or '').split()))} |" for name, error in rows]
    return "\n".join(lines)


def _environment() -> str:
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    return "\n".join(lines + [f"| `{v.name}` | {f'`{v.default}`' if v.default else ''} | {_cell(v.meaning)} |" for v in envs.VARIABLES])


# Signatures.


def _signature(value: Any, skip_self: bool = False) -> str:
    """As it is written in the source, whatever the version of Python; a line a parameter where it is long."""
    try:
        signature = inspect.signature(value)
    except (ValueError, TypeError):
        return ""
    parameters, texts, star = list(signature.parameters.values())[1 if skip_self else 0 :], [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            texts.append("*")
        star = star or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        text = ("*" if parameter.kind is parameter.VAR_POSITIONAL else "**" if parameter.kind is parameter.VAR_KEYWORD else "") + parameter.name
        typed = parameter.annotation is not parameter.empty
        text += f": {_type(parameter.annotation)}" if typed else ""
        if parameter.default is not parameter.empty:
            text += f" = {_default(parameter.default)}" if typed else f"={_default(parameter.default)}"
        texts.append(text)
    returned = "" if inspect.isclass(value) or signature.return_annotation is signature.empty else f" -> {_type(signature.return_annotation)}"
    line = f"({', '.join(texts)}){returned}"
    return line if len(line) <= 110 or skip_self else "(\n" + "".join(f"    {text},\n" for text in texts) + f"){returned}"


def _type(annotation: Any) -> str:
    annotation = getattr(annotation, "__forward_arg__", annotation)
    if isinstance(annotation, str):
        return annotation
    if annotation is None or annotation is type(None):
        return "None"
    return annotation.__qualname__ if inspect.isclass(annotation) and not hasattr(annotation, "__args__") else str(annotation).replace("typing.", "").replace("collections.abc.", "")


def _default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return str(value)
    return re.sub(r"<(?:function|class) '?([\w.]+)'?.*?>", r"\1", repr(value)) if not re.search(r" at 0x|<factory>", repr(value)) else "..."


# Markdown of a docstring.


def markdown(text: str) -> str:
    """A docstring as Markdown: its double quotes, roles, simple tables and indented blocks."""
    lines, done, i = inspect.cleandoc(text).splitlines(), list[str](), 0
    while i < len(lines):
        line = lines[i]
        if re.fullmatch(r"=+( +=+)+", line):
            end = next(j for j in range(i + 1, len(lines)) if lines[j] == line and not "".join(lines[j + 1 : j + 2]).strip())  # the rule before an empty line
            done += _table(lines[i:end], [match.span() for match in re.finditer("=+", line)])
            i = end + 1
        elif line.startswith("    ") and (not done or not done[-1].strip()):
            end = next((j for j in range(i, len(lines)) if lines[j].strip() and not lines[j].startswith("    ")), len(lines))
            done += ["```text", *(part[4:] for part in "\n".join(lines[i:end]).rstrip().split("\n")), "```", ""]
            i = end
        else:
            done.append(_inline("" if line == "::" else re.sub(r"::$", ":", line)))
            i += 1
    return "\n".join(done).strip()


def _table(lines: Sequence[str], columns: Sequence[tuple[int, int]]) -> list[str]:
    """A simple table: a line whose first cell is empty, or stands behind a comma, goes on with the row before it; a rule of dashes is left out."""
    rows: list[list[str]] = []
    for line in lines:
        if not line.strip() or re.fullmatch(r"[=\- ]+", line):
            continue
        ends = [start for start, _ in columns[1:]] + [len(line)]
        cells = [line[start:end].strip() for (start, _), end in zip(columns, ends, strict=True)]
        if not rows or (cells[0] and not rows[-1][0].endswith(",")):
            rows.append(["" if cell == "." else cell for cell in cells])
        else:
            rows[-1] = [" ".join(dict.fromkeys(filter(None, pair))) for pair in zip(rows[-1], cells, strict=True)]  # a dtype said again is one
    if lines[0] not in lines[1:]:  # no rule below a head: Markdown wants one
        rows.insert(0, [""] * len(columns))
    text = ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return [text[0], "|" + "---|" * len(columns), *text[1:], ""]


def _cell(text: str) -> str:
    return _inline(text).replace("|", "\\|")


def _inline(text: str) -> str:
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", re.sub(r"``(.+?)``", r"`\1`", text))


def _fenced(text: str) -> str:
    return f"```text\n{text}\n```\n"
