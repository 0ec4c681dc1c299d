"""Where each code is raised, and with which text: read from the installed source, so that it never goes stale.

The rule. A *site* of a code is a call, anywhere in the package, whose callee is
  - a class of `tectum.errors` that is a TectumError, by its name or as an attribute (`errors.BadRequestError`), or
  - `error_class(…)`, as in `error_class(code)(code, …)`,
and whose first argument is the code: a string, a name that was last set to one above it in the same function or
in the module, or a choice between such (`"a" if … else "b"`). Calls that pass a code on without naming it are no sites.
The text is the second argument, followed in the same way, with a placeholder for each value: `f"Port {port} is in use"`
is `Port <port> is in use`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from tectum import errors

_CLASSES = frozenset(
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.TectumError)
)
#: lines of source shown before and after the first line of a call
_BEFORE, _AFTER = 3, 2
#: names are followed through at most so many others
_DEPTH = 4


@dataclass(frozen=True, slots=True)
class Site:
    """One place that raises a code.

    file: path within the installation (`tectum/lifecycle/ledger.py`). line: of the call, from 1.
    function: its qualified name (`Ledger._join`), empty at module level. message: its text with placeholders, or None
    where the text comes from elsewhere. first_line, source: some lines around the call.
    """

    code: str
    file: str
    line: int
    function: str
    message: str | None
    first_line: int
    source: tuple[str, ...]


def raised_at(code: str) -> tuple[Site, ...]:
    """Every site of `code`, in the order of files and lines; empty where the source is not installed."""
    return _sites().get(code, ())


def all_codes_raised() -> frozenset[str]:
    """Every code that some site names, known to `CODES` or not."""
    return frozenset(_sites())


@cache
def _sites() -> dict[str, tuple[Site, ...]]:
    found: dict[str, list[Site]] = {}
    for name, text in sorted(_sources(files("tectum"), "tectum")):
        if "tectum" in text and any(kind in text for kind in _CLASSES):
            for site in sites_in(name, text):
                found.setdefault(site.code, []).append(site)
    return {code: tuple(sites) for code, sites in found.items()}


def _sources(folder: Traversable, name: str) -> Iterator[tuple[str, str]]:
    for child in folder.iterdir():
        path = f"{name}/{child.name}"
        if child.is_dir():
            yield from _sources(child, path)
        elif child.name.endswith(".py"):
            yield path, child.read_text("utf-8")


def sites_in(file: str, text: str) -> list[Site]:
    """The sites in one module's source. Raises SyntaxError when it is not Python."""
    reader = _Reader(file, text)
    reader.visit(ast.parse(text))
    return reader.sites


class _Reader(ast.NodeVisitor):
    """Walks one module and keeps, for each scope, what every name was last set to."""

    def __init__(self, file: str, text: str) -> None:
        self.sites: list[Site] = []
        self._file = file
        self._lines = text.splitlines()
        self._names: list[str] = []  # classes and functions around
        self._scopes: list[dict[str, ast.expr]] = [{}]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._enter(node.name, node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._enter(node.name, node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._enter(node.name, node)

    def _enter(self, name: str, node: ast.AST) -> None:
        self._names.append(name)
        self._scopes.append({})
        self.generic_visit(node)
        self._scopes.pop()
        self._names.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._scopes[-1][target.id] = node.value

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if not (_is_error(node.func) and node.args):
            return
        message = self._text(node.args[1]) if len(node.args) > 1 else None
        for code in self._strings(node.args[0]):
            first = max(node.lineno - _BEFORE, 1)
            self.sites.append(
                Site(
                    code=code,
                    file=self._file,
                    line=node.lineno,
                    function=".".join(self._names),
                    message=message,
                    first_line=first,
                    source=tuple(self._lines[first - 1 : node.lineno + _AFTER]),
                )
            )

    def _strings(self, node: ast.expr, depth: int = 0) -> list[str]:
        """The strings that an expression can be, as far as the source tells."""
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else []
        if isinstance(node, ast.IfExp):
            return [*self._strings(node.body, depth), *self._strings(node.orelse, depth)]
        if isinstance(node, ast.Name) and depth < _DEPTH and (value := self._value(node.id)) is not None:
            return self._strings(value, depth + 1)
        return []

    def _text(self, node: ast.expr, depth: int = 0) -> str | None:
        """The text that an expression is, values as placeholders; None where it holds no words of its own."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.JoinedStr):
            return "".join(self._piece(part, depth) for part in node.values)
        if isinstance(node, ast.Name) and depth < _DEPTH and (value := self._value(node.id)) is not None:
            return self._text(value, depth + 1)
        return None

    def _piece(self, part: ast.expr, depth: int) -> str:
        if isinstance(part, ast.Constant):
            return str(part.value)
        assert isinstance(part, ast.FormattedValue), "an f-string holds text and values"
        inner = self._text(part.value, depth) if isinstance(part.value, ast.Name) else None
        return inner or f"<{_placeholder(part.value)}>"

    def _value(self, name: str) -> ast.expr | None:
        for scope in (self._scopes[-1], self._scopes[0]):
            if name in scope:
                return scope[name]
        return None


def _is_error(callee: ast.expr) -> bool:
    if isinstance(callee, ast.Call):  # error_class(code)(code, …)
        callee = callee.func
        return "error_class" in (getattr(callee, "id", None), getattr(callee, "attr", None))
    if isinstance(callee, ast.Name):
        return callee.id in _CLASSES
    return isinstance(callee, ast.Attribute) and callee.attr in _CLASSES


def _placeholder(value: ast.expr) -> str:
    """A word for a value in a text: its name, or that of what it is made from."""
    match value:
        case ast.Name(id=name):
            return name.strip("_").lower()
        case ast.Attribute(attr=name):
            return name.strip("_").lower()
        case ast.Call(args=[first, *_]):
            return _placeholder(first)
        case ast.Call(func=func):
            return _placeholder(func)
        case ast.Subscript(value=inner):
            return _placeholder(inner)
    return "value"
