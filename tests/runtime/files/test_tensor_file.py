"""Tests of reading safetensors files from any source.

A file that is not exactly valid is refused in one line, and a pickle is never opened.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megatrain.runtime.files import tensor_stream
from megatrain.runtime.files.malformed_file import MalformedFile
from megatrain.runtime.files.tensor_file import LARGEST_HEADER_BYTES, make_header, read_entries
from megatrain.runtime.files.tensor_stream import (
    TensorSource,
    checksum_of,
    read_tensors,
    write_tensors,
)

GOOD = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def file_of(path: Path, header: object, data: bytes = bytes(32), length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def changed(**changes: Any) -> dict[str, Any]:
    return {**GOOD, "b": {**GOOD["b"], **changes}}


class Runs:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
        return os.mkdir, (self.path,)


def test_files_that_safetensors_writes_are_read(tmp_path: Path) -> None:
    tensors = {
        "x": torch.arange(6.0).view(2, 3),
        "empty": torch.zeros(0, 4),
        "y": torch.ones(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(2),
    }
    save_file(tensors, tmp_path / "f", metadata={"format": "pt"})
    entries = read_entries(tmp_path / "f")
    assert {name: (entry.dtype, entry.shape, entry.bytes) for name, entry in entries.items()} == {
        name: (tensor.dtype, tuple(tensor.shape), tensor.nbytes) for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("piece", [1, 7, 2**25])
def test_written_files_are_read_by_safetensors_and_by_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(tensor_stream, "PIECE_BYTES", piece)
    tensors = {
        "x": torch.arange(6.0).view(2, 3),
        "empty": torch.zeros(0),
        "y": torch.arange(5, dtype=torch.int16),
    }
    size, checksum = write_tensors(
        tmp_path / "f", {name: TensorSource.of(tensor) for name, tensor in tensors.items()}
    )
    assert size == (tmp_path / "f").stat().st_size
    assert checksum == checksum_of(tmp_path / "f")
    assert {name: tensor.tolist() for name, tensor in load_file(tmp_path / "f").items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }
    back = {name: torch.full_like(tensor, 9) for name, tensor in tensors.items()}
    assert read_tensors(tmp_path / "f", back) == checksum
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_data_begins_at_a_multiple_of_8_bytes() -> None:
    for size in range(1, 9):
        header = make_header({"x" * size: (torch.bfloat16, (3,))})
        assert len(header) % 8 == 0
        assert int.from_bytes(header[:8], "little") == len(header) - 8


@pytest.mark.parametrize("length", [0x80, 0x280, 0x380, 0x480, 0x580, 0x4B50])
def test_a_header_whose_length_begins_as_a_pickle_does_is_read(tmp_path: Path, length: int) -> None:
    assert (
        read_entries(file_of(tmp_path / "f", json.dumps(GOOD).encode().ljust(length))).keys()
        == GOOD.keys()
    )


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (
        lambda path: path.write_bytes(b""),
        r"found a file that cannot be read \(0 bytes, truncated within its header\)",
    ),
    "short": (lambda path: path.write_bytes(b"abc"), r"truncated within its header"),
    "cut off": (
        lambda path: file_of(path, GOOD, bytes(31)),
        r"found a file that cannot be read \(\d+ bytes, but \d+ according to its header\)",
    ),
    "too long": (lambda path: file_of(path, GOOD, bytes(33)), r"according to its header"),
    "a header beyond the file": (
        lambda path: file_of(path, GOOD, length=2**63),
        r"truncated within its header",
    ),
    "a bit of the length's last byte": (
        lambda path: file_of(path, GOOD, length=len(json.dumps(GOOD)) + 2**56),
        r"truncated within its header",
    ),
    "no header": (lambda path: file_of(path, b"", bytes(32)), r"truncated within its header"),
    "no JSON": (lambda path: file_of(path, b"{" * 50), r"its header is not a JSON object"),
    "no UTF-8": (lambda path: file_of(path, b'{"\xff": 1}'), r"its header is not a JSON object"),
    "deep JSON": (lambda path: file_of(path, b"[" * 100_000), r"found a file that cannot be read"),
    "a list": (lambda path: file_of(path, []), r"found a header that is not a JSON object"),
    "a name twice": (
        lambda path: file_of(
            path,
            b'{"a":'
            + json.dumps(GOOD["a"]).encode()
            + b',"a":'
            + json.dumps(GOOD["a"]).encode()
            + b"}",
        ),
        r"it has a name twice",
    ),
    "a path as name": (
        lambda path: file_of(path, {"../../x": GOOD["a"]}, bytes(24)),
        r"found a tensor named '\.\./\.\./x'; allowed: a name that contains no path",
    ),
    "a name of dots": (
        lambda path: file_of(path, {"..": GOOD["a"]}, bytes(24)),
        r"found a tensor named '\.\.'",
    ),
    "no name": (lambda path: file_of(path, {"": GOOD["a"]}, bytes(24)), r"found a tensor named ''"),
    "an unknown dtype": (
        lambda path: file_of(path, changed(dtype="OBJECT")),
        r"found tensor 'b' of dtype 'OBJECT'; allowed: F64, F32",
    ),
    "half a byte a number": (
        lambda path: file_of(path, changed(dtype="F4")),
        r"found quantized weights: f4, as in b; allowed: bf16, fp16 or fp32 weights; fix: dequant",
    ),
    "another size": (
        lambda path: file_of(path, changed(shape=[5])),
        r"found tensor 'b' of 8 bytes; allowed: 10, for shape \[5\] of BF16",
    ),
    "an absurd shape": (
        lambda path: file_of(path, changed(shape=[2**59, 2**59])),
        r"found tensor 'b' of 8 bytes; allowed: \d+, for shape",
    ),
    "a negative shape": (
        lambda path: file_of(path, changed(shape=[-2, -2])),
        r"allowed: integers from 0",
    ),
    "a shape of true": (
        lambda path: file_of(path, changed(shape=[True, 4])),
        r"allowed: integers from 0",
    ),
    "many dimensions": (
        lambda path: file_of(path, changed(shape=[1] * 99 + [4])),
        r"allowed: integers from 0",
    ),
    "an overlap": (
        lambda path: file_of(path, changed(data_offsets=[16, 24])),
        r"found tensor 'b' at byte \d+; allowed: byte \d+, where the tensor before it ends",
    ),
    "a gap": (
        lambda path: file_of(path, changed(data_offsets=[25, 33]), bytes(33)),
        r"where the tensor before it ends",
    ),
    "outside the file": (
        lambda path: file_of(path, changed(data_offsets=[2**40, 2**40 + 8])),
        r"where the tensor before it ends",
    ),
    "offsets backwards": (
        lambda path: file_of(path, changed(data_offsets=[32, 24])),
        r"found tensor 'b' of -8 bytes",
    ),
    "no offsets": (
        lambda path: file_of(path, {"a": {"dtype": "F32", "shape": [0]}}),
        r"with other keys than dtype, shape and data_offsets",
    ),
    "a pipe": (os.mkfifo, r"found a file that cannot be read \(not a regular file\)"),
    "a folder": (lambda path: path.mkdir(), r"found a file that cannot be read"),
}


@pytest.mark.parametrize("bad", BAD)
def test_invalid_safetensors_files_are_refused(tmp_path: Path, bad: str) -> None:
    make, message = BAD[bad]
    make(tmp_path / "f")
    with pytest.raises(MalformedFile, match=message) as error:
        read_entries(tmp_path / "f")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000


def test_a_header_of_more_than_100_mb_is_refused_unread(tmp_path: Path) -> None:
    """A header of more than 100 MB is refused without reading it.

    The file is sparse, so it takes no space on disk.
    """
    with (tmp_path / "f").open("wb") as file:
        file.write((LARGEST_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(LARGEST_HEADER_BYTES + 100)
    with pytest.raises(
        MalformedFile, match=r"found a header of 100000001 bytes; allowed: at most 100000000"
    ):
        read_entries(tmp_path / "f")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_is_never_opened(tmp_path: Path, zipped: bool) -> None:
    victim = Runs(str(tmp_path / "it ran"))
    if zipped:
        torch.save(victim, tmp_path / "f")
    else:
        buffer = io.BytesIO()
        pickle.dump(victim, buffer)
        (tmp_path / "f").write_bytes(buffer.getvalue() + bytes(1000))
    with pytest.raises(
        MalformedFile, match="found a pickle, which is never opened: it may run any program"
    ):
        read_entries(tmp_path / "f")
    assert not (tmp_path / "it ran").exists()


def test_a_file_with_other_tensors_is_refused_before_any_is_read(tmp_path: Path) -> None:
    write_tensors(
        tmp_path / "f", {"x": TensorSource.of(torch.ones(4)), "y": TensorSource.of(torch.ones(2))}
    )
    for tensors in (
        {"x": torch.zeros(4)},
        {"x": torch.zeros(4), "y": torch.zeros(3)},
        {"y": torch.zeros(2), "x": torch.zeros(4)},
    ):
        with pytest.raises(MalformedFile, match="fix: use a checkpoint of this run"):
            read_tensors(tmp_path / "f", tensors)
        assert not any(tensor.any() for tensor in tensors.values())


# ---- fuzzing: anything but a MalformedFile is a failure ----

TEXT = st.text("ab./\\\0é\ud800", max_size=4)
SCALAR = (
    st.sampled_from([None, True, -1, 0, 3, 2**65, -(2**65), 0.5, float("nan"), "F32", "BF16"])
    | TEXT
)
VALUES = (
    SCALAR
    | st.lists(SCALAR, max_size=3)
    | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), SCALAR, max_size=4)
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I16", "U8", "X"]),
        "shape": st.lists(st.integers(-1, 5), max_size=3) | VALUES,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | VALUES,
    }
)
HEADER = (
    st.dictionaries(TEXT | st.sampled_from(["a", "__metadata__"]), ENTRY | VALUES, max_size=4)
    | VALUES
)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Draws random bytes, a random header with data, or a valid file with some bytes changed."""
    kind = draw(st.integers(0, 2))
    if kind == 0:
        return draw(st.binary(max_size=300))
    if kind == 1:
        text = json.dumps(draw(HEADER)).encode()
        return (
            (len(text) + draw(st.sampled_from([0, 0, 0, 1, -1, 2**40]))).to_bytes(
                8, "little", signed=True
            )
            + text
            + draw(st.binary(max_size=60))
        )
    text = json.dumps(GOOD).encode()
    data = bytearray(len(text).to_bytes(8, "little") + text + bytes(32))
    for at, value in draw(
        st.lists(
            st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255)), min_size=1, max_size=4
        )
    ):
        data[at] = value
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


def read_anything(folder: Path, data: bytes) -> None:
    path = folder / "fuzzed"
    path.write_bytes(data)
    try:
        entries = read_entries(path)
    except MalformedFile:
        return
    assert sum(entry.bytes for entry in entries.values()) <= len(data)
    tensors = {name: torch.zeros(entry.shape, dtype=entry.dtype) for name, entry in entries.items()}
    assert read_tensors(path, tensors) == checksum_of(path)


@hypothesis.settings(max_examples=300, database=None)
@hypothesis.given(data=files())
def test_any_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    read_anything(tmp_path_factory.getbasetemp(), data)


@pytest.mark.nightly
@hypothesis.settings(max_examples=5000, database=None)
@hypothesis.given(data=files())
def test_any_file_is_read_or_refused_nightly(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    read_anything(tmp_path_factory.getbasetemp(), data)
