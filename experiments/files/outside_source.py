"""The source of a policy, an optimizer or a cost model that a user has in a file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def outside_source(path: Path) -> list[bytes]:
    """Returns the content of a `.py` file and of the modules that it imports from its folder,
    directly or through each other. Returns an empty list if there is no such file.

    Modules in other places are not included. No file is executed.
    """
    found: dict[Path, bytes] = {}
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file not in found and file.is_file():
            found[file] = file.read_bytes()
            waiting += _imported(found[file], file, path.parent)
    return [found[file] for file in sorted(found)]


def _imported(source: bytes, file: Path, folder: Path) -> Iterator[Path]:
    """Yields the files in `folder` that modules of the names in the imports of `source`, the
    content of `file`, may have. Most do not exist.
    """
    try:
        statements = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):  # the function that loads the file reports this
        return
    for statement in statements:
        if isinstance(statement, ast.Import):
            names = [(folder, alias.name) for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            # A dot means the folder of the file, and each further one the folder above.
            base = file.parents[statement.level - 1] if statement.level else folder
            module = f"{statement.module}." if statement.module else ""
            names = [(base, module + alias.name) for alias in statement.names]
        else:
            continue
        for base, name in names:
            place = base
            for part in name.split("."):
                place = place / part
                yield place.with_suffix(".py")
                yield place / "__init__.py"
