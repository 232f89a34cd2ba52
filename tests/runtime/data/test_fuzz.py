"""Fuzz tests of readers: any file gives rows, bad rows or a UserError of one line. There is no
other exception and no endless loop.

Each test has 300 cases, and 5,000 in the nightly run.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.runtime.data.columns import LAYOUTS, Unusable, extract, recognize
from megatrain.runtime.data.rows.formats import BadRow, TextRow, rows
from megatrain.runtime.data.rows.sources import find
from megatrain.simulator.base.errors import UserError

_KEYS = [
    "text",
    "prompt",
    "completion",
    "messages",
    "conversations",
    "instruction",
    "input",
    "output",
    "system",
    "role",
    "content",
    "from",
    "value",
]
_WORDS = ["user", "assistant", "human", "gpt", "tool", "bot", "", "ö🙂", "\ud800", "\0"]
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(_WORDS)
    | st.text(max_size=5)
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=4)
    ),
    max_leaves=6,
)
_TABLE = pyarrow.table(
    {
        "messages": [
            [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ä" * number}]
            for number in range(20)
        ],
        "text": ["t"] * 20,
    }
)


def _parquet() -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(_TABLE, sink)
    return sink.getvalue()


def _arrow() -> bytes:
    sink = io.BytesIO()
    with pyarrow.ipc.new_stream(sink, _TABLE.schema) as stream:
        stream.write_table(_TABLE)
    return sink.getvalue()


def _damaged(whole: bytes) -> st.SearchStrategy[bytes]:
    """Draws the content cut off somewhere, or with some bytes overwritten."""

    def overwrite(changes: list[tuple[int, int]]) -> bytes:
        content = bytearray(whole)
        for at, byte in changes:
            content[at] = byte
        return bytes(content)

    places = st.integers(0, len(whole) - 1)
    return places.map(lambda at: whole[:at]) | st.lists(
        st.tuples(places, st.integers(0, 255)), max_size=4
    ).map(overwrite)


_LINES = st.lists(
    _VALUES.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=20), max_size=3
).map(b"\n".join)
CONTENTS = {
    ".jsonl": (
        _LINES
        | _damaged(
            b'{"text": "w\xc3\xb6rter"}\n{"messages": [{"role": "user", "content": "q"}]}\n' * 3
        )
    ),
    ".json": (
        _VALUES.map(lambda value: json.dumps([value] * 3).encode())
        | _damaged(b' [{"text": "w\xc3\xb6rter"}, {"text": [1, {}]}, NaN,\n null]')
    ),
    ".csv": _LINES | _damaged('id,text\n1,"zwölf, ""\n"\n2,b\n'.encode()),
    ".txt": st.binary(max_size=200) | _damaged("zwölf\n🙂 Wörter\n".encode() * 20),
    ".parquet": _damaged(_parquet()),
    ".arrow": _damaged(_arrow()),
}


def check(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    found = refused = None
    try:
        found = list(rows(find(path)))
    except UserError as error:
        refused = error
    if found is None:
        assert "\n" not in str(refused)
        return
    assert len(found) <= max(20, content.count(b"\n") + content.count(b"\r") + 1)
    for row in found:
        assert row.line >= 1
        if isinstance(row, BadRow):
            assert row.reason
        elif isinstance(row.value, dict):
            extracted(row.value)
        else:
            row.value.decode()
    assert path.suffix != ".txt" or b"".join(
        row.value for row in found if isinstance(row, TextRow) and isinstance(row.value, bytes)
    ) in (content, b"")


def extracted(row: dict) -> None:
    """Extracts the row by its recognized layout, and by all other layouts."""
    for layout in (recognize(row), *LAYOUTS):
        if layout:
            with contextlib.suppress(Unusable):
                assert extract(row, layout) is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def fuzz(suffix: str, cases: int) -> Callable[[Path], None]:
    @settings(max_examples=cases)
    @given(CONTENTS[suffix])
    def run(path: Path, content: bytes) -> None:
        check(path, content)

    return lambda folder: run(folder / f"file{suffix}")


@pytest.mark.parametrize("suffix", CONTENTS)
def test_any_file_gives_rows_or_a_one_line_error(folder: Path, suffix: str) -> None:
    fuzz(suffix, 75)(folder)


@pytest.mark.nightly
@pytest.mark.parametrize("suffix", CONTENTS)
def test_any_file_gives_rows_or_a_one_line_error_five_thousand_times(
    folder: Path, suffix: str
) -> None:
    fuzz(suffix, 1250)(folder)
