"""Digest of Python sources that changes only if their behavior can change.

It does not depend on comments, docstrings and imports, nor on which file contains a definition.
"""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from collections.abc import Iterable
from pathlib import Path

import xxhash

from megatrain.simulator.base.files import read_text


def code_digest(paths: Iterable[Path]) -> str:
    """Returns the digest of all top-level statements of the files, as 16 hexadecimal digits.

    The digest is the same in every version of Python. It does not change if an import binds a name
    to another object, or if two files exchange their definitions of one name.
    """
    statements = sorted(text for path in paths for text in _statements(read_text(path)))
    return xxhash.xxh3_64_hexdigest("\0".join(statements).encode())


@functools.cache  # some files are in the digests of many figures
def _statements(source: str) -> tuple[str, ...]:
    """Returns each top-level statement of `source` with its decorators, as text."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    tree = ast.parse(source)
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.stmt)):
        is_docstring = (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        if is_docstring or isinstance(node, ast.Import | ast.ImportFrom):
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines[number - 1] = ""
    statements = []
    for node in tree.body:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        kept = [line.rstrip() for line in lines[first - 1 : node.end_lineno] if line.strip()]
        statements += ["\n".join(kept)] if kept else []
    return tuple(statements)
