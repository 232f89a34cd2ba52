"""Tests of the digest of source code.

The digest changes with all code that may change a result. It does not depend on comments,
docstrings or the file of a function.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.experiments.files.code_digest import code_digest

CODE = (
    '"""Doc."""\nimport math\n\nLIMIT = 3  # so many\n\n\n@cached\ndef area(r):\n    """Of a'
    ' circle."""\n    return math.pi * r * r\n'
)


def digest(folder: Path, **files: str) -> str:
    for path in folder.iterdir():
        path.unlink()
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return code_digest(folder.glob("*.py"))


def test_comments_and_docstrings_do_not_change_the_digest(tmp_path: Path) -> None:
    before = digest(tmp_path, a=CODE)
    assert (
        digest(
            tmp_path,
            a=CODE.replace("so many", "at most")
            .replace("Of a circle", "Of a disc")
            .replace("Doc", "Document"),
        )
        == before
    )
    head, tail = CODE[: CODE.index("@cached")], CODE[CODE.index("@cached") :]
    assert (
        digest(tmp_path, a=f"from b import area\n{head}", b=f"import math\n\n\n{tail}") == before
    ), "a function that moves to another file keeps the digest"


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("LIMIT = 3", "LIMIT = 4"),
        ("r * r", "r"),
        ("@cached\n", ""),
        ("def area", "def sizes"),
        ("(r)", "(r, *, r2=1)"),
    ],
)
def test_code_that_may_change_a_result_changes_the_digest(
    tmp_path: Path, was: str, now: str
) -> None:
    assert digest(tmp_path, a=CODE.replace(was, now)) != digest(tmp_path, a=CODE)


def test_the_head_of_a_function_with_an_empty_body_counts(tmp_path: Path) -> None:
    assert digest(tmp_path, a="def f(x): ...\n") != digest(tmp_path, a="def f(y): ...\n")


def test_a_string_that_looks_like_a_comment_counts(tmp_path: Path) -> None:
    assert digest(tmp_path, a='TEXT = "a # b"\n') != digest(tmp_path, a='TEXT = "a # c"\n')
