"""List the names of models, hardware, policies, optimizers, or model families.

The names come from the library and from installed packages.
"""

from __future__ import annotations

import argparse
import inspect
import json
import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from megatrain.experiments.cli.verdict.layout import left_out, shown_columns

Row = dict[str, Any]


def _models() -> list[Row]:
    """Returns the library's models, the smallest first."""
    from megatrain.simulator.model.specs import ModelSpec, library

    rows = []
    for name in library():
        model = ModelSpec.load(name)
        rows.append(
            {
                "name": name,
                "parameters": model.parameters,
                "active_parameters": model.active_parameters,
                "layers": model.layers,
                "native_context": model.config.get("max_position_embeddings"),
                "family": model.family,
            }
        )
    return sorted(rows, key=lambda row: row["parameters"])


def _hardware() -> list[Row]:
    """Returns the machines of the library, of shared calibrations and of installed packages, the
    smallest GPU memory first.
    """
    from megatrain.simulator.hardware.machine import HardwareSpec, known_names

    rows = []
    for name in known_names():
        machine = HardwareSpec.load(name)
        rows.append(
            {
                "name": name,
                "gpu_bytes": machine.device_bytes,
                "link": "none: one memory" if machine.unified else machine.link,
                "link_gb_per_s": None if machine.unified else machine.h2d_gb_per_s,
                "host_bytes": machine.host_bytes,
                "cores": machine.cores,
                "measured_by_others": machine.measured_by_others or None,
            }
        )
    return sorted(rows, key=lambda row: row["gpu_bytes"])


def _policies() -> list[Row]:
    """Returns the policies. Policies that the runtime executes come first."""
    from megatrain.simulator.policies import find, names, peers

    return [
        {"name": name, "trains": trains, "what": _what(find(name))}
        for trains, group in ((True, names()), (False, peers()))
        for name in group
    ]


def _optimizers() -> list[Row]:
    """Returns the built-in and the installed optimizers."""
    from megatrain.simulator.model.optimizer import find, registered

    optimizers = {name: find(name) for name in registered()}
    return [
        {"name": name, "moments": optimizer.moments, "what": _what(optimizer)}
        for name, optimizer in optimizers.items()
    ]


def _families() -> list[Row]:
    """Returns the known values of `model_type`. Supported families come first."""
    from megatrain.simulator.model.families import FAMILIES, INSIDE, NOT_YET, REFUSED, UNDESCRIBED

    notes = {
        **dict.fromkeys(sorted(FAMILIES), ""),
        **dict.fromkeys(sorted(INSIDE), "the language model inside"),
    }
    refused = {**dict.fromkeys(UNDESCRIBED, NOT_YET), **REFUSED}
    return [{"name": name, "supported": True, "note": notes[name]} for name in notes] + [
        {"name": name, "supported": False, "note": refused[name]}
        for name in sorted(refused.keys() - notes)
    ]


def _what(value: object) -> str:
    """Returns the first sentence of the docstring of the object's class, on one line."""
    text = " ".join(inspect.cleandoc(type(value).__doc__ or "").split())
    return text.partition(". ")[0].removesuffix(".")


KINDS: dict[str, Callable[[], list[Row]]] = {
    "models": _models,
    "hardware": _hardware,
    "policies": _policies,
    "optimizers": _optimizers,
    "families": _families,
}
_HEADINGS = {
    "active_parameters": "active",
    "gpu_bytes": "GPU memory",
    "host_bytes": "host memory",
    "link_gb_per_s": "GB/s",
    "native_context": "context",
}
_DROPPED = ("layers", "family", "cores", "link", "link_gb_per_s")
"""Columns that are left out on a narrow terminal, in this order."""
_LEAST_WIDTH = 12
"""The minimum width of a wrapped last column, in characters."""


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=tuple(KINDS), metavar="WHAT", help=" | ".join(KINDS))
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of text")


def run(args: argparse.Namespace) -> int:
    rows = KINDS[args.what]()
    print(json.dumps(rows) if args.json else table(rows, shutil.get_terminal_size().columns))
    return 0


def table(rows: Sequence[Row], width: int) -> str:
    """Returns a table of `rows`, which have the same keys. Empty columns are left out.

    Texts of the last column are wrapped at `width` characters. If the other columns are too wide,
    some are left out, and a line below the table names them.

    >>> print(table([{"name": "a", "parameters": 7.6e9}, {"name": "bc", "parameters": None}], 80))
    name  parameters
    a          7.6 B
    bc             -
    """
    every = [key for key in rows[0] if any(row[key] is not None for row in rows)]
    keys = _shown(rows, every, width)
    cells = [
        [_HEADINGS.get(key, key.replace("_", " ")) for key in keys],
        *([_text(key, row[key]) for key in keys] for row in rows),
    ]
    wide = [max(map(len, column)) for column in zip(*cells, strict=True)]
    texts = [any(isinstance(row[key], str) for row in rows) for key in keys]
    lines = []
    for row in cells:
        padded = [
            cell.ljust(size) if text else cell.rjust(size)
            for cell, size, text in zip(row, wide, texts, strict=True)
        ]
        *others, last = padded
        before = "".join(f"{cell}  " for cell in others)
        room = max(width - len(before), _LEAST_WIDTH)
        rest = textwrap.wrap(last.rstrip(), room) if texts[-1] else [last]
        lines.append((before + ("\n" + " " * len(before)).join(rest)).rstrip())
    names = [_HEADINGS.get(key, key) for key in every]
    return "\n".join(lines + left_out(names, [_HEADINGS.get(key, key) for key in keys], width))


def _shown(rows: Sequence[Row], keys: Sequence[str], width: int) -> list[str]:
    """Returns the `keys` whose columns fit in `width`. A last column of texts can be wrapped, so it
    needs no more than 12 characters.
    """
    sizes = {
        key: 2 + max(len(_HEADINGS.get(key, key)), *(len(_text(key, row[key])) for row in rows))
        for key in keys
    }
    last = keys[-1]
    if any(" " in str(row[last]) for row in rows):
        sizes[last] = min(sizes[last], 2 + _LEAST_WIDTH)
    return shown_columns(sizes, width + 2, _DROPPED)


def _text(key: str, value: Any) -> str:
    """Returns the text of a cell: parameters in billions, bytes in GiB, floats with one decimal."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("parameters"):
        return f"{value / 1e9:.1f} B"
    if key.endswith("_bytes"):
        return f"{value / 2**30:,.1f} GiB"
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
