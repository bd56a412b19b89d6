"""Reader for Python source that only assigns values, without executing it.

Training configurations are often Python files from untrusted sources, so nothing in them is executed: the syntax tree is
walked, and anything other than values and arithmetic on values is rejected with its line. Sizes are limited, so that no file
can make the reader run long or fill the memory.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from profiler.errors import InputError, closest

ALLOWED = (
    "numbers, texts, True, False, None, names assigned above, arithmetic, dict(...), {...}, lists (also repeated, [0] * 3), "
    "tuples, subscripts, "
    "f-strings of names, and int, float, round, min and max of numbers"
)
_MAX_BITS = 4096  #: limit of an integer; a power tower would otherwise never finish
_MAX_LENGTH = 1 << 16  #: limit of a concatenated string or list, and of a repeated list
_TOO_LONG = f"a text or list of more than {_MAX_LENGTH} items"

_FUNCTIONS: dict[str, Callable[..., Any]] = {"int": int, "float": float, "round": round, "min": min, "max": max}
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}


class Section(dict[str, Any]):
    """A dict that records the line in the file of each of its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, int] = {}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Section:
        """Return an object and those in it as sections, of whose keys no line is known."""
        section = cls()
        section.update({key: cls.of(value) if isinstance(value, dict) else value for key, value in plain.items()})
        return section

    def put(self, key: str, value: Any, line: int) -> None:
        self[key] = value
        self.lines[key] = line


@dataclass(frozen=True)
class Assignments:
    """The names that a file assigns, with their values and lines; ``used``: names that the file itself reads."""

    values: Section
    used: frozenset[str]


def read_assignments(text: str, where: str) -> Assignments:
    """Return every top-level assignment of a Python file, by name; a name assigned twice has its last value.

    Raises InputError with ``where`` (the file) and the line for a syntax error and for anything that is not a value.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in strings of the user's file are not reported
            tree = ast.parse(text)
        return _Reader(text, where).read(tree)
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise InputError(f"{where}{line}: not valid Python: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise InputError(f"{where}: its expressions are nested too deeply to be read") from None
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where}: not valid Python: {error}") from None


class _Reader:
    """Evaluator of the statements of one file, in order."""

    def __init__(self, text: str, where: str) -> None:
        self._text, self._where = text, where
        self._values, self._used = Section(), set[str]()

    def read(self, tree: ast.Module) -> Assignments:
        for statement in tree.body:
            self._statement(statement)
        return Assignments(self._values, frozenset(self._used))

    def _fail(self, node: ast.AST, message: str) -> NoReturn:
        raise InputError(f"{self._where}, line {getattr(node, 'lineno', '?')}: {message}")

    def _refuse(self, node: ast.AST) -> NoReturn:
        source = (ast.get_source_segment(self._text, node) or type(node).__name__).split("\n")[0]
        source = source if len(source) <= 60 else source[:57] + "..."
        self._fail(node, f"`{source}` is not read, because configuration files are not run; allowed are {ALLOWED}")

    def _statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Expr(value=ast.Constant(value=str())) | ast.Pass():
                return  # a string on its own is a comment
            case ast.Assign(targets=targets, value=value) if all(isinstance(t, ast.Name) for t in targets):
                result = self._value(value)
                for target in targets:
                    assert isinstance(target, ast.Name)
                    self._values.put(target.id, result, statement.lineno)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self._values.put(name, self._value(value), statement.lineno)
            case _:
                self._refuse(statement)

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None):
                return node.value
            case ast.Name(id=name):
                return self._name(node, name)
            case ast.List(elts=items):
                return [self._value(item) for item in items]
            case ast.Tuple(elts=items):
                return tuple(self._value(item) for item in items)
            case ast.Dict(keys=keys, values=values):
                return self._dict(zip(keys, values, strict=True))
            case ast.Call(func=ast.Name(id="dict")):
                return self._dict_call(node)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
                return self._compute(node, _FUNCTIONS[name], *(self._number(arg) for arg in args))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return self._binary(node, op, self._value(left), self._value(right))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
                return self._compute(node, _UNARY[type(op)], self._number(operand))
            case ast.Subscript(value=value, slice=index):
                return self._item(node, self._value(value), self._value(index))
            case ast.JoinedStr(values=parts):
                return self._sized(node, "".join(self._text_part(part) for part in parts))
        self._refuse(node)

    def _name(self, node: ast.expr, name: str) -> Any:
        if name not in self._values:
            self._fail(node, f"the name {name!r} is not assigned above{closest(name, self._values)}")
        self._used.add(name)
        return self._values[name]

    def _number(self, node: ast.expr) -> Any:
        value = self._value(node)
        # such files write float("inf") for "never"
        if not isinstance(value, int | float) and value not in ("inf", "-inf"):
            self._refuse(node)
        return value

    def _compute(self, node: ast.expr, function: Callable[..., Any], *values: Any) -> Any:
        try:
            result = function(*values)
        except (ArithmeticError, TypeError, ValueError) as error:
            self._fail(node, f"cannot be computed: {error}")
        if isinstance(result, int) and result.bit_length() > _MAX_BITS or isinstance(result, complex):
            self._fail(node, "the result is not a number of a sensible size")
        return result

    def _binary(self, node: ast.expr, op: ast.operator, left: Any, right: Any) -> Any:
        if isinstance(op, ast.Add) and isinstance(left, str | list | tuple) and type(left) is type(right):
            return self._sized(node, left + right)  # type: ignore[operator]
        if isinstance(op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            return left * right if len(left) * right <= _MAX_LENGTH else self._fail(node, _TOO_LONG)
        if not isinstance(left, int | float) or not isinstance(right, int | float):
            self._refuse(node)
        if isinstance(op, ast.Pow | ast.LShift) and isinstance(left, int) and isinstance(right, int):
            bits = right * left.bit_length() if isinstance(op, ast.Pow) else right + left.bit_length()
            if bits > _MAX_BITS:
                self._fail(node, "the result is not a number of a sensible size")
        return self._compute(node, _BINARY[type(op)], left, right)

    def _sized(self, node: ast.expr, value: Any) -> Any:
        if len(value) > _MAX_LENGTH:
            self._fail(node, _TOO_LONG)
        return value

    def _item(self, node: ast.expr, value: Any, index: Any) -> Any:
        if isinstance(value, dict) and isinstance(index, str | int):
            if index not in value:
                self._fail(node, f"there is no key {index!r}{closest(str(index), map(str, value))}")
            return value[index]
        if not isinstance(value, list | tuple) or not isinstance(index, int):
            self._refuse(node)
        if not -len(value) <= index < len(value):
            self._fail(node, f"there is no item {index}; the list has {len(value)}")
        return value[index]

    def _text_part(self, part: ast.expr) -> str:
        match part:
            case ast.Constant(value=str() as text):
                return text
            case ast.FormattedValue(value=ast.Name() as name, format_spec=None):
                value = self._value(name)
                if value is None or isinstance(value, int | float | str):
                    return str(value)
        self._refuse(part)

    def _dict(self, items: Iterable[tuple[ast.expr | None, ast.expr]]) -> Section:
        section = Section()
        for key_node, value_node in items:
            if key_node is None:  # {**other}
                self._merge(section, value_node)
                continue
            key = self._value(key_node)
            if not isinstance(key, str | int | float | None):
                self._refuse(key_node)
            section.put(key, self._value(value_node), key_node.lineno)  # type: ignore[arg-type]
        return section

    def _dict_call(self, call: ast.Call) -> Section:
        section = Section()
        for argument in call.args:  # dict(other, key=...)
            self._merge(section, argument)
        given: set[str] = set()
        for keyword in call.keywords:
            if keyword.arg is None:
                self._merge(section, keyword.value)
                continue
            if keyword.arg in given:
                self._fail(keyword, f"the key {keyword.arg!r} is given twice")
            given.add(keyword.arg)
            section.put(keyword.arg, self._value(keyword.value), keyword.lineno)
        return section

    def _merge(self, section: Section, node: ast.expr) -> None:
        other = self._value(node)
        if not isinstance(other, Section):
            self._refuse(node)
        section.update(other)
        section.lines.update(other.lines)
