"""An op cannot exist without everything that its tests need."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dsv4_ops
from dsv4_ops import _registry, testing


def everything_of(op: testing.Op) -> dict[str, object]:
    return {"check": op.check, "reference": op.reference, "fake": op.fake, "samples": op.samples, "sized": op.sized, "bad_inputs": op.bad_inputs}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[_registry.Op]:
    """A defined, not yet implemented op in a registry of its own."""
    library = torch.library.Library("dsv4_ops_registry_test", "FRAGMENT")
    monkeypatch.setattr(_registry, "_ops", {})
    monkeypatch.setattr(_registry, "NAMESPACE", "dsv4_ops_registry_test")
    monkeypatch.setattr(_registry, "_library", library)
    monkeypatch.setattr(_registry.Op, "overload", property(lambda self: getattr(torch.ops.dsv4_ops_registry_test, self.name).default))
    yield _registry.define(MTP.schema.replace(MTP.name, "toy", 1))
    library._destroy()  # now: when the collector gets to it, the next test has defined the op anew, and would lose it


@pytest.mark.parametrize("role", ["check", "reference", "fake", "samples", "sized", "bad_inputs"])
def test_each_part_is_required(toy: _registry.Op, role: str) -> None:
    parts = everything_of(MTP) | {role: None}
    with pytest.raises(RuntimeError, match=f"cannot be registered without {role}"):
        toy.implement(**parts)  # type: ignore[arg-type]


def test_defined_but_not_implemented_fails_the_import(toy: _registry.Op) -> None:
    with pytest.raises(RuntimeError, match=r"not implemented.*toy"):
        _registry.seal()


def test_signature_must_be_the_schema(toy: _registry.Op) -> None:
    parts = everything_of(MTP) | {"fake": lambda seq_lens, n: seq_lens}
    with pytest.raises(RuntimeError, match="fake of op toy must take the arguments of its schema"):
        toy.implement(**parts)  # type: ignore[arg-type]


def test_complete_op_is_accepted_once(toy: _registry.Op) -> None:
    toy.implement(**everything_of(MTP))  # type: ignore[arg-type]
    assert toy(torch.tensor([10, 7]), 2).tolist() == [[9, 10], [6, 7]]
    with pytest.raises(RuntimeError, match="implemented twice"):
        toy.implement(**everything_of(MTP))  # type: ignore[arg-type]


def test_every_op_of_the_namespace_comes_from_the_registry() -> None:
    known = {op.name for op in testing.ops()}
    schemas = [s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("dsv4_ops::")]
    assert {name.split("::")[1] for name in schemas} == known
    for op in testing.ops():
        assert op.reference is not None and op.fake is not None


def test_mutating_ops_return_nothing_and_others_return_fresh_tensors() -> None:
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("dsv4_ops::"):
            writes = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            assert not (writes and schema.returns), f"{schema} returns although it mutates"
            assert all(r.alias_info is None for r in schema.returns), f"{schema} returns an alias"


def test_every_file_that_defines_an_op_is_imported() -> None:
    """One that is not would have no tests: nothing else knows of it."""
    folder = Path(dsv4_ops.__file__).parent
    files = {path.stem for path in folder.glob("*.py") if re.search(r"^\w+ = _registry\.define\(", path.read_text(), re.M)}
    assert len(files) > 5 and files == {op.family for op in testing.ops()}


def test_public_names_exist() -> None:
    for name in dsv4_ops.__all__:
        assert hasattr(dsv4_ops, name), name


MTP = next(op for op in testing.ops() if op.name == "mtp_context_lens")
