"""Writes and reads the headers of safetensors files. Reading checks every field, because a file may
come from an untrusted source.

A file has three parts (https://github.com/huggingface/safetensors#format):

* 8 bytes: the length of the header, a little-endian integer;
* the header: JSON, `{name: {"dtype", "shape", "data_offsets"}}`;
* the data.

Pickles are never loaded. A pickle is recognised by its first bytes and refused.
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

from megatrain.runtime.files import quantized
from megatrain.runtime.files.malformed_file import MalformedFile

LARGEST_HEADER_BYTES = 100_000_000
"""Maximum size of a header in the safetensors format."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""PyTorch's dtype for each dtype code of the format."""
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_NAME = re.compile(r"[^/\\\x00-\x1f]{1,1000}")
_MOST_DIMENSIONS = 16
_METADATA = "__metadata__"


class TensorEntry(NamedTuple):
    """Dtype, shape and position of a tensor in a file."""

    dtype: torch.dtype
    """Dtype of the tensor."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    start: int
    """Offset of the first byte from the beginning of the file."""
    bytes: int
    """Size of the tensor in bytes."""


def make_header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    """Returns the start of a file with these tensors, given by dtype and shape: the length of the
    header, and the header padded to a multiple of 8 bytes. The data of the tensors must follow in
    the same order.
    """
    entries, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": _CODES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps({_METADATA: {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_entries(path: Path) -> dict[str, TensorEntry]:
    """Returns the tensors of the file at `path`, in the order of their data.

    Raises MalformedFile if the file is not a complete safetensors file. This includes pickles,
    headers of more than 100 MB, missing or additional bytes, tensors that overlap or leave gaps,
    unknown dtypes, shapes that do not match the size, repeated names, and names that contain a
    path.
    """
    try:
        with open(path, "rb", opener=_open_regular) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(9)
            length = int.from_bytes(start[:8], "little")
            if start[8:] not in (b"{", b"") and (
                start[:4] == b"PK\x03\x04" or (start[:1] == b"\x80" and start[1] in range(2, 6))
            ):
                # These are the first bytes of torch.save's zip, or of pickle protocol 2 to 5.
                raise _malformed(path, "a pickle, which is never opened: it may run any program")
            if len(start) < 9 or not 2 <= length <= size - 8:
                raise _malformed(
                    path, f"a file that cannot be read ({size} bytes, truncated within its header)"
                )
            if length > LARGEST_HEADER_BYTES:
                raise _malformed(
                    path, f"a header of {length} bytes", f"at most {LARGEST_HEADER_BYTES}"
                )
            text = start[8:] + file.read(length - 1)
        header = json.loads(text, object_pairs_hook=_refuse_repeated_names)
    except OSError as error:
        raise _malformed(
            path, f"a file that cannot be read ({(error.strerror or str(error)).lower()})"
        ) from None
    except (ValueError, RecursionError) as error:
        raise _malformed(
            path,
            f"a file that cannot be read (its header is not a JSON object of tensors: {error})",
        ) from None
    if not isinstance(header, dict):
        raise _malformed(path, "a header that is not a JSON object")
    header.pop(_METADATA, None)
    entries = {name: _entry(path, name, value, 8 + length) for name, value in header.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].bytes)))
    end = 8 + length
    for name, entry in ordered.items():
        if entry.start != end:
            raise _malformed(
                path,
                f"tensor {name[:80]!r} at byte {entry.start}",
                f"byte {end}, where the tensor before it ends",
            )
        end += entry.bytes
    if end != size:
        raise _malformed(
            path, f"a file that cannot be read ({size} bytes, but {end} according to its header)"
        )
    return ordered


def _open_regular(path: str, flags: int) -> int:
    """Opens a file without blocking, because a named pipe could block. Raises OSError if it is not
    a regular file.
    """
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError("not a regular file")
    return handle


def _refuse_repeated_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a dict of `pairs`. Raises ValueError if a name occurs twice."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("it has a name twice")
    return unique


def _entry(path: Path, name: str, value: object, data: int) -> TensorEntry:
    """Checks and returns the entry `value` of the header. `data` is the offset of the data."""
    shown = repr(name[:80])
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise _malformed(path, f"a tensor named {shown}", "a name that contains no path")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise _malformed(path, f"tensor {shown} with other keys than dtype, shape and data_offsets")
    dtype, shape, offsets = DTYPES.get(str(value["dtype"])), value["shape"], value["data_offsets"]
    if value["dtype"] in quantized.PACKED:
        found = f"quantized weights: {value['dtype'].lower()}, as in {name[:80]}"
        raise MalformedFile(str(path), found=found, allowed=quantized.ALLOWED, fix=quantized.FIX)
    if dtype is None:
        raise _malformed(
            path, f"tensor {shown} of dtype {str(value['dtype'])[:20]!r}", ", ".join(DTYPES)
        )
    if not (
        _are_integers(shape)
        and _are_integers(offsets)
        and len(offsets) == 2
        and len(shape) <= _MOST_DIMENSIONS
    ):
        raise _malformed(
            path,
            f"tensor {shown} of shape {str(shape)[:80]} at {str(offsets)[:80]}",
            "integers from 0",
        )
    first, end = offsets
    if end - first != math.prod(shape) * dtype.itemsize:
        raise _malformed(
            path,
            f"tensor {shown} of {end - first} bytes",
            f"{math.prod(shape) * dtype.itemsize}, for shape {shape} of {value['dtype']}",
        )
    return TensorEntry(dtype, tuple(shape), data + first, end - first)


def _are_integers(values: object) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 2**60 for value in values
    )


def _malformed(path: Path, found: str, allowed: str = "a whole safetensors file") -> MalformedFile:
    return MalformedFile(
        str(path), found=found, allowed=allowed, fix="fetch or write the file again"
    )
