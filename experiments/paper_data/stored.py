"""Stored data of a simulation, with the command and the date that it was made with, and a digest of
its inputs.

The digest covers the simulator's sources and library, the published figures and their validation,
and the simulation's own code. If the current inputs have another digest, a new simulation may give
other numbers.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

from megatrain.experiments.files.code_digest import code_digest
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import read_json, write_json

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "results"
_INPUTS = (
    "simulator/[!_]*.py",
    "simulator/*/**/*.py",
    "simulator/library/**/*.*",
    "experiments/published/*.*",
    "experiments/validation/*.py",
    "experiments/paper_data/answers.py",
    "experiments/paper_data/published_vs_ours.py",
)
_MORE = {
    "table4": (
        "experiments/paper_data/ablations.py",
        "experiments/results/h200-qwen2.5-7b-batches/hardware.toml",
    )
}


def digest(name: str) -> str:
    """Returns a digest of the current inputs of a simulation, as 16 hexadecimal digits: of the
    bytes of data files, and of code by `code_digest`.
    """
    patterns = (*_INPUTS, f"experiments/paper_data/{name}.py", *_MORE.get(name, ()))
    paths = sorted({path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()})
    sha = hashlib.sha256(code_digest(path for path in paths if path.suffix == ".py").encode())
    for path in paths:
        if path.suffix != ".py":
            sha.update(f"{path.relative_to(ROOT).as_posix()}\n".encode() + path.read_bytes())
    return sha.hexdigest()[:16]


def store(folder: Path, name: str, data: Any, date: str) -> Path:
    """Writes `figures/NAME.json` in the results folder `folder` in one atomic operation, and
    returns its path.
    """
    path = folder / "figures" / f"{name}.json"
    write_json(
        path,
        {
            "command": f"megatrain figures {name} --rerun",
            "date": date,
            "inputs": digest(name),
            "data": data,
        },
    )
    return path


def writable_results(out: Path, named: Path | None = None) -> Path:
    """Returns the folder in which results are stored: `named`, or the repository's folder of
    results, or for an installed package a folder in `out`. Stored results that it lacks are copied
    into it, because figures also need measurements.

    Raises UserError if it is a folder with something else.
    """
    in_repository = (ROOT / "pyproject.toml").is_file()
    folder = named or (RESULTS if in_repository else out / "results")
    if folder.exists() and not (folder / "figures").is_dir():
        raise UserError(
            str(folder),
            found="no folder figures in it",
            allowed="a copy of the stored results, or a new folder, which becomes one",
            fix="name a new folder with --results",
        )
    folder.mkdir(parents=True, exist_ok=True)
    for entry in RESULTS.iterdir():
        if (folder / entry.name).exists():
            continue
        if entry.is_dir():
            shutil.copytree(entry, folder / entry.name)
        else:
            shutil.copy2(entry, folder / entry.name)
    return folder


def is_stale(folder: Path, name: str) -> bool:
    """Returns whether the stored result was made from other inputs than the current ones. Raises
    UserError if it is missing or malformed.
    """
    found = read_json(folder / "figures" / f"{name}.json")
    return not isinstance(found, dict) or found.get("inputs") != digest(name)
