"""The source of a policy, an optimizer or a cost model that a user has in a file."""

from __future__ import annotations

from modulefinder import ModuleFinder
from pathlib import Path


def outside_source(path: Path) -> list[bytes]:
    """Returns the content of a `.py` file and of the modules that it imports from its folder,
    directly or through each other. Returns an empty list if there is no such file.

    Modules in other places are not included. No file is executed.
    """
    if not path.is_file():
        return []
    finder = ModuleFinder(path=[str(path.parent)], excludes=["megatrain"])
    try:
        finder.run_script(str(path))
    except (SyntaxError, ValueError):  # the function that loads the file reports this
        return [path.read_bytes()]
    names = {str(vars(module)["__file__"]) for module in finder.modules.values()}
    return [Path(name).read_bytes() for name in sorted(names) if name.endswith(".py")]
