"""The source of a policy, an optimizer or a cost model that a user has in a file."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path


def outside_source(path: Path) -> dict[Path, bytes]:
    """Returns the content of a `.py` file and of the modules that it imports from its folder,
    directly or through each other, by path relative to this folder. Returns an empty dict if there
    is no such file.

    Modules in other places are not included. No file is executed.
    """
    found: dict[Path, bytes] = {}
    folder, waiting = path.parent, [Path(path.name)]
    while waiting:
        name = waiting.pop()
        if name not in found and (folder / name).is_file():
            found[name] = (folder / name).read_bytes()
            waiting += _imported(found[name], name)
    return dict(sorted(found.items()))


def _imported(source: bytes, name: Path) -> Iterator[Path]:
    """Yields the paths that modules of the names in the imports of `source` may have, relative to a
    folder. Most do not exist. `source` is the content of the file `name` in this folder.
    """
    try:
        statements = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):  # the function that loads the file reports this
        return
    for statement in statements:
        bases: list[Path] = []
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
            bases, names = [Path()], [name for name in names if not is_elsewhere(name)]
        elif isinstance(statement, ast.ImportFrom) and not (
            statement.level == 0 and is_elsewhere(statement.module or "")
        ):
            # A dot means the folder of the file, and each further one the folder above.
            above = list(name.parents)[statement.level - 1 :] if statement.level else [Path()]
            module = f"{statement.module}." if statement.module else ""
            bases, names = above[:1], [module + alias.name for alias in statement.names]
        for base in bases:
            for dotted in names:
                place = base
                for part in dotted.split("."):
                    place = place / part
                    yield place.with_suffix(".py")
                    yield place / "__init__.py"


def is_elsewhere(module: str) -> bool:
    """Returns whether a module always comes from Python or this package, even if the folder of the
    file has one of the same name.
    """
    top = module.partition(".")[0]
    return top == "megatrain" or top in sys.stdlib_module_names
