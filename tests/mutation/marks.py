"""Records which tests execute given lines.

In a copy of the repository, a call is inserted before each of these lines. The call records the
test that reached it, even in a process that the test started.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

MODULE = """
import os

_known = set()


def mutation_mark(number):
    test = os.environ.get("PYTEST_CURRENT_TEST")
    if test and (test, number) not in _known:
        _known.add((test, number))
        with open(os.environ["MUTATION_MARKS"], "a") as file:
            file.write(f"{number} {test}\\n")
"""
"""The module `mutation_marks` that marked code imports."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def marked(source: str, numbers: dict[int, list[int]]) -> str:
    """Returns the source of a module that records when a line is reached.

    `numbers` has the marks of each line. A line in the header of a function counts as reached with
    its body, and a line outside of functions with any function of the module.
    """
    tree = ast.parse(source)
    before: dict[ast.stmt, list[int]] = {}
    functions = [node for node in ast.walk(tree) if isinstance(node, _Function)]
    for line, marks in numbers.items():
        inside = [function for function in functions if _first(function) <= line <= _last(function)]
        if not inside:
            places = [_start(function) for function in functions]
        else:
            inner = max(inside, key=_first)
            statements = [
                node
                for node in ast.walk(inner)
                if isinstance(node, ast.stmt) and _first(node) <= line <= _last(node)
            ]
            place = max(statements, key=lambda node: (_first(node), -_last(node)))
            places = [_start(place) if isinstance(place, _Function) else place]
        for place in places:
            before.setdefault(place, []).extend(marks)
    for node in ast.walk(tree):
        for body in _bodies(node):
            body[:] = [
                new for statement in body for new in (*_calls(before.get(statement, [])), statement)
            ]
    first = next(
        index
        for index, node in enumerate([*tree.body, None])
        if not (
            isinstance(node, ast.Expr)
            or (isinstance(node, ast.ImportFrom) and node.module == "__future__")
        )
    )
    tree.body[first:first] = ast.parse("from mutation_marks import mutation_mark").body
    return ast.unparse(ast.fix_missing_locations(tree))


def read(path: Path) -> Iterator[tuple[int, str, str]]:
    """Returns the recorded marks: number, test, and the phase `setup`, `call` or `teardown`."""
    for text in path.read_text().splitlines() if path.exists() else ():
        number, _, rest = text.partition(" ")
        test, _, phase = rest.rpartition(" ")
        yield int(number), test, phase.strip("()")


def _calls(numbers: list[int]) -> list[ast.stmt]:
    return ast.parse("\n".join(f"mutation_mark({number})" for number in numbers)).body


def _bodies(node: ast.AST) -> list[list[ast.stmt]]:
    found = [getattr(node, name, None) for name in ("body", "orelse", "finalbody")]
    return [body for body in found if isinstance(body, list)]


def _first(node: ast.stmt) -> int:
    return min([node.lineno, *(name.lineno for name in getattr(node, "decorator_list", ()))])


def _last(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _start(function: ast.stmt) -> ast.stmt:
    """Returns the first statement of a function after its docstring."""
    body = function.body  # type: ignore[attr-defined]
    has_docstring = ast.get_docstring(function) is not None  # type: ignore[arg-type]
    return body[min(int(has_docstring), len(body) - 1)]
