"""Reads rows from Parquet and Arrow files, with pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatrain.simulator.base.errors import UserError

if TYPE_CHECKING:
    import pyarrow

_ROWS = 1024
"""Number of rows in a batch."""


def read(
    file: Path, kind: Literal["parquet", "arrow"], columns: tuple[str, ...] | None
) -> Iterator[dict[str, Any] | str]:
    """Yields each row, or a string with the reason why the row cannot be used.

    Only the columns `columns` are read, or all if it is None. Raises UserError for a file that is
    damaged or has another format, and OSError if it cannot be read.
    """
    import pyarrow

    try:
        for batch in _parquet(file, columns) if kind == "parquet" else _arrow(file, columns):
            yield from _values(batch)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        name = {"parquet": "a Parquet file", "arrow": "an Arrow stream or file"}[kind]
        raise UserError(
            f"data {file}",
            found=f"another format, or a damaged file ({error})",
            allowed=name,
            fix="write the file again",
        ) from None


def _parquet(file: Path, columns: tuple[str, ...] | None) -> Iterator[pyarrow.RecordBatch]:
    """Yields the batches of a Parquet file."""
    import pyarrow.parquet

    with file.open("rb") as stream, pyarrow.parquet.ParquetFile(stream) as table:
        present = (
            None
            if columns is None
            else [name for name in table.schema_arrow.names if name in columns]
        )
        yield from table.iter_batches(batch_size=_ROWS, columns=present)


def _arrow(file: Path, columns: tuple[str, ...] | None) -> Iterator[pyarrow.RecordBatch]:
    """Yields the batches of an Arrow file or stream."""
    import pyarrow

    with file.open("rb") as stream:
        begins = stream.read(6)
    with pyarrow.OSFile(str(file)) as stream:
        if begins == b"ARROW1":
            reader = pyarrow.ipc.open_file(stream)
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            batches = iter(pyarrow.ipc.open_stream(stream))
        for batch in batches:
            if columns is not None:
                batch = batch.select([name for name in batch.schema.names if name in columns])
            yield from (batch.slice(start, _ROWS) for start in range(0, batch.num_rows, _ROWS))


def _values(batch: pyarrow.RecordBatch) -> Iterator[dict[str, Any] | str]:
    """Yields the rows of a batch after validating it.

    Arrow does not validate what it reads: an offset can point outside of the data, and a string
    can contain bytes that are not UTF-8.
    """
    import pyarrow

    try:
        batch.validate(full=True)
        values: list[dict[str, Any]] = batch.to_pylist()
    except (pyarrow.ArrowException, ValueError) as error:
        if batch.num_rows <= 1:
            yield (
                f"damaged ({error})"
                if "UTF8" not in str(error).replace("-", "").upper()
                else "invalid UTF-8"
            )
            return
        for index in range(batch.num_rows):
            yield from _values(batch.slice(index, 1))
        return
    yield from ({name: _without_nulls(value) for name, value in row.items()} for row in values)


def _without_nulls(value: Any) -> Any:
    """Returns `value` without keys whose value is null, at any depth.

    In Arrow, all structs of a column have the same keys. Missing values are null.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
