"""Digest of Python sources that changes only if their behavior can change.

Comments, docstrings, imports, and the file that contains a definition do not affect it.
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

    It is the same in every version of Python. It does not notice an import that binds a name to
    another object, or two files that exchange definitions of one name.
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
        text = (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        if text or isinstance(node, ast.Import | ast.ImportFrom):
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines[number - 1] = ""
    found = []
    for node in tree.body:
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        kept = [line.rstrip() for line in lines[first - 1 : node.end_lineno] if line.strip()]
        found += ["\n".join(kept)] if kept else []
    return tuple(found)
