"""Tests of `megatrain completion`: the printed script, and completions in bash."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import Any

import pytest

from megatrain.experiments.cli.main import VERBS
from megatrain.experiments.commands.completion import SHELLS


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_has_every_verb_and_its_options(shell: str, command: Any) -> None:
    pytest.importorskip("shtab")
    outcome = command("completion", shell)
    assert (outcome.status, outcome.err) == (0, "")
    assert [verb for verb in VERBS if verb not in outcome.out] == []
    for option in ("adapt", "resume", "no-browser"):
        assert option in outcome.out
    assert "warm-up-steps" in outcome.out
    assert "%%" not in outcome.out, "help texts are those of `--help`"
    if shutil.which(shell):
        checked = [shutil.which(shell), "-n", "-c" if shell == "bash" else "/dev/stdin"]
        given = [outcome.out] if shell == "bash" else []
        subprocess.run([*map(str, checked), *given], input=outcome.out, text=True, check=True)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ch"], ["check", "chat"]),
        (["train", "--adap"], ["--adapt"]),
        (["check", "--dtype", ""], ["bf16", "fp32", "fp8"]),
        (["report", "test_comp"], ["test_completion.py"]),
    ],
)
def test_bash_completes_a_word_that_has_begun(
    command: Any, words: list[str], offered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("shtab")
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    monkeypatch.chdir(__file__.rpartition("/")[0])
    script = command("completion", "bash").out
    typed = " ".join(f"'{word}'" for word in words)
    ask = (
        f"COMP_WORDS=(megatrain {typed}); COMP_CWORD={len(words)}; _shtab_megatrain; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=False
    )
    assert sorted(done.stdout.split()) == sorted(offered), done.stderr


def test_without_shtab_the_error_says_what_to_install(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    outcome = command("completion", "bash")
    assert outcome.status == 2
    assert outcome.err == (
        "megatrain: completion: found no shtab, which writes the script; allowed: shtab 1.13 or"
        " newer; fix: run `pip install shtab`\n"
    )
