"""Tests that importing the simulator, or any module of it, loads neither torch nor transformers."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import megatrain.simulator

PROGRAM = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
heavy = ("torch", "transformers", "safetensors")
print(json.dumps([name for name in heavy if name in sys.modules]))
"""


def loaded_by(tmp_path: Path, *names: str) -> list[str]:
    # in another folder, because `import simulator` works in the checkout
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    loaded: list[str] = json.loads(done.stdout)
    return loaded


def test_the_simulator_loads_no_framework(tmp_path: Path) -> None:
    assert loaded_by(tmp_path, "megatrain.simulator") == []


def test_no_module_of_the_simulator_loads_a_framework(tmp_path: Path) -> None:
    names = [
        module.name
        for module in pkgutil.walk_packages(megatrain.simulator.__path__, "megatrain.simulator.")
    ]
    assert "megatrain.simulator.policies.double_buffer" in names
    assert loaded_by(tmp_path, *names) == []


def test_the_probe_notices_a_framework(tmp_path: Path) -> None:
    """The other tests would notice a framework that is loaded."""
    assert loaded_by(tmp_path, "safetensors") == ["safetensors"]
