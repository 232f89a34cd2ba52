"""Tests of the rows that are read from Parquet and Arrow files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pyarrow
import pyarrow.parquet
import pytest

from megatrain.runtime.data.rows import tables


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_key_that_only_other_rows_have_is_not_read_as_null(
    tmp_path: Path, kind: Literal["parquet", "arrow"]
) -> None:
    arguments = [{"city": "Paris"}, {"zip": 3, "list": [{"a": 1}, {"b": None}]}]
    given = [
        {
            "messages": [
                {"role": "assistant", "content": None, "tool_calls": [{"arguments": one}]}
            ],
            "id": None,
        }
        for one in arguments
    ]
    table, path = pyarrow.Table.from_pylist(given), tmp_path / "rows"
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    first, second = tables.read(path, kind, None)
    assert first == {
        "messages": [{"role": "assistant", "tool_calls": [{"arguments": {"city": "Paris"}}]}],
        "id": None,
    }
    assert isinstance(second, dict)
    assert second["messages"][0]["tool_calls"][0]["arguments"] == {"zip": 3, "list": [{"a": 1}, {}]}
