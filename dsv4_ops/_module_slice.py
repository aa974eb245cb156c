"""One module-level value or signature of an installed package, without importing the package.

Some libraries initialize CUDA, build kernels or need a GPU driver when they are imported. What a gate asks of them is
usually a constant or a small class, so only the statements that the name depends on are executed, in a namespace of
their own. Names are followed through relative imports inside the package. From outside it, only harmless modules of the
standard library are imported: a statement that needs more (torch, say) is left out, and using what it defines fails.
Every failure is a :class:`SliceError` that says what stood in the way.
"""

from __future__ import annotations
import __future__

import ast
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

__all__ = ["PackageSlice", "SliceError", "find_package"]

_STANDARD = frozenset(["__future__", "abc", "collections", "dataclasses", "enum", "functools", "itertools", "logging", "math", "operator", "threading", "types", "typing"])
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_serial = 0


class SliceError(Exception):
    """The name is not there, or cannot be had without importing the package."""


def find_package(name: str) -> Path | None:
    """Folder of an installed top-level package. Looks at the import path only: nothing is executed."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


class _Module:
    """A parsed module: which statements bind which names, and the namespace of those that were run."""

    def __init__(self, name: str, file: Path) -> None:
        self.name, self.file = name, file
        try:
            tree = ast.parse(file.read_bytes(), str(file))
        except (OSError, SyntaxError, ValueError) as error:
            raise SliceError(f"{name} cannot be read: {error}") from None
        self.bindings: dict[str, list[ast.stmt]] = {}
        self.stars: list[ast.ImportFrom] = []
        for statement in tree.body:
            if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                self.stars.append(statement)
            for bound in _bound_names(statement):
                self.bindings.setdefault(bound, []).append(statement)
        future = "annotations" in {a.name for s in tree.body if isinstance(s, ast.ImportFrom) and s.module == "__future__" for a in s.names}
        self.flags = __future__.annotations.compiler_flag if future else 0
        global _serial
        _serial += 1
        # dataclasses look their module up in sys.modules, under this name.
        self.space = types.ModuleType(f"_dsv4_ops_slice_{_serial}.{name}")
        self.done: set[int] = set()
        self.failed: dict[int, str] = {}


class PackageSlice:
    """Names of one package. ``root`` is its folder; nothing of it is imported."""

    def __init__(self, package: str, root: Path) -> None:
        self.package, self.root = package, root
        self._modules: dict[str, _Module] = {}
        self._active: set[tuple[str, str]] = set()

    def value(self, module: str, name: str) -> Any:
        """The value of ``name`` in ``package.module`` (dotted, without the package). Raises SliceError."""
        found, bound = self._follow(module, name)
        self._run(found, bound)
        try:
            return found.space.__dict__[bound]
        except KeyError:
            reasons = [found.failed[id(s)] for s in found.bindings.get(bound, ()) if id(s) in found.failed]
            raise SliceError(f"{self.package}.{module}.{name} cannot be evaluated without importing {self.package}: {'; '.join(reasons) or 'unknown reason'}") from None

    def parameters(self, module: str, name: str) -> tuple[frozenset[str], bool]:
        """Names that the function takes as keywords, and whether it takes any others (``**kwargs``). Raises SliceError."""
        found, bound = self._follow(module, name)
        function = next((s for s in reversed(found.bindings[bound]) if isinstance(s, _FUNCTIONS)), None)
        if function is None:
            raise SliceError(f"{self.package}.{module}.{name} is not a plain function.")
        arguments = function.args
        return frozenset(a.arg for a in (*arguments.args, *arguments.kwonlyargs)), arguments.kwarg is not None

    def _module(self, name: str) -> _Module:
        if name not in self._modules:
            base = self.root.joinpath(*name.split(".")) if name else self.root
            files = [base / "__init__.py", *([base.with_suffix(".py")] if name else [])]
            file = next((f for f in files if f.is_file()), None)
            if file is None:
                raise SliceError(f"{self.package} has no module {name or self.package}")
            self._modules[name] = _Module(name, file)
        return self._modules[name]

    def _follow(self, module: str, name: str) -> tuple[_Module, str]:
        """The module of this package that defines the name itself, and what it is called there."""
        seen: set[tuple[str, str]] = set()
        while (module, name) not in seen:
            seen.add((module, name))
            here = self._module(module)
            statements = here.bindings.get(name)
            if statements is None:
                for star in here.stars:
                    target = self._target(here, star)
                    if target is not None and self._has(target, name):
                        module = target
                        break
                else:
                    raise SliceError(f"{self.package}.{module} has no {name}")
                continue
            statement = statements[-1]
            target = self._target(here, statement) if isinstance(statement, ast.ImportFrom) else None
            if target is None:
                return here, name
            assert isinstance(statement, ast.ImportFrom)
            module, name = target, next(a.name for a in statement.names if (a.asname or a.name) == name)
        raise SliceError(f"{self.package}.{module}.{name} is imported in a circle")

    def _has(self, module: str, name: str) -> bool:
        try:
            self._follow(module, name)
        except SliceError:
            return False
        return True

    def _target(self, here: _Module, statement: ast.ImportFrom) -> str | None:
        """Module of this package that a from-import names; None for one outside."""
        if statement.level == 0:
            path = (statement.module or "").split(".")
            return ".".join(path[1:]) if path[0] == self.package else None
        parts = here.name.split(".") if here.name else []
        if here.file.name != "__init__.py":
            parts = parts[:-1]
        up = statement.level - 1
        if up > len(parts):
            return None
        return ".".join(p for p in (*parts[: len(parts) - up], statement.module or "") if p)

    def _run(self, module: _Module, name: str) -> None:
        """Execute the statements that bind ``name``, after all that they depend on and that can be had."""
        if (module.name, name) in self._active:
            return
        self._active.add((module.name, name))
        try:
            for statement in module.bindings.get(name, ()):
                if id(statement) in module.done:
                    continue
                if isinstance(statement, ast.ImportFrom) and (target := self._target(module, statement)) is not None:
                    self._import_own(module, statement, target, name)
                    continue
                module.done.add(id(statement))
                outside = _imports_outside(statement)
                if outside:
                    module.failed[id(statement)] = f"it needs {outside}"
                    continue
                for used in sorted({n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id != name}):
                    self._run(module, used)
                self._execute(module, statement)
        finally:
            self._active.discard((module.name, name))

    def _import_own(self, module: _Module, statement: ast.ImportFrom, target: str, name: str) -> None:
        original = next(a.name for a in statement.names if (a.asname or a.name) == name)
        try:
            module.space.__dict__[name] = self.value(target, original)
        except SliceError as error:
            module.failed[id(statement)] = str(error)

    def _execute(self, module: _Module, statement: ast.stmt) -> None:
        label = module.space.__name__
        sys.modules[label] = module.space
        try:
            code = compile(ast.Module([statement], []), str(module.file), "exec", flags=module.flags, dont_inherit=True)
            exec(code, module.space.__dict__)
        except Exception as error:
            module.failed[id(statement)] = f"line {statement.lineno}: {type(error).__name__}: {error}"
        finally:
            del sys.modules[label]


def _bound_names(statement: ast.stmt) -> set[str]:
    """Names that a top-level statement binds or fills (``x[0] = ..``, ``x.add(..)``), those inside ``if`` and ``try`` included."""
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(a.asname or a.name).split(".")[0] for a in statement.names if a.name != "*"}
    names: set[str] = set()
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        names |= _owner(statement.value.func)
    for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target] if isinstance(statement, ast.AugAssign) else []:
        names |= _owner(target)
    for node in ast.iter_child_nodes(statement):
        if isinstance(node, ast.stmt):
            names |= _bound_names(node)
        elif isinstance(node, ast.ExceptHandler):
            names |= {n for child in node.body for n in _bound_names(child)}
        else:
            names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return names


def _owner(node: ast.expr) -> set[str]:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
        if isinstance(node, ast.Name):
            return {node.id}
    return set()


def _imports_outside(statement: ast.stmt) -> str:
    """What a statement imports when executed (not inside functions) that is neither here nor in the allowed list."""
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        return ""
    for node in ast.walk(statement):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or "."] if isinstance(node, ast.ImportFrom) else []
        for module in modules:
            if module.split(".")[0] not in _STANDARD:
                return module
    return ""
