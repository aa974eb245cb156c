"""Request files, results files and the byte tokenizer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from dsv4_ops.engine.requests import Completion, Request, RequestFile, ResultWriter, Source, digest, read_requests, result_record
from dsv4_ops.engine.tokenizer import BOS_ID, EOS_ID, MASK_ID, PAD_ID, VOCAB_SIZE, ByteTokenizer, load_tokenizer
from dsv4_ops.errors import RequestError

TOKENIZER = ByteTokenizer()
GOOD = '{"prompt": "still served"}'


def read(tmp_path: Path, *lines: str | bytes, max_model_len: int = 256, **options: Any) -> RequestFile:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return read_requests(path, TOKENIZER, max_model_len=max_model_len, **options)


# Tokenizer.


def test_every_byte_and_character_comes_back() -> None:
    text = "".join(map(chr, range(0x800))) + "\u2028 naïve “quoted” 日本 🎈\r\n\0"
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    assert TOKENIZER.encode("é") == [BOS_ID, 0xC3, 0xA9]
    assert TOKENIZER.encode("é", bos=False) == [0xC3, 0xA9]


def test_decode_takes_any_ids_a_model_may_emit() -> None:
    assert TOKENIZER.decode([0xC3, 65]) == "\ufffdA"
    assert TOKENIZER.decode([BOS_ID, 72, EOS_ID, 105, PAD_ID, MASK_ID, VOCAB_SIZE - 1, -1, 10**9]) == "Hi"
    assert TOKENIZER.decode([]) == ""


def test_special_ids_lie_in_the_vocabulary() -> None:
    assert len({BOS_ID, EOS_ID, PAD_ID, MASK_ID}) == 4
    assert all(256 <= i < VOCAB_SIZE for i in (BOS_ID, EOS_ID, PAD_ID, MASK_ID))


def test_folder_without_tokenizer_means_bytes(tmp_path: Path) -> None:
    assert isinstance(load_tokenizer(tmp_path), ByteTokenizer)


# Reading.


def test_fields_and_defaults(tmp_path: Path) -> None:
    file = read(
        tmp_path,
        b'\xef\xbb\xbf{"prompt": "ab"}\r',
        b"",
        b"   \t\r",
        '{"prompt": "é", "max_tokens": 3, "temperature": 0.5, "seed": -9223372036854775808, "id": "x"}',
        '{"prompt": "c", "temperature": 1, "seed": 9223372036854775807, "id": 7}',
    )
    assert not file.problems
    assert file.requests == (
        Request(0, (BOS_ID, 97, 98), 64, 0.0, 0, (EOS_ID,)),
        Request(1, (BOS_ID, 0xC3, 0xA9), 3, 0.5, -(2**63), (EOS_ID,)),
        Request(2, (BOS_ID, 99), 64, 1.0, 2**63 - 1, (EOS_ID,)),
    )
    assert file.sources == (Source(1), Source(4, "x"), Source(5, 7))


BAD: dict[str, tuple[str | bytes, str]] = {
    "broken JSON": ('{"prompt": "a"', "got broken JSON at column 15"),
    "text after the object": ('{"prompt": "a"} {}', "got broken JSON at column 17"),
    "not an object": ('["a"]', "must be a JSON object"),
    "null": ("null", "got null"),
    "deep nesting": ("[" * 100_000, "nested"),
    "not UTF-8": (b'{"prompt": "\xff"}', "got byte 0xff at column 13"),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16"), "must be UTF-8"),
    "no prompt": ('{"max_tokens": 3}', "prompt is missing"),
    "empty prompt": ('{"prompt": ""}', "prompt must not be empty"),
    "prompt of wrong type": ('{"prompt": ["a"]}', "prompt must be a string, got a list"),
    "lone surrogate": ('{"prompt": "\\ud800"}', "lone surrogate"),
    "prompt too long": (json.dumps({"prompt": "a" * 255}), "got 256 tokens"),
    "prompt and answer too long": (json.dumps({"prompt": "a" * 99, "max_tokens": 157}), "got 100 + 157. Ask for at most 156"),
    "unknown field": ('{"prompt": "a", "temprature": 0}', 'got "temprature"'),
    "field twice": ('{"prompt": "a", "prompt": "b"}', '"prompt" twice'),
    "max_tokens 0": ('{"prompt": "a", "max_tokens": 0}', "max_tokens must be at least 1, got 0"),
    "max_tokens negative": ('{"prompt": "a", "max_tokens": -4}', "max_tokens must be at least 1, got -4"),
    "max_tokens of 2**31": ('{"prompt": "a", "max_tokens": 2147483648}', "max_tokens must be between"),
    "max_tokens boolean": ('{"prompt": "a", "max_tokens": true}', "max_tokens must be an integer, got a boolean"),
    "max_tokens fraction": ('{"prompt": "a", "max_tokens": 3.0}', "max_tokens must be an integer"),
    "max_tokens null": ('{"prompt": "a", "max_tokens": null}', "max_tokens must be an integer, got null"),
    "temperature negative": ('{"prompt": "a", "temperature": -0.5}', "got -0.5"),
    "temperature NaN": ('{"prompt": "a", "temperature": NaN}', "got nan"),
    "temperature infinite": ('{"prompt": "a", "temperature": Infinity}', "got inf"),
    "temperature 1e999": ('{"prompt": "a", "temperature": 1e999}', "got inf"),
    "temperature too small for float32": ('{"prompt": "a", "temperature": 1e-40}', "got 1e-40"),
    "temperature a huge integer": (f'{{"prompt": "a", "temperature": {10**400}}}', "an integer of 1329 bits"),
    "temperature text": ('{"prompt": "a", "temperature": "0"}', "temperature must be a number, got a string"),
    "temperature boolean": ('{"prompt": "a", "temperature": false}', "temperature must be a number, got a boolean"),
    "seed over int64": ('{"prompt": "a", "seed": 9223372036854775808}', "seed must be between"),
    "seed under int64": ('{"prompt": "a", "seed": -9223372036854775809}', "seed must be between"),
    "seed of 5000 digits": (f'{{"prompt": "a", "seed": {"9" * 5000}}}', "too long"),
    "seed fraction": ('{"prompt": "a", "seed": 1.5}', "seed must be an integer, got a number with a fraction"),
    "seed boolean": ('{"prompt": "a", "seed": true}', "seed must be an integer, got a boolean"),
    "id of wrong type": ('{"prompt": "a", "id": 1.5}', "id must be a string or an integer"),
    "id that no file holds": ('{"prompt": "a", "id": "x\\ud800"}', r'id must be encodable as UTF-8, got a lone surrogate in "x\ud800"'),
    "id twice": ('{"prompt": "a", "id": "taken"}', 'got "taken", which line 1 has too'),
}


@pytest.mark.parametrize("label", BAD)
def test_bad_line_is_named_and_the_others_are_served(tmp_path: Path, label: str) -> None:
    line, words = BAD[label]
    file = read(tmp_path, '{"prompt": "first", "id": "taken"}', "", line, GOOD)
    assert [r.index for r in file.requests] == [0, 1]
    assert [s.line for s in file.sources] == [1, 4]
    (problem,) = file.problems
    message = str(problem)
    assert message.startswith(f"{file.path}:3: ") and words in message
    assert "\n" not in message and len(message) < 400


def test_all_bad_lines_are_reported_at_once(tmp_path: Path) -> None:
    file = read(tmp_path, *(line for line, _ in BAD.values()))
    # "id twice" alone is fine without the line that took the id.
    assert len(file.problems) == len(BAD) - 1 and len(file.requests) == 1


def test_prompt_that_just_fits(tmp_path: Path) -> None:
    file = read(tmp_path, json.dumps({"prompt": "a" * 254}), json.dumps({"prompt": "a" * 99, "max_tokens": 156}))
    assert not file.problems
    assert [(len(r.prompt_ids), r.max_tokens) for r in file.requests] == [(255, 1), (100, 156)]


def test_limit_lowers_and_never_raises(tmp_path: Path) -> None:
    file = read(tmp_path, '{"prompt": "a", "max_tokens": 4}', '{"prompt": "a", "max_tokens": 40}', '{"prompt": "a"}', max_tokens=8)
    assert [r.max_tokens for r in file.requests] == [4, 8, 8]
    with pytest.raises(RequestError, match="at least 1, got 0"):
        read(tmp_path, GOOD, max_tokens=0)


def test_ids_past_the_model_vocabulary(tmp_path: Path) -> None:
    (problem,) = read(tmp_path, GOOD, vocab_size=256).problems
    assert "vocabulary of 256, got 256" in str(problem)


@pytest.mark.parametrize("make", [lambda p: p / "absent.jsonl", lambda p: p], ids=["absent", "folder"])
def test_unreadable_file(tmp_path: Path, make: Any) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        read_requests(make(tmp_path), TOKENIZER, max_model_len=10)


def test_empty_file_has_no_requests(tmp_path: Path) -> None:
    assert read(tmp_path, "").requests == ()


def test_shipped_requests(tmp_path: Path) -> None:
    data = files("dsv4_ops.engine") / "data" / "requests.jsonl"
    path = tmp_path / "copy.jsonl"
    path.write_bytes(data.read_bytes())
    file = read_requests(path, TOKENIZER, max_model_len=4096, vocab_size=VOCAB_SIZE)
    assert not file.problems and len(file.requests) == 8
    lengths = sorted(len(r.prompt_ids) for r in file.requests)
    assert lengths[0] < 8 and 1400 <= lengths[-1] <= 2000, "the longest is past the window, the indexer's records and twenty pages"
    assert sum(r.temperature == 0 for r in file.requests) >= 3 and sum(r.temperature > 0 for r in file.requests) >= 3


# Results.


def record(line: int, mode: str = "plain", prompt: int = 65) -> dict[str, Any]:
    return result_record(Request(0, (prompt,)), Source(line), Completion(0, [72, 195], 2, [1, 1], "length"), "H\ufffd", mode)


def test_record(tmp_path: Path) -> None:
    made = result_record(Request(3, (65,), seed=4), Source(9, "x"), Completion(3, [72, 257], 1, [2], "stop", [0.5, 0.25]), "H", "mtp")
    assert made == {
        "line": 9, "id": "x", "mode": "mtp", "request": digest(Request(0, (65,), seed=4)), "text": "H", "token_ids": [72, 257],
        "steps": 1, "accepted_lengths": [2], "finish_reason": "stop",
    }  # fmt: skip
    assert "id" not in record(1)


def test_digest_tells_what_is_asked_apart() -> None:
    base = Request(0, (1, 2), 5, 0.5, 7, (9,))
    assert digest(base) == digest(Request(3, (1, 2), 5, 0.5, 7, (9,)))
    others = [Request(0, (1, 3), 5, 0.5, 7, (9,)), Request(0, (1, 2), 6, 0.5, 7, (9,)), Request(0, (1, 2), 5, 0.0, 7, (9,)), Request(0, (1, 2), 5, 0.5, 8, (9,)), Request(0, (1, 2), 5, 0.5, 7)]
    assert len({digest(r) for r in [base, *others]}) == 6


def test_each_record_is_in_the_file_when_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultWriter(path) as writer:
        for line in (1, 2):
            writer.write(record(line))
            assert [json.loads(raw)["line"] for raw in path.read_text().splitlines()] == list(range(1, line + 1))


def test_text_of_any_kind_stays_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultWriter(path) as writer:
        writer.write(record(1) | {"text": "a\nb\u2028c\0\ufffd\ud800"})
    (line,) = path.read_bytes().removesuffix(b"\n").split(b"\n")
    assert json.loads(line)["text"].startswith("a\nb\u2028c\0\ufffd")


def test_existing_results_are_refused_and_untouched(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("precious\n")
    with pytest.raises(RequestError, match=r"exists already.*--resume.*--overwrite"):
        ResultWriter(path)
    assert path.read_text() == "precious\n"
    with ResultWriter(path, "overwrite"):
        pass
    assert path.read_text() == "precious\n", "nothing was written, so nothing is lost"
    with ResultWriter(path, "overwrite") as writer:
        writer.write(record(1))
        writer.write(record(2))
    assert [json.loads(raw)["line"] for raw in path.read_text().splitlines()] == [1, 2]


def test_empty_existing_file_and_device_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.touch()
    for target in (path, Path(os.devnull)):
        with ResultWriter(target) as writer:
            writer.write(record(1))


def test_resume_keeps_whole_records_and_drops_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultWriter(path) as writer:
        writer.write(record(1))
        writer.write(record(2, "mtp"))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"line": 3, "mo')
    with ResultWriter(path, "resume") as writer:
        assert path.read_bytes() == whole
        request = Request(5, (65,))
        assert writer.finished(request, Source(1), "plain") and writer.finished(request, Source(2), "mtp")
        assert not writer.finished(request, Source(2), "plain") and not writer.finished(request, Source(3), "plain")
        writer.write(record(3))
    assert [json.loads(raw)["line"] for raw in path.read_text().splitlines()] == [1, 2, 3]


def test_resume_refuses_other_files_and_changed_requests(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(RequestError, match=r"out.jsonl:1: not a result"):
        ResultWriter(path, "resume")
    path.write_text(json.dumps(record(1)) + "\n")
    with ResultWriter(path, "resume") as writer, pytest.raises(RequestError, match="line 1: the request file has changed"):
        writer.finished(Request(0, (66,)), Source(1), "plain")


@pytest.mark.parametrize("target", ["absent/out.jsonl", "."])
def test_unwritable_results_file(tmp_path: Path, target: str) -> None:
    with pytest.raises(RequestError, match="cannot be written there"):
        ResultWriter(tmp_path / target)


def test_signal_in_a_write_leaves_a_whole_record_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl"
    size = len(json.dumps(record(1), ensure_ascii=False).encode()) + 1
    real = os.write
    with ResultWriter(path) as writer:
        writer.write(record(1))
        for written, lines in ((size, 2), (10, 2), (0, 2)):

            def interrupted(fd: int, data: Any, written: int = written) -> int:
                real(fd, data[:written])
                raise KeyboardInterrupt

            monkeypatch.setattr(os, "write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                writer.write(record(2))
            assert len([json.loads(raw) for raw in path.read_text().splitlines()]) == lines


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="needs a limit on the size of files")
def test_full_disk_leaves_whole_records_only(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    size = len(json.dumps(record(1), ensure_ascii=False).encode()) + 1
    script = f"""
        import resource, signal
        from tests_record import record
        from dsv4_ops.engine.requests import ResultWriter
        from dsv4_ops.errors import RequestError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, ({2 * size + 10}, {2 * size + 10}))
        writer = ResultWriter({str(path)!r})
        writer.write(record); writer.write(record)
        try:
            writer.write(record)
        except RequestError as error:
            print(error)
    """
    (tmp_path / "tests_record.py").write_text(f"record = {record(1)!r}\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=env, capture_output=True, text=True, check=True)
    assert "results cannot be written" in done.stdout
    assert [json.loads(raw)["line"] for raw in path.read_text().splitlines()] == [1, 1]
