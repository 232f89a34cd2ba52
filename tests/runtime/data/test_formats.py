"""Tests of readers: in every format, rows have their file and line.

A broken file gives a one-line error, and broken rows are counted with their position.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatrain.runtime.data.rows import formats, json_rows
from megatrain.runtime.data.rows.formats import BadRow, TextRow, rows
from megatrain.runtime.data.rows.sources import COMPRESSIONS, find
from megatrain.simulator.base.errors import UserError


def read(path: Path) -> list[TextRow | BadRow]:
    return list(rows(find(path)))


def test_jsonl_rows_have_their_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "a"}\r\n\n{"text": 1\n["text"]\n{"text": "\xff"}\n'
        + b"[" * 100_000
        + b'\nnull\n{"text": "z\\u00f6lf"}'
    )
    found = read(path)
    assert [(row.line, row.value) for row in found if isinstance(row, TextRow)] == [
        (1, {"text": "a"}),
        (8, {"text": "zölf"}),
    ]
    reasons = {row.line: row.reason for row in found if isinstance(row, BadRow)}
    assert sorted(reasons) == [3, 4, 5, 6, 7]
    assert reasons[3].startswith("invalid JSON: ")
    assert (reasons[4], reasons[5], reasons[6], reasons[7]) == (
        "a list, not an object",
        "invalid UTF-8",
        "JSON nested too deeply",
        "null, not an object",
    )
    assert str(found[1]).startswith(f"{path}:3: invalid JSON: ")


def test_a_line_without_end_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_rows, "LONGEST_LINE_BYTES", 64)
    path = tmp_path / "rows.jsonl"
    path.write_text(
        json.dumps({"text": "x" * 300}) + '\n{"text": "a"}\n' + json.dumps({"text": "x" * 300})
    )
    assert [(type(row), row.line) for row in read(path)] == [(BadRow, 1), (TextRow, 2), (BadRow, 3)]


def test_a_json_file_holds_an_object_a_line_or_one_array(
    jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    assert [row.line for row in read(jsonl([{"text": "a"}], "rows.json"))] == [1]
    wanted = [{"text": "zwölf, ] }\n🙂" * 9000, "n": number} for number in range(5)]
    for indent in (None, 1):
        (tmp_path / "array.json").write_text(
            json.dumps(wanted, indent=indent, ensure_ascii=bool(indent)), encoding="utf-8-sig"
        )
        found = read(tmp_path / "array.json")
        assert [(row.line, row.value) for row in found if isinstance(row, TextRow)] == [
            *enumerate(wanted, 1)
        ]
    (tmp_path / "array.json").write_text(' [1, {"text": "a"}, "b", 23 , null]\n')
    assert [
        str(row).partition(": ")[2]
        for row in read(tmp_path / "array.json")
        if isinstance(row, BadRow)
    ] == [
        "a number, not an object",
        "a string, not an object",
        "a number, not an object",
        "null, not an object",
    ]
    (tmp_path / "array.json").write_text("[ ]")
    assert read(tmp_path / "array.json") == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'[{"text": "a"}', r"invalid JSON: '\]' is missing"),
        (b'[{"text": "a"} {"text": "b"}]', r"invalid JSON: '\]' is missing"),
        (b'[{"text": "a"},', "invalid JSON in element 2: "),
        (b'[{"text": "a}]', "invalid JSON in element 1: Unterminated string"),
        (b'[{"text": "a"}] x', "text after the end of the array"),
        (b'[{"text": "\xff"}]', "invalid UTF-8"),
        (b"[" * 100_000, "JSON nested too deeply, in element 1"),
    ],
)
def test_a_broken_array_gives_a_one_line_error(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "array.json").write_bytes(content)
    with pytest.raises(
        UserError,
        match=(
            rf"array\.json: found {reason}.*; allowed: one array of objects, or one object per "
            rf"line; fix: {'convert it to UTF-8' if 'UTF-8' in reason else 'write the file again'}"
        ),
    ):
        read(tmp_path / "array.json")


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", '"\\ud800"'])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_invalid_json_makes_a_bad_row_only_in_a_column_that_is_read(
    tmp_path: Path, name: str, number: str
) -> None:
    row = f'{{"text": "a", "score": {number}}}'
    (tmp_path / name).write_text(f"[{row}]" if name == "rows.json" else row)
    (good,) = rows(find(tmp_path / name), ("text",))
    assert isinstance(good, TextRow)
    assert good.value == {"text": "a"}
    (bad,) = rows(find(tmp_path / name), ("text", "score"))
    assert isinstance(bad, BadRow)
    assert bad.reason.startswith("invalid JSON: ")


def test_csv_rows_are_named_by_their_header_and_have_the_line_where_they_begin(
    tmp_path: Path,
) -> None:
    text = '\ufeffid,text\r\n1,"zwölf, ""two""\nlines"\r\n\n2\n3,\xe9\n4,"x" y\n5,12\n'
    content = text.encode().replace("\xe9".encode(), b"\xe9")
    (tmp_path / "rows.csv").write_bytes(content)
    found = read(tmp_path / "rows.csv")
    assert [(row.line, row.value) for row in found if isinstance(row, TextRow)] == [
        (2, {"id": "1", "text": 'zwölf, "two"\nlines'}),
        (8, {"id": "5", "text": "12"}),
    ]
    bad = {row.line: row.reason for row in found if isinstance(row, BadRow)}
    assert (bad[5], bad[6]) == ("1 fields, where the header has 2", "invalid UTF-8")
    assert bad[7].startswith("invalid CSV: ")
    (tmp_path / "rows.tsv").write_text('text\n"open')
    assert [str(row).partition(": ")[2] for row in read(tmp_path / "rows.tsv")] == [
        "invalid CSV: unexpected end of data"
    ]
    (tmp_path / "rows.tsv").write_text("text\tid\na,b\tc\n" + "x" * 200_000 + "\td\n")
    assert [
        row.value["text"]
        for row in read(tmp_path / "rows.tsv")
        if isinstance(row, TextRow) and isinstance(row.value, dict)
    ] == ["a,b", "x" * 200_000]
    (tmp_path / "rows.csv").write_bytes("text\n".encode("utf-16"))
    with pytest.raises(
        UserError,
        match=r"rows\.csv: found invalid UTF-8 in the header; allowed: CSV in UTF-8; fix: convert",
    ):
        read(tmp_path / "rows.csv")


@pytest.mark.parametrize(
    ("name", "text", "separators", "row"),
    [
        ("a.csv", "prompt;completion\none, two;three, four\n", [";"], ("one, two", "three, four")),
        ("a.csv", '\ufeff\n"prompt";"completion"\r\n"a;b";c\r\n', [";"], ("a;b", "c")),
        ("a.csv", '"prompt\t"\tcompletion\na\tb;c\n', ["\t"], ("a", "b;c")),
        ("a.csv", "prompt|completion\na|b\n", ["|"], ("a", "b")),
        ("a.tsv", "prompt,completion\na,b\n", [","], ("a", "b")),
        ("a.csv", "prompt,completion;x;y\na;b,c\n", [], ("a;b", "c")),
        ("a.tsv", "prompt\tcompletion,x\na,b\tc\n", [], ("a,b", "c")),
        ("a.csv", '"first, second"\na\n', [], ("a",)),
        ("a.csv", "text\na;b\n", [], ("a;b",)),
        ("a.jsonl", '{"a|b": "c"}\n', [], ("c",)),
    ],
)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_csv_file_is_read_with_the_separator_of_its_header(
    tmp_path: Path, name: str, text: str, separators: list[str], row: tuple[str, ...], ending: str
) -> None:
    content = text.encode()
    path = tmp_path / f"{name}{ending}"
    path.write_bytes(gzip.compress(content) if ending else content)
    (found,) = read(path)
    assert isinstance(found, TextRow)
    assert isinstance(found.value, dict)
    assert tuple(found.value.values()) == row
    assert formats.other_separators(find(path)) == separators


def test_a_csv_file_that_cannot_be_read_is_refused_while_its_separator_is_found(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a;b\n")
    source = find(path)
    path.unlink()
    with pytest.raises(UserError, match=r"rows\.csv: found no such file"):
        formats.other_separators(source)


@pytest.mark.parametrize(("ending", "codec"), COMPRESSIONS.items())
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.JSON", "rows.csv", "text.txt"])
def test_a_compressed_file_is_read_like_its_content(
    tmp_path: Path, name: str, ending: str, codec: str
) -> None:
    array = json.dumps([{"text": "zwölf"}, {"text": "b"}])
    content = {
        "rows.jsonl": '{"text": "zwölf"}\n{"text": "b"}',
        "rows.JSON": array,
        "rows.csv": "text\nzwölf\nb\n",
        "text.txt": "zwölf\nb\n",
    }[name]
    (tmp_path / name).write_text(content, encoding="utf-8")
    path = tmp_path / f"{name}{ending.upper()}"
    with pyarrow.CompressedOutputStream(str(path), codec) as stream:
        stream.write(content.encode())
    assert [row.value for row in read(path) if isinstance(row, TextRow)] == [
        row.value for row in read(tmp_path / name) if isinstance(row, TextRow)
    ]
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(
        UserError,
        match=(
            rf"found truncated compressed stream; allowed: a complete {codec} file; fix:"
            r" compress it again"
        ),
    ):
        read(path)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_tables_give_the_same_rows_as_jsonl(tmp_path: Path, suffix: str) -> None:
    table = pyarrow.table(
        {
            "messages": [[{"role": "user", "content": str(i)}] for i in range(3000)],
            "score": range(3000),
        }
    )
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=700)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    found = read(path)
    assert [row.line for row in found] == list(range(1, 3001))
    assert found[2345] == TextRow(
        path, 2346, {"messages": [{"role": "user", "content": "2345"}], "score": 2345}
    )
    assert list(rows(find(path), ("messages",)))[7] == TextRow(
        path, 8, {"messages": [{"role": "user", "content": "7"}]}
    )


def test_an_arrow_file_is_read_like_a_stream(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["a", "b"]})
    path = tmp_path / "rows.arrow"
    with pyarrow.ipc.new_file(path, table.schema) as stream:
        stream.write_table(table)
    assert read(path) == [TextRow(path, 1, {"text": "a"}), TextRow(path, 2, {"text": "b"})]


def test_text_that_is_not_utf8_is_a_bad_row_of_its_table(tmp_path: Path) -> None:
    column = pyarrow.Array.from_buffers(
        pyarrow.string(),
        3,
        [
            None,
            pyarrow.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])),
            pyarrow.py_buffer(b"a\xffb"),
        ],
    )
    path = tmp_path / "rows.arrow"
    with pyarrow.ipc.new_stream(path, pyarrow.schema({"text": pyarrow.string()})) as stream:
        stream.write_batch(pyarrow.record_batch({"text": column}))
    assert read(path) == [
        TextRow(path, 1, {"text": "a"}),
        BadRow(path, 2, "invalid UTF-8"),
        TextRow(path, 3, {"text": "b"}),
    ]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
@pytest.mark.parametrize("content", [b"", b"PAR1", b"ARROW1\0\0", b"nonsense" * 100])
def test_a_damaged_table_gives_a_one_line_error(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        UserError,
        match=(
            rf"{name}: found another format, or a damaged file \(.*allowed: an? (Parquet file|"
            r"Arrow stream or file); fix: "
        ),
    ):
        read(tmp_path / name)


def test_a_file_that_goes_away_gives_a_one_line_error(jsonl: Callable[..., Path]) -> None:
    source = find(jsonl([{"text": "a"}]))
    source.files[0].unlink()
    with pytest.raises(UserError, match=r"rows\.jsonl: found no such file or directory"):
        list(rows(source))


@pytest.mark.parametrize(
    "line", ["some words\n  indented\n", "数据 und Wörter\n", "no end of line", "слова"]
)
def test_a_long_text_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setattr(formats, "_PIECE_BYTES", 50)
    path = tmp_path / "text.txt"
    path.write_text(line * 100, encoding="utf-8")
    found = [row for row in read(path) if isinstance(row, TextRow)]
    pieces = [row.value for row in found if isinstance(row.value, bytes)]
    assert "".join(piece.decode() for piece in pieces) == line * 100
    assert len(pieces) > 5
    assert all(50 - 3 <= len(piece) <= 50 + 3 for piece in pieces[:-2])
    assert [row.closes for row in found] == [False] * (len(found) - 1) + [True]
    for index, row in enumerate(found):
        assert row.line == 1 + b"".join(pieces[:index]).count(b"\n")


@pytest.mark.parametrize("piece", [7, 2**20])
@pytest.mark.parametrize("text", ["", "hi", "zwölf\n\ufeffb\n" * 5])
def test_a_byte_order_mark_is_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, piece: int
) -> None:
    monkeypatch.setattr(formats, "_PIECE_BYTES", piece)
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8-sig")
    found = read(path)
    pieces = [row.value for row in found if isinstance(row, TextRow)]
    assert b"".join(piece for piece in pieces if isinstance(piece, bytes)).decode() == text
    assert [row.closes for row in found if isinstance(row, TextRow)][-1]
    assert found[0].line == 1


def test_a_text_that_is_not_utf8_is_one_bad_row_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "_PIECE_BYTES", 7)
    path = tmp_path / "text.txt"
    path.write_bytes("zwölf\n".encode() * 5 + b"\xff\n" + b"x\n" * 20)
    assert read(path) == [BadRow(path, 6, "invalid UTF-8")]
    path.write_bytes("zwölf\nä".encode()[:-1])  # cut within a character
    assert read(path) == [BadRow(path, 2, "invalid UTF-8")]
