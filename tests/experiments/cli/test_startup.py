"""Tests of the start of the command: only the verbs that need heavy packages import them.

`make speed` measures how fast the command starts.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys

import pytest
from pages import ROOT

from megatrain.experiments.cli import main as cli

CLI = [sys.executable, "-m", "megatrain.experiments.cli"]


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("train", "--help"),
        ("check", "tiny", "--hardware", "h200"),
        ("plan", "tiny/config.json", "--hardware", "h200", "--out", "new.toml"),
        ("simulate", "plan.toml", "--json", "--trace", "t.json"),
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("workplace")
def test_predicting_loads_neither_torch_nor_transformers(words: tuple[str, ...]) -> None:
    program = (
        "import sys\nfrom megatrain.experiments.cli import main as cli\ntry:\n    status ="
        " cli.main(sys.argv[1:])\nexcept SystemExit as end:\n    status = end.code\nheavy = [name"
        " for name in ('torch', 'transformers', 'pandas', 'matplotlib') if name in"
        " sys.modules]\nsys.exit(f'{status} {heavy}' if status or heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("workplace")
def test_a_verb_loads_neither_another_verb_nor_simpy() -> None:
    program = (
        "import sys\nfrom megatrain.experiments.cli import main as cli\ncli.main(sys.argv[1:])\n"
        "print([name for name in sys.modules if '.commands.' in name or name == 'simpy'])"
    )
    words = ["check", "tiny", "--hardware", "h200"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "['megatrain.experiments.commands.check']"


def test_the_list_of_verbs_has_the_first_line_of_each() -> None:
    """The lines are read from the files, without importing the modules."""
    assert {verb: cli._summary(verb) for verb in cli.VERBS} == {
        verb: module.__doc__.partition("\n")[0] for verb, module in cli.VERBS.items()
    }


@pytest.mark.parametrize("words", [("--help",), ("--help", "check")], ids=" ".join)
def test_the_help_of_the_command_lists_every_verb(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(words)
    listed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [verb for verb in cli.VERBS if verb not in (line[0] for line in listed if line)] == []


@pytest.mark.usefixtures("workplace")
def test_a_reader_that_leaves_early_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*CLI, "simulate", "plan.toml"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


PROGRAMS = sorted(
    ".".join(("megatrain", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__main__")
    for path in (ROOT / "experiments").rglob("*.py")
    if "results" not in path.parts and 'if __name__ == "__main__":' in path.read_text()
)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules.*:RuntimeWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_has_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    # runpy warns if the module is imported already.
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(name, run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")
