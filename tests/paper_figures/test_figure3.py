"""Figure 3 builds from the committed run, and says which file of it is missing or wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatrain.paper_figures import figure3
from megatrain.simulator.errors import UserError


def test_it_builds_from_the_committed_run(tmp_path: Path) -> None:
    picture = figure3.figure(figure3.RUN, tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


@pytest.mark.parametrize("name", ["plan.toml", "environment.json", "predicted.json", "measured.json"])
def test_a_missing_or_malformed_file_is_named(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(figure3.RUN, run)
    (run / name).write_text("{ cut")
    with pytest.raises(UserError, match=name):
        figure3.figure(run, tmp_path)
    (run / name).unlink()
    with pytest.raises(UserError, match=name):
        figure3.figure(run, tmp_path)
    assert not (tmp_path / "figure3.png").exists()
