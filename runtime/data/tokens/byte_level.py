"""Reads plain text as bytes, for a model without a tokenizer.

Token ids 0 to 255 are bytes, and 256 ends a document. A UTF-8 byte order mark at the beginning of a
file is left out. This is meant for experiments: at most 64 MiB are read, and they are kept in
memory.
"""

from __future__ import annotations

import codecs
import zlib

import numpy as np

from megatrain.runtime.data.documents import Documents
from megatrain.runtime.data.rows.sources import DataSource
from megatrain.runtime.data.rows.streams import opened
from megatrain.simulator.base.errors import UserError

END_OF_DOCUMENT = 256
"""The token id that ends a document."""
VOCABULARY = 257
"""The number of token ids."""
MOST_BYTES = 2**26
"""The maximum number of bytes that are read."""


def byte_documents(source: DataSource, vocabulary: int) -> tuple[Documents, bool]:
    """Returns one document per file, up to `MOST_BYTES` bytes in total, and whether they have all
    of the text.

    Raises UserError if a file cannot be read, or if `vocabulary` is smaller than `VOCABULARY`.
    """
    if vocabulary < VOCABULARY:
        raise UserError(
            "model: vocabulary",
            found=vocabulary,
            allowed=f">= {VOCABULARY} for byte-level text",
            fix="use a model with a larger vocabulary",
        )
    pieces, lengths, total, whole = [], [], 0, True
    for file in source.files:
        try:
            with opened(file) as stream:
                text = stream.read(MOST_BYTES - total).removeprefix(codecs.BOM_UTF8)
                document = np.frombuffer(text, dtype=np.uint8)
                whole = not stream.read(1)
        except OSError as error:
            raise UserError(
                f"data {error.filename or file}",
                found=(error.strerror or str(error)).lower(),
                allowed="a readable text file",
                fix="check the path and its permissions",
            ) from None
        pieces += [document.astype(np.uint16), np.array([END_OF_DOCUMENT], dtype=np.uint16)]
        lengths.append(len(document) + 1)
        total += len(document)
        if total >= MOST_BYTES:
            whole = whole and file == source.files[-1]
            break
    ends = np.cumsum(lengths)
    tokens = np.concatenate(pieces)
    documents = Documents(
        tokens=tokens,
        begins=ends - lengths,
        ends=ends,
        digest=f"{zlib.crc32(tokens.tobytes()):08x}-{len(tokens)}",
    )
    return documents, whole


class ByteTokenizer:
    """Converts text to the ids of its bytes, and back. It is used if a model has no tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Returns the bytes of `text`."""
        return list(text.encode())

    def decode(self, ids: list[int], **_: object) -> str:
        """Returns the text of `ids`. Ids that are not bytes are left out."""
        return bytes(value for value in ids if value < END_OF_DOCUMENT).decode(errors="replace")
