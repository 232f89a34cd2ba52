"""The header of a safetensors file, written and read with every check: a file comes from anywhere, and nothing of it is believed.

A file is 8 bytes, the header's length as a little-endian integer; the header, JSON, `{name: {"dtype", "shape", "data_offsets"}}`; the data.
Format: https://github.com/huggingface/safetensors#format. Nothing here unpickles: a pickle is refused by what it begins with.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatrain.simulator.errors import UserError

LARGEST_HEADER_BYTES = 100_000_000
"""the format's own limit"""
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
    "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_NAME = re.compile(r"[^/\\\x00-\x1f]{1,1000}")
_MOST_DIMENSIONS = 16
_METADATA = "__metadata__"


class MalformedFile(UserError):
    """A file whose bytes are not what they should be: cut off, altered, or something else altogether."""


class Entry(NamedTuple):
    """One tensor of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """first byte, from the beginning of the file"""
    bytes: int


def make_header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    """The first bytes of a file of tensors of these dtypes and shapes, whose bytes follow in this order. Padded to 8 bytes."""
    entries, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps({_METADATA: {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_entries(path: Path) -> dict[str, Entry]:
    """The tensors of the file at `path`, in the order of their bytes.

    Raises MalformedFile for anything but a whole safetensors file: a pickle, a header of more than 100 MB, bytes missing or left over, tensors that
    overlap or leave gaps, an unknown dtype, a shape that does not match its bytes, a name twice or with a path in it.
    """
    try:
        with open(path, "rb", opener=_regular) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(9)
            length = int.from_bytes(start[:8], "little")
            if start[8:] not in (b"{", b"") and (start[:4] == b"PK\x03\x04" or (start[:1] == b"\x80" and start[1] in range(2, 6))):
                raise _malformed(path, "a pickle, which is never opened: it may run any program")  # torch.save's zip, or pickle protocol 2 to 5
            if len(start) < 9 or not 2 <= length <= size - 8:
                raise _malformed(path, f"a file that cannot be read ({size} bytes, cut off within its header)")
            if length > LARGEST_HEADER_BYTES:
                raise _malformed(path, f"a header of {length} bytes", f"at most {LARGEST_HEADER_BYTES}")
            text = start[8:] + file.read(length - 1)
        header = json.loads(text, object_pairs_hook=_no_name_twice)
    except OSError as error:
        raise _malformed(path, f"a file that cannot be read ({(error.strerror or str(error)).lower()})") from None
    except (ValueError, RecursionError) as error:
        raise _malformed(path, f"a file that cannot be read (its header is no JSON object of tensors: {error})") from None
    if not isinstance(header, dict):
        raise _malformed(path, "a header that is no JSON object")
    header.pop(_METADATA, None)
    entries = {name: _entry(path, name, value, 8 + length) for name, value in header.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].bytes)))
    end = 8 + length
    for name, entry in ordered.items():
        if entry.start != end:
            raise _malformed(path, f"tensor {name[:80]!r} at byte {entry.start}", f"byte {end}, where the one before it ends")
        end += entry.bytes
    if end != size:
        raise _malformed(path, f"a file that cannot be read ({size} bytes, its header tells of {end})")
    return ordered


def _regular(path: str, flags: int) -> int:
    """Opens without waiting: a named pipe would block. Raises OSError for what is no regular file."""
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "no regular file")
    return handle


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name stands there twice")
    return made


def _entry(path: Path, name: str, value: object, data: int) -> Entry:
    shown = repr(name[:80])
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise _malformed(path, f"a tensor named {shown}", "a name without a path in it")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise _malformed(path, f"tensor {shown} without dtype, shape and data_offsets, or with more")
    dtype, shape, offsets = DTYPES.get(str(value["dtype"])), value["shape"], value["data_offsets"]
    if dtype is None:
        raise _malformed(path, f"tensor {shown} of dtype {str(value['dtype'])[:20]!r}", ", ".join(DTYPES))
    if not (_whole_numbers(shape) and _whole_numbers(offsets) and len(offsets) == 2 and len(shape) <= _MOST_DIMENSIONS):
        raise _malformed(path, f"tensor {shown} of shape {str(shape)[:80]} at {str(offsets)[:80]}", "whole numbers from 0 on")
    first, end = offsets
    if end - first != math.prod(shape) * dtype.itemsize:
        raise _malformed(path, f"tensor {shown} of {end - first} bytes", f"{math.prod(shape) * dtype.itemsize}, for shape {shape} of {value['dtype']}")
    return Entry(dtype, tuple(shape), data + first, end - first)


def _whole_numbers(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**60 for value in values)


def _malformed(path: Path, found: str, allowed: str = "a whole safetensors file") -> MalformedFile:
    return MalformedFile(str(path), found=found, allowed=allowed, fix="fetch or write the file again")
