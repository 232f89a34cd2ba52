"""Files -> rows, each with its file and line: JSONL, Parquet, Arrow (what `datasets.save_to_disk` writes) and plain text.

One file is one document where it is plain text. Files are read as a stream: a row, or a piece of a text, at a time.
"""

from __future__ import annotations

import codecs
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from megatrain.runtime.data import tables
from megatrain.simulator.errors import UserError
from megatrain.simulator.files import read_json

Kind = Literal["jsonl", "parquet", "arrow", "text"]
TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst")
SUFFIXES: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".arrow": "arrow", **dict.fromkeys(TEXT_SUFFIXES, "text")}
_NAMED: dict[str, Kind] = {**SUFFIXES, ".json": "jsonl"}  # in a folder, .json is more often something about the data
_LONGEST_LINE_BYTES = 2**28
_PIECE_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files of one kind, in the order in which they are read."""

    path: Path
    kind: Kind
    files: tuple[Path, ...]
    left_out: str = ""
    """files of other kinds in the same folder, in words"""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table, or a piece of a text file."""

    file: Path
    line: int
    """from 1: of a JSONL or text file, or the number of the row"""
    value: dict[str, Any] | bytes
    """a row's columns, or UTF-8 text"""
    closes: bool = True
    """False for a piece of a text that the next row continues"""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used."""

    file: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


def find(path: Path, *, split: str = "train") -> Source:
    """What there is to read at `path`: a file, a folder of files (of several kinds the one with the most bytes), or a `save_to_disk` folder.

    Raises UserError where there is nothing, or nothing that can be read.
    """
    allowed = f"a file or folder with {_listed([*SUFFIXES])}"
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            kind = _NAMED.get(path.suffix)
            if kind is None:
                raise UserError(f"data {path}", found=f"a file ending in {path.suffix!r}", allowed=_listed([*_NAMED]), fix="convert or rename the file")
            return Source(path=path, kind=kind, files=(path,))
        if not stat.S_ISDIR(mode):
            raise UserError(f"data {path}", found="no such file or folder, but a device or a pipe", allowed=allowed, fix="check the path")
        if (path / "dataset_dict.json").is_file():
            path = path / _split(path, split)
        if (path / "state.json").is_file():
            return Source(path=path, kind="arrow", files=_saved_files(path))
        return _in_folder(path, allowed)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        missing = isinstance(error, FileNotFoundError)
        found = "no such file or folder" if missing else (getattr(error, "strerror", None) or str(error)).lower()
        raise UserError(f"data {getattr(error, 'filename', None) or path}", found=found, allowed=allowed, fix="check the path") from None


def _listed(suffixes: list[str] | tuple[str, ...]) -> str:
    return ", ".join(f"*{suffix}" for suffix in suffixes)


def _in_folder(path: Path, allowed: str) -> Source:
    found: dict[Kind, list[Path]] = {}

    def refuse(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(path, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            file = Path(folder, name)
            if file.suffix in SUFFIXES and not name.startswith(".") and file.is_file():
                found.setdefault(SUFFIXES[file.suffix], []).append(file)
    if not found:
        raise UserError(f"data {path}", found="a folder without data", allowed=allowed, fix="check the path")
    sizes = {kind: sum(os.stat(file).st_size for file in files) for kind, files in found.items()}
    kind = max(sorted(sizes), key=lambda kind: sizes[kind])
    others = ", ".join(f"{len(found[other])} {other} ({sizes[other]:,} bytes)" for other in sorted(sizes) if other != kind)
    return Source(path=path, kind=kind, files=tuple(sorted(found[kind])), left_out=others)


def _split(path: Path, split: str) -> str:
    content = read_json(path / "dataset_dict.json")
    splits = content.get("splits") if isinstance(content, dict) else None
    if not isinstance(splits, list) or split not in splits:
        raise UserError(
            f"data {path}: split", found=repr(split), allowed=", ".join(map(str, splits or [])) or "none: dataset_dict.json names no splits",
            fix="name one of these, or its folder",
        )  # fmt: skip
    return split


def _saved_files(path: Path) -> tuple[Path, ...]:
    """Those that the state.json of `datasets.save_to_disk` names."""
    state = read_json(path / "state.json")
    listed = state.get("_data_files") if isinstance(state, dict) else None
    entries = [entry.get("filename") if isinstance(entry, dict) else None for entry in listed] if isinstance(listed, list) else []
    names = [name for name in entries if isinstance(name, str)]
    if not names or len(names) < len(entries) or state.get("_indices_data_files"):
        raise UserError(
            f"data {path / 'state.json'}", found="no list `_data_files` of file names, or indices into them", allowed="what datasets.save_to_disk writes",
            fix="save the dataset again, after flatten_indices()",
        )  # fmt: skip
    files = tuple(path / name for name in names)
    for file in files:
        if not file.is_file():
            raise UserError(f"data {file}", found="no such file, though state.json names it", allowed="every file of the dataset", fix="copy the whole folder")
    return files


def rows(source: Source, columns: tuple[str, ...] | None = None) -> Iterator[Row | BadRow]:
    """Every row of every file, in order. `columns` spares reading the others where a file's format allows it. Raises UserError for a broken file."""
    for file in source.files:
        try:
            if source.kind == "jsonl":
                yield from _jsonl(file)
            elif source.kind == "text":
                yield from _text(file)
            else:
                for number, value in enumerate(tables.read(file, source.kind, columns), 1):
                    yield BadRow(file, number, value) if isinstance(value, str) else Row(file, number, value)
        except OSError as error:
            found = (error.strerror or str(error)).lower()
            raise UserError(f"data {file}", found=found, allowed="a readable file", fix="check the path and its permissions") from None


def _jsonl(file: Path) -> Iterator[Row | BadRow]:
    decoder = msgspec.json.Decoder()
    with file.open("rb") as stream:
        number = 0
        while line := stream.readline(_LONGEST_LINE_BYTES):
            number += 1
            if len(line) == _LONGEST_LINE_BYTES and not line.endswith(b"\n"):
                while (rest := stream.readline(_LONGEST_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield BadRow(file, number, f"a line of more than {_LONGEST_LINE_BYTES} bytes")
                continue
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
                if file.suffix == ".json" and line.lstrip().startswith(b"["):
                    raise UserError(f"data {file}", found="one JSON array", allowed="an object a line", fix=f"jq -c '.[]' {file.name} > {file.stem}.jsonl")
            if not line.strip():
                continue
            try:
                value = decoder.decode(line)
            except UnicodeDecodeError:
                yield BadRow(file, number, "invalid UTF-8")
            except RecursionError:
                yield BadRow(file, number, "JSON nested too deeply")
            except msgspec.DecodeError as error:
                yield BadRow(file, number, f"invalid JSON: {error}")
            else:
                yield Row(file, number, value) if isinstance(value, dict) else BadRow(file, number, f"{_named(value)}, not an object")


def _named(value: object) -> str:
    return {list: "a list", str: "a string", type(None): "null", bool: "a boolean"}.get(type(value), "a number")


def _text(file: Path) -> Iterator[Row | BadRow]:
    """The file in pieces of about a MiB that end where a line begins with something other than a blank: tokenisers split words there too."""
    line = _first_invalid_line(file)
    if line:
        yield BadRow(file, line, "invalid UTF-8")
        return
    with file.open("rb") as stream:
        number, kept = 1, b""
        while data := stream.read(_PIECE_BYTES):
            kept += data
            end = _border(kept)
            if end:
                yield Row(file, number, kept[:end], closes=False)
                number, kept = number + kept.count(b"\n", 0, end), kept[end:]
        yield Row(file, number, kept)


def _border(text: bytes) -> int:
    """Where `text` may be cut; 0: nowhere yet. In a text without line ends, at a character, once it is long."""
    at = len(text) - 1
    while (at := text.rfind(b"\n", 0, at)) >= 0:
        character = text[at + 1 : at + 5].decode(errors="ignore")[:1]
        if character and not character.isspace():
            return at + 1
    if len(text) < 4 * _PIECE_BYTES:
        return 0
    at = len(text) - 1
    while text[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _first_invalid_line(file: Path) -> int:
    """0 where the whole file is UTF-8."""
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    with file.open("rb") as stream:
        while True:
            data = stream.read(_PIECE_BYTES)
            try:
                decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                return line + error.object.count(b"\n", 0, error.start)
            if not data:
                return 0
            line += data.count(b"\n")
