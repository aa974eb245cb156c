"""Requests to the decode engine, read from a JSONL file, and the results file.

A request file has one JSON object a line; empty lines are skipped, a byte order mark is ignored.

===========  ======  ========  =========================================================================================
field        type    default   meaning
===========  ======  ========  =========================================================================================
prompt       string  required  text to continue, not empty
max_tokens   int     64        most tokens to generate, at least 1. Given: prompt and answer must fit into the model's
                               length, else the request is refused. Not given: lowered to what fits
temperature  number  0         0: greedy; else 0.001 to 1000
seed         int     0         of this request's noise, any int64. The same seed gives the same answer in any batch
id           string  none      the caller's name for the request (or an integer); unique in the file; copied to the results
===========  ======  ========  =========================================================================================

A bad line never stops the others: :func:`read_requests` returns the good ones, and one :class:`~dsv4_ops.errors.RequestError`
for each bad one, which begins with ``file:line:``.

The results file has one JSON object for each finished request, in the order in which they finish: ``line`` (of the
request), ``id`` (when given), ``mode``, ``request`` (digest of what was asked, for resuming), ``text``, ``token_ids``,
``steps``, ``accepted_lengths`` (tokens emitted by each decode step), ``finish_reason`` ("length" or "stop"). Each is one
write to the end of the file, so whatever stops the process, the finished ones are there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import RequestError
from .tokenizer import Tokenizer

__all__ = ["Completion", "Request", "RequestFile", "ResultWriter", "Source", "digest", "read_requests", "result_record"]

DEFAULT_MAX_TOKENS = 64
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
"""Beyond these, logits divided by the temperature overflow or vanish in float32."""
_FIELDS = ("prompt", "max_tokens", "temperature", "seed", "id")


@dataclass(frozen=True)
class Request:
    """One prompt to continue. ``index`` is its place among the requests of one ``generate`` call."""

    index: int
    prompt_ids: tuple[int, ...]
    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()


@dataclass
class Completion:
    """What became of a request."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    """Generated tokens, a stop token included."""
    steps: int = 0
    """Decode steps of this request, prefill not counted."""
    accepted_lengths: list[int] = field(default_factory=list)
    """Tokens that each of these steps emitted."""
    finish_reason: str = ""
    """"length" or "stop"."""
    margins: list[float] = field(default_factory=list)
    """Gap between the two best logits at each token, when the engine records it."""
    logits: list[Any] = field(default_factory=list, repr=False, compare=False)
    """The target's logits row (a CPU tensor) at each token, when the engine records it."""


@dataclass(frozen=True)
class Source:
    """Where a request came from."""

    line: int
    id: str | int | None = None


@dataclass(frozen=True)
class RequestFile:
    """A file that was read: ``requests[i]`` came from ``sources[i]`` and has index i."""

    path: Path
    requests: tuple[Request, ...]
    sources: tuple[Source, ...]
    problems: tuple[RequestError, ...]


def read_requests(path: str | Path, tokenizer: Tokenizer, *, max_model_len: int, max_tokens: int | None = None, vocab_size: int | None = None) -> RequestFile:
    """Read a request file.

    ``max_tokens`` is the most that any request gets (asked for or not). ``vocab_size`` is checked against the token ids.
    Raises RequestError when the file itself cannot be read.
    """
    path = Path(path)
    if max_tokens is not None and max_tokens < 1:
        raise RequestError(f"max_tokens must be at least 1, got {max_tokens}.")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror or error}.") from None
    requests: list[Request] = []
    sources: list[Source] = []
    problems: list[RequestError] = []
    seen: dict[str | int, int] = {}
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not raw.strip():
            continue
        try:
            fields = _parse(raw)
            name = _identifier(fields, seen)
            request = _request(len(requests), fields, tokenizer, max_model_len, max_tokens, vocab_size)
        except RequestError as error:
            problems.append(RequestError(f"{path}:{number}: {error}"))
            continue
        if name is not None:
            seen[name] = number
        requests.append(request)
        sources.append(Source(number, name))
    return RequestFile(path, tuple(requests), tuple(sources), tuple(problems))


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the line must be UTF-8, got byte 0x{raw[error.start]:02x} at column {error.start + 1}. Save the file as UTF-8.") from None
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise RequestError(f'the line must be one JSON object such as {{"prompt": "Hello"}}, got broken JSON at column {error.colno}: {error.msg}.') from None
    except RecursionError:
        raise RequestError("the line must be one flat JSON object, got deeply nested JSON.") from None
    except RequestError:
        raise
    except ValueError as error:  # integers of thousands of digits
        raise RequestError(f"the line holds a number that is too long: {error}.") from None
    if not isinstance(value, dict):
        raise RequestError(f'the line must be a JSON object such as {{"prompt": "Hello"}}, got {_kind(value)}.')
    unknown = [name for name in value if name not in _FIELDS]
    if unknown:
        raise RequestError(f"fields must be among {', '.join(_FIELDS)}, got {', '.join(map(_short, unknown))}. Remove it or correct its spelling.")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise RequestError(f"a field must be given once, got {_short(name)} twice.")
        fields[name] = value
    return fields


def _identifier(fields: dict[str, Any], seen: dict[str | int, int]) -> str | int | None:
    name = fields.get("id")
    if name is None:
        return None
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise RequestError(f"id must be a string or an integer, got {_kind(name)}.")
    if isinstance(name, str) and any("\ud800" <= c <= "\udfff" for c in name):
        raise RequestError(f"id must be encodable as UTF-8, got a lone surrogate in {_short(name)}.")
    if name in seen:
        raise RequestError(f"id must be unique in the file, got {_short(name)}, which line {seen[name]} has too.")
    return name


def _request(index: int, fields: dict[str, Any], tokenizer: Tokenizer, max_model_len: int, limit: int | None, vocab_size: int | None) -> Request:
    if "prompt" not in fields:
        raise RequestError('prompt is missing. Add "prompt": "some text".')
    prompt = fields["prompt"]
    if not isinstance(prompt, str):
        raise RequestError(f"prompt must be a string, got {_kind(prompt)}.")
    if not prompt:
        raise RequestError("prompt must not be empty.")
    asked = _integer(fields, "max_tokens", None, 1, 2**31 - 1)
    temperature = _temperature(fields)
    seed = _integer(fields, "seed", 0, -(2**63), 2**63 - 1)
    try:
        ids = tuple(tokenizer.encode(prompt))
    except RequestError as error:
        raise RequestError(f"prompt: {error}") from None
    if not ids:
        raise RequestError("prompt must give at least one token, got none from the tokenizer.")
    if vocab_size is not None and not all(0 <= i < vocab_size for i in ids):
        raise RequestError(f"prompt must encode to ids below the model's vocabulary of {vocab_size}, got {max(ids)}. The tokenizer is not this model's.")
    room = max_model_len - len(ids)
    if room < 1:
        raise RequestError(f"prompt must leave room for an answer in the model's length of {max_model_len} tokens, got {len(ids)} tokens. Shorten it.")
    wanted = DEFAULT_MAX_TOKENS if asked is None else asked
    if limit is not None:
        wanted = min(wanted, limit)
    if wanted > room and asked is not None:
        raise RequestError(f"prompt and max_tokens must fit into the model's length of {max_model_len} tokens, got {len(ids)} + {wanted}. Ask for at most {room}.")
    assert seed is not None
    return Request(index, ids, min(wanted, room), temperature, seed, tuple(tokenizer.eos_ids))


def _integer(fields: dict[str, Any], name: str, default: int | None, low: int, high: int) -> int | None:
    if name not in fields:
        return default
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {_kind(value)}.")
    if not low <= value <= high:
        expected = f"at least {low}" if value < low and low == 1 else f"between {low} and {high}"
        raise RequestError(f"{name} must be {expected}, got {_short(value)}.")
    return value


def _temperature(fields: dict[str, Any]) -> float:
    value = fields.get("temperature", 0)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"temperature must be a number, got {_kind(value)}.")
    in_range = value == 0 or (MIN_TEMPERATURE <= value <= MAX_TEMPERATURE)  # false for NaN
    if not in_range:
        raise RequestError(f"temperature must be 0 (greedy) or between {MIN_TEMPERATURE:g} and {MAX_TEMPERATURE:g}, got {_short(value)}.")
    return float(value)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "an integer", type(None): "null"}
    if isinstance(value, float):
        return "a number with a fraction" if math.isfinite(value) else f"{value}"
    return names.get(type(value), type(value).__name__)


def _short(value: object) -> str:
    """``value`` on one line of bounded length, whatever a file holds."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    text = json.dumps(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def digest(request: Request) -> str:
    """A name for what a request asks: equal for equal requests, in any file and at any index."""
    asked = [request.prompt_ids, request.max_tokens, request.temperature, request.seed, request.stop_ids]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def result_record(request: Request, source: Source, completion: Completion, text: str, mode: str) -> dict[str, Any]:
    record: dict[str, Any] = {"line": source.line}
    if source.id is not None:
        record["id"] = source.id
    return record | {
        "mode": mode,
        "request": digest(request),
        "text": text,
        "token_ids": completion.token_ids,
        "steps": completion.steps,
        "accepted_lengths": completion.accepted_lengths,
        "finish_reason": completion.finish_reason,
    }


class ResultWriter:
    """Appends result records to a file; a record is there whole or not at all.

    ``existing`` says what to do with a file that is not empty: "refuse" (RequestError), "overwrite", or "resume": keep
    its records, drop an unfinished last line, append. :meth:`finished` tells what a resumed file already holds. ``-`` is
    standard output.
    """

    def __init__(self, path: str | Path, existing: str = "refuse") -> None:
        self.path = Path(path)
        self._done: dict[tuple[int, str], str] = {}
        self._owns = str(path) != "-"
        self._truncate = False
        if not self._owns:
            self._fd = 1
            return
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o666)
        except OSError as error:
            raise RequestError(f"{path}: results cannot be written there: {error.strerror or error}.") from None
        try:
            info = os.fstat(self._fd)
            self._regular = stat.S_ISREG(info.st_mode)
            if self._regular and info.st_size:
                self._reuse(existing)
        except BaseException:
            os.close(self._fd)
            raise

    def _reuse(self, existing: str) -> None:
        if existing == "overwrite":
            self._truncate = True  # with the first result: a run that fails before it keeps the old file
        elif existing == "resume":
            self._resume()
        else:
            raise RequestError(f"{self.path}: the results file exists already. Name another, or give --resume (serve what is missing) or --overwrite.")

    def _resume(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        for number, raw in enumerate(data[:whole].splitlines(), 1):
            try:
                record = json.loads(raw)
                self._done[int(record["line"]), str(record["mode"])] = str(record["request"])
            except (ValueError, KeyError, TypeError):
                raise RequestError(f"{self.path}:{number}: not a result of this command, so it cannot be resumed. Name another file, or give --overwrite.") from None
        os.ftruncate(self._fd, whole)

    def finished(self, request: Request, source: Source, mode: str) -> bool:
        """Whether the resumed file holds the result of this very request. Raises RequestError when its line then asked for something else."""
        known = self._done.get((source.line, mode))
        if known is not None and known != digest(request):
            raise RequestError(f"{self.path}: holds the result of another request for line {source.line}: the request file has changed. Name another file, or give --overwrite.")
        return known is not None

    def write(self, record: dict[str, Any]) -> None:
        data = json.dumps(record, ensure_ascii=False).encode("utf-8", errors="replace") + b"\n"
        if self._truncate:
            os.ftruncate(self._fd, 0)
            self._truncate = False
        start = os.fstat(self._fd).st_size if self._owns and self._regular else None
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except BaseException as error:
            # A full disk, or a signal: no half record stays behind.
            if start is not None and os.fstat(self._fd).st_size != start + len(data):
                os.ftruncate(self._fd, start)
            if not isinstance(error, OSError) or isinstance(error, BrokenPipeError):
                raise
            raise RequestError(f"{self.path}: results cannot be written: {error.strerror or error}.") from None

    def close(self) -> None:
        if self._owns and self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> ResultWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()
