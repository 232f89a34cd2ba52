"""Code digest: of what Python sources do. Neither comments, docstrings, imports nor the file in which a definition stands count."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable
from pathlib import Path

import xxhash

from megatrain.simulator.files import read_text


def code_digest(paths: Iterable[Path]) -> str:
    """Of all top-level statements of the files `paths`, 16 hexadecimal digits, the same under every version of Python.

    What it cannot see: an import that names another object in the same words, and two files that exchange definitions of one name.
    """
    statements = sorted(text for path in paths for text in _statements(read_text(path)))
    return xxhash.xxh3_64_hexdigest("\0".join(statements).encode())


def _statements(source: str) -> list[str]:
    """Each with its decorators, as its lines stand there."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    tree = ast.parse(source)
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.stmt)):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if text or isinstance(node, ast.Import | ast.ImportFrom):
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines[number - 1] = ""
    found = []
    for node in tree.body:
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        kept = [line.rstrip() for line in lines[first - 1 : node.end_lineno] if line.strip()]
        found += ["\n".join(kept)] if kept else []
    return found
