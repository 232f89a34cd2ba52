"""Makes training data from the text of a Python installation: its sources and documentation.

`prepare` writes a folder with

* `training.jsonl` and `held_out.jsonl`: one object `{"text": ...}` for each file
* `tokenizer.json` and `tokenizer_config.json`: byte-level BPE, trained on the training text
* `config.json`: the model
* `text.json`: a summary of the text, with checksums

Files are taken in the order of the SHA-256 of their names, so every package has its share with any
size limit. If several files have the same text, only the first one is taken.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import site
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import convert, read_json, write_bytes, write_json

SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh")
"""Name endings of the files that are read."""
LEAST_BYTES, MOST_BYTES = 200, 2**20
"""Least and largest size of a file that is read. Larger files are mostly tables."""
HELD_OUT = 64
"""One file in this many is held out."""
TOKENIZER_CHARACTERS = 2**23
"""Characters of training text that the tokenizer is trained on."""
END = "<|endoftext|>"
"""The token at the end of a file."""
TRAINING, HELD_OUT_FILE, SUMMARY = "training.jsonl", "held_out.jsonl", "text.json"


class TextPart(msgspec.Struct, frozen=True, kw_only=True):
    """The training text or the held-out text."""

    files: int
    """Number of files."""
    bytes: int
    """Bytes of their texts in UTF-8."""
    sha256: str
    """SHA-256 of all texts in their order."""


class TextSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of the text, as stored in `text.json`."""

    globs: tuple[str, ...]
    """Patterns of the names of files."""
    packages: int
    """Number of packages that the text comes from: top-level folders and files of the roots."""
    duplicates: int
    """Number of files that were left out because another file has the same text."""
    training: TextPart
    """The training text."""
    held_out: TextPart
    """The held-out text."""
    vocabulary: int
    """Number of tokens of the tokenizer."""
    tokenizer_sha256: str
    """SHA-256 of `tokenizer.json`."""


def roots() -> list[Path]:
    """Returns the folders of the standard library and of the installed packages."""
    paths = sysconfig.get_paths()
    found = [paths["stdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages()]
    # This environment may also see the packages of another one, which has torch.
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        found.append(str(Path(torch.origin).parents[1]))
    return sorted({Path(path).resolve() for path in found if Path(path).is_dir()})


def prepare(
    folder: Path, text_roots: Sequence[Path], most_bytes: int, config: dict[str, object]
) -> TextSummary:
    """Makes the data in `folder` if it does not exist, and returns its summary.

    Args:
        folder: folder for the data, whose files the module's docstring describes.
        text_roots: folders whose files are read.
        most_bytes: bytes of text after which no further file is read.
        config: the model's `config.json`; its `vocab_size` is the maximal size of the vocabulary.

    Raises UserError if there are fewer than two files.
    """
    if (folder / SUMMARY).is_file():
        return convert(read_json(folder / SUMMARY), TextSummary, str(folder / SUMMARY))
    folder.mkdir(parents=True, exist_ok=True)
    texts, packages, duplicates = _texts(text_roots, most_bytes)
    if len(texts) < 2:
        raise UserError(
            f"text in {', '.join(map(str, text_roots))}",
            found=f"{len(texts)} files",
            allowed=f"at least two with one of the endings {', '.join(SUFFIXES)}",
            fix="name a folder with more text by --text",
        )
    held = -(-len(texts) // HELD_OUT)
    parts = {HELD_OUT_FILE: texts[:held], TRAINING: texts[held:]}
    for name, part in parts.items():
        write_bytes(folder / name, b"".join(msgspec.json.encode({"text": t}) + b"\n" for t in part))
    vocabulary = config["vocab_size"]
    assert isinstance(vocabulary, int), "a config has the size of its vocabulary"
    trained = _train_tokenizer(parts[TRAINING], vocabulary)
    write_bytes(folder / "tokenizer.json", trained)
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END},
    )
    write_json(folder / "config.json", config)
    summary = TextSummary(
        globs=tuple(f"*{suffix}" for suffix in SUFFIXES),
        packages=packages,
        duplicates=duplicates,
        training=_part(parts[TRAINING]),
        held_out=_part(parts[HELD_OUT_FILE]),
        vocabulary=len(json.loads(trained)["model"]["vocab"]),
        tokenizer_sha256=hashlib.sha256(trained).hexdigest(),
    )
    write_json(folder / SUMMARY, summary)
    return summary


def _files(text_roots: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Yields each file as (path relative to its root, path), in the order of the roots."""
    seen: set[str] = set()
    for root in text_roots:
        for place, folders, names in os.walk(root):
            if place in seen:
                folders.clear()  # one root may lie within another
                continue
            seen.add(place)
            for name in names:
                if name.endswith(SUFFIXES):
                    path = Path(place, name)
                    yield str(path.relative_to(root)), path


def _texts(text_roots: Sequence[Path], most_bytes: int) -> tuple[list[str], int, int]:
    """Returns the texts, the number of their packages, and the number of duplicates."""
    # Inner roots come first. So a file's name does not depend on a root that contains its root.
    inner_first = sorted(text_roots, key=lambda root: (-len(root.parts), str(root)))
    ordered = sorted(
        (hashlib.sha256(name.encode(errors="replace")).digest(), name, path)
        for name, path in _files(inner_first)
    )
    texts: list[str] = []
    contents, packages, total, duplicates = set[bytes](), set[str](), 0, 0
    for _, name, path in ordered:
        try:
            data = path.read_bytes() if LEAST_BYTES <= path.stat().st_size <= MOST_BYTES else b""
            text = data.decode()
        except (OSError, UnicodeDecodeError):
            continue
        if not text.strip():
            continue
        digest = hashlib.sha256(data).digest()
        if digest in contents:
            duplicates += 1
            continue
        contents.add(digest)
        packages.add(Path(name).parts[0])
        texts.append(text)
        total += len(data)
        if total >= most_bytes:
            break
    return texts, len(packages), duplicates


def _train_tokenizer(texts: Sequence[str], vocabulary: int) -> bytes:
    """Returns `tokenizer.json` of a byte-level BPE with at most `vocabulary` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts, TOKENIZER_CHARACTERS), trainer)
    content: str = tokenizer.to_str()
    return content.encode()


def _first(texts: Sequence[str], most: int) -> Iterator[str]:
    """Yields texts until they have at least `most` characters in total."""
    total = 0
    for text in texts:
        yield text
        total += len(text)
        if total >= most:
            return


def _part(texts: Sequence[str]) -> TextPart:
    digest, total = hashlib.sha256(), 0
    for text in texts:
        data = text.encode()
        digest.update(data)
        total += len(data)
    return TextPart(files=len(texts), bytes=total, sha256=digest.hexdigest())
