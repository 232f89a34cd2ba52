"""The breakages that mutation testing tries on a module.

Most breakages are operators of cosmic-ray. Another operator removes a statement. Breakages that
only the type check would notice are left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.operators.operator import Operator
from cosmic_ray.operators.provider import OperatorProvider

_PAIRS = (
    "Add_Sub",
    "Sub_Add",
    "Mul_Div",
    "Div_Mul",
    "FloorDiv_Div",
    "Mod_Mul",
    "BitAnd_BitOr",
    "BitOr_BitAnd",
)
_COMPARISONS = (
    "Eq_NotEq",
    "NotEq_Eq",
    "Lt_LtE",
    "LtE_Lt",
    "Gt_GtE",
    "GtE_Gt",
    "Is_IsNot",
    "IsNot_Is",
)
_OTHERS = (
    "AddNot",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "ExceptionReplacer",
    "NumberReplacer",
    "RemoveDecorator",
    "ZeroIterationForLoop",
    "ReplaceUnaryOperator_Delete_Not",
)


class RemoveStatement(Operator):
    """Removes a call whose value is not used, an augmented assignment, or a `raise`."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        first = node.children[0] if node.type == "simple_stmt" else None
        call = (
            first is not None
            and first.type in ("atom_expr", "power")
            and first.get_last_leaf().value == ")"
        )
        augmented = (
            first is not None
            and first.type == "expr_stmt"
            and first.children[1].type == "operator"
            and first.children[1].value.endswith("=")
        )
        if (
            call
            or (augmented and first.children[1].value != "=")
            or (first is not None and first.type == "raise_stmt")
        ):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        first = node.children[0]
        node.children[0] = parso.python.tree.Keyword(
            "pass", first.start_pos, first.get_first_leaf().prefix
        )
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


_NAMES = [
    *(f"ReplaceBinaryOperator_{pair}" for pair in _PAIRS),
    *(f"ReplaceComparisonOperator_{pair}" for pair in _COMPARISONS),
    *_OTHERS,
]
OPERATORS = [*(OperatorProvider()[name]() for name in _NAMES), RemoveStatement()]


def breakages(path: Path) -> dict[int, list[tuple[Operator, int]]]:
    """Returns every breakage of the module: by line, the operator and which of its occurrences."""
    nodes, found = list(ast_nodes(get_ast(path.read_text()))), {}
    for operator in OPERATORS:
        for occurrence, line in enumerate(
            [start[0] for node in nodes for start, _ in operator.mutation_positions(node)]
        ):
            found.setdefault(line, []).append((operator, occurrence))
    return found


# Keywords that refuse what no code does. The type check refuses assignments to the fields of a
# frozen class and, of a class with `kw_only`, arguments without names. `strict` refuses sequences
# of different lengths. (`frozen` also makes an object hashable; where it is a key, all tests need
# that.)
_ONLY_CHECKS = ("frozen", "kw_only", "strict")


class _Plain(ast.NodeTransformer):
    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        node.args, node.posonlyargs, node.kwonlyargs = (
            [*node.posonlyargs, *node.args, *node.kwonlyargs],
            [],
            [],
        )
        node.defaults, node.kw_defaults = [*node.defaults, *filter(None, node.kw_defaults)], []
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        if "TYPE_CHECKING" in ast.dump(node.test):
            node.test = ast.Name("TYPE_CHECKING")
        return self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        return ast.Constant(node.arg) if node.arg in _ONLY_CHECKS else self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field in {"annotation", "returns"} & set(node._fields):
            setattr(node, field, None)
        return super().generic_visit(node)


def plain(source: str) -> str | None:
    """Returns a dump of the program in which only its behavior is left, or None for a syntax error.

    These parts are removed: annotations and their imports, markers of positional-only and
    keyword-only parameters and fields, whether a class is frozen, and the `strict` of a zip.
    """
    try:
        return ast.dump(_Plain().visit(ast.parse(source)))
    except SyntaxError:
        return None
