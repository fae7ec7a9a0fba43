"""Which wrong versions of a module there are: one small change of its syntax tree each. Pure.

A mutant's name does not depend on the rest of its module: the same change of the same expression in the same function
has the same name after edits elsewhere, so that a sample by name stays the same.
"""

import ast
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Final

Change = Callable[[ast.AST], None]

_COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
}
_SWAPPED_CALLS: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
_SILENT: Final = frozenset({"log"})
"""What is called on these changes nothing but a log, whose words tests need not pin."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One wrong version of a module: its name, the line of the change, and how it is made."""

    module: str
    name: str
    line: int
    _tree: ast.Module
    _index: int
    _change: Change

    @property
    def rank(self) -> int:
        """Its place in the order by which samples are taken."""
        return int.from_bytes(hashlib.sha256(f"{self.module} {self.name}".encode()).digest()[:8], "big")

    def source(self) -> str:
        """The text of the whole wrong module."""
        mutated = deepcopy(self._tree)
        self._change([each for _, each in _nodes(mutated)][self._index])
        return ast.unparse(ast.fix_missing_locations(mutated))

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.name}"


def mutants(module: str, source: str) -> Iterator[Mutant]:
    """Every mutant of a module."""
    tree = ast.parse(source)
    seen: Counter[str] = Counter()
    for index, (scope, node) in enumerate(_nodes(tree)):
        for what, change in _changes(node):
            spelled = f"{scope}: {ast.unparse(node)[:60]!r} {what}"
            seen[spelled] += 1
            name = spelled if seen[spelled] == 1 else f"{spelled} #{seen[spelled]}"
            yield Mutant(module, name, getattr(node, "lineno", 0), tree, index, change)


def _nodes(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Every node that may be changed, with the function around it: no docstrings, annotations, logs and assertions."""

    def walk(scope: str, node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
        yield scope, node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params", "msg", "cause", "bases"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _is_left_alone(child):
                    inner = (*scope.split("."), child.name) if isinstance(child, _SCOPES) else (scope,)
                    yield from walk(".".join(each for each in inner if each), child)

    for statement in tree.body:
        if isinstance(statement, _SCOPES):
            yield from walk(statement.name, statement)


_SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Constant()) | ast.Assert() | ast.JoinedStr():
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name in _SILENT
        case _:
            return False


def _changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
    yield from _expression_changes(node)
    yield from _statement_changes(node)


def _expression_changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
    match node:
        case ast.Compare(ops=[operator]):
            other = _COMPARISONS[type(operator)]
            yield f"compares by {other.__name__}", _set("ops", lambda _: [other()])
        case ast.BoolOp(op=ast.And()):
            yield "becomes or", _set("op", lambda _: ast.Or())
        case ast.BoolOp(op=ast.Or()):
            yield "becomes and", _set("op", lambda _: ast.And())
        case ast.BinOp(op=ast.BitOr()):
            yield "loses its right side", _become(lambda old: old.left)
            yield "loses its left side", _become(lambda old: old.right)
        case ast.BinOp(op=operator) if type(operator) in _ARITHMETIC and not isinstance(node.left, ast.Constant):
            swapped = _ARITHMETIC[type(operator)]
            yield f"becomes {swapped.__name__}", _set("op", lambda _: swapped())
        case ast.Constant(value=bool()):
            yield "is negated", _set("value", lambda old: not old)
        case ast.Constant(value=int() | float()):
            yield "is one more", _set("value", lambda old: old + 1)
        case ast.Call(func=ast.Name(id=name)) if name in _SWAPPED_CALLS:
            yield f"calls {_SWAPPED_CALLS[name]}", _set("func", lambda _: ast.Name(_SWAPPED_CALLS[name], ast.Load()))
        case ast.IfExp():
            yield "takes its first side", _become(lambda old: old.body)
            yield "takes its second side", _become(lambda old: old.orelse)
        case _:
            return


def _statement_changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
    match node:
        case ast.If() | ast.While():
            yield "has its condition negated", _set("test", lambda old: ast.UnaryOp(ast.Not(), old))
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield "is not done", _set("value", lambda _: ast.Constant(None))
        case ast.Raise():
            yield "is not raised", _become(lambda _: ast.Pass())
        case ast.AugAssign():
            yield "is not added", _become(lambda _: ast.Pass())
        case ast.Continue():
            yield "goes on", _become(lambda _: ast.Pass())
        case ast.Return(value=ast.Constant() | ast.Name()) if not _is_falsy(node.value):
            yield "returns nothing", _set("value", lambda _: ast.Constant(None))
        case _:
            return


def _is_falsy(node: ast.AST | None) -> bool:
    """Whether a constant means the same as nothing to whoever asks whether it holds."""
    return isinstance(node, ast.Constant) and not node.value


def _set(field: str, value: Callable[..., object]) -> Change:
    return lambda node: setattr(node, field, value(getattr(node, field)))


def _become(other: Callable[..., ast.AST]) -> Change:
    """Make a node another one in place: its class and its fields."""

    def change(node: ast.AST) -> None:
        replacement = other(node)
        position = {name: getattr(node, name) for name in ("lineno", "col_offset") if hasattr(node, name)}
        node.__class__ = replacement.__class__
        node.__dict__.clear()
        node.__dict__.update(replacement.__dict__ | position)

    return change
