"""Finds the files to read at a path.

The path is one file, a folder of files, a folder that `datasets.save_to_disk` wrote, or the name of
a data set on the hub (`hub.py`). The split of a file follows from its name, as in
`datasets.load_dataset(folder)`: the name of the file or of a folder has a word such as `train`,
`test` or `dev` between separators. If no name has such a word, all files are `train`.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from megatrain.runtime.data.options import DataOptions
from megatrain.runtime.data.rows.hub import HubData, fetch, list_files, parse_name, with_commit
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import read_json
from megatrain.simulator.base.names import is_path, suggestion
from megatrain.simulator.base.units import counted

Kind = Literal["jsonl", "json", "csv", "parquet", "arrow", "text"]
"""A file format."""
TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst")
"""Endings of the names of plain text files."""
SUFFIXES: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    **dict.fromkeys(TEXT_SUFFIXES, "text"),
}
"""Ending of a file name -> the format of the file."""
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
"""Ending of a file name -> pyarrow's name of the codec."""
_NEVER_COMPRESSED = ("parquet", "arrow")  # these formats compress their own columns
EVALUATION_SPLITS = ("validation", "test", "train")
"""Splits for evaluation, the preferred first, unless the options name one."""
_WEIGHT = re.compile(r"(.+):(-?\d+\.?\d*|-?\.\d+)", re.DOTALL)
_LARGEST_WEIGHT = 1000
_MOST_ENDINGS = 8
"""The maximum number of endings of unread files that a note names."""
_METADATA = frozenset(
    (
        "dataset_info.json",
        "dataset_infos.json",
        "dataset_dict.json",
        "state.json",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "vocab.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.json",
        "processor_config.json",
        "preprocessor_config.json",
        "model.safetensors.index.json",
    )
)
"""Files that describe a data set or belong to a model. No rows are read from them."""
_KEYWORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_WORD = re.compile(rf"(?<![^-._ 0-9])(?:{'|'.join(_KEYWORDS)})(?![^-._ 0-9])", re.IGNORECASE)
_SHARD = re.compile(r"data/([^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]*")


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Files of one kind, in the order in which they are read."""

    path: Path
    """The path that was searched, or the folder of a split in it."""
    kind: Kind
    """Format of the files."""
    files: tuple[Path, ...]
    """The files to read."""
    split: str = ""
    """The split of the files, if there are several splits."""
    left_out: str = ""
    """The files in the folder that are not read, as a phrase for the user."""
    kinds: int = 1
    """Number of kinds of data files in the folder."""


def kind_of(name: str) -> Kind | None:
    """Returns the kind of a file from the ending of its name, or None if it is not a data file.

    Case and the ending of a compression are ignored.
    """
    stem, suffix = os.path.splitext(name.lower())
    if suffix not in COMPRESSIONS:
        return SUFFIXES.get(suffix)
    kind = SUFFIXES.get(os.path.splitext(stem)[1])
    return None if kind in _NEVER_COMPRESSED else kind


def suffix_of(file: Path) -> str:
    """Returns the ending of a file's name in lower case, without the ending of a compression."""
    stem, suffix = os.path.splitext(file.name.lower())
    return os.path.splitext(stem)[1] if suffix in COMPRESSIONS else suffix


class WeightedPath(NamedTuple):
    """The path of a source, and its weight."""

    path: Path
    """A file, a folder, or the name of a data set on the hub."""
    weight: float
    """The number of times that an epoch has each document of the source. The default is 1."""


def weighted_path(text: str) -> WeightedPath:
    """Returns the path and the weight in `text`, which is `PATH` or `PATH:WEIGHT`.

    If a file or folder exists whose whole name is `text`, it is the path. Raises UserError for a
    weight that is out of range.
    """
    match = None if os.path.exists(text) else _WEIGHT.fullmatch(text)
    if not match:
        return WeightedPath(Path(text), 1.0)
    if not 0 < (weight := float(match[2])) <= _LARGEST_WEIGHT:
        raise UserError(
            f"data {match[1]}: weight",
            found=match[2],
            allowed=f"a number above 0, up to {_LARGEST_WEIGHT}",
            fix="write it like rows.jsonl:0.5, or leave the source out",
        )
    return WeightedPath(Path(match[1]), weight)


def sources_of(options: DataOptions) -> tuple[list[DataSource], list[DataSource] | None]:
    """Returns the training sources, and the evaluation sources or None if `options` name no file or
    split for evaluation.

    Raises UserError as `sources_at` does.
    """
    sources = sources_at(options.paths, (options.split,))
    if not (options.evaluation_data or options.evaluation_split):
        return sources, None
    splits = (options.evaluation_split,) if options.evaluation_split else EVALUATION_SPLITS
    if options.evaluation_data:
        return sources, [_source(Path(options.evaluation_data), splits)]
    return sources, sources_at(options.paths, splits, named=False)


def sources_at(
    paths: Sequence[str], splits: Sequence[str], *, named: bool = True
) -> list[DataSource]:
    """Returns the source at each of `paths`, which may have weights.

    Data sets on the hub are fetched.

    Args:
        paths: files, folders, or names of data sets on the hub.
        splits: the splits to read, the preferred first.
        named: whether a split in the name of a data set on the hub takes precedence over `splits`.

    Raises UserError as `find` does, if there is no path, and for a file that is in two sources. A
    weight must be used instead, because copies of one document could be both trained on and
    evaluated on.
    """
    if not paths:
        raise UserError(
            "data", found="no path", allowed="a file or a folder", fix="name one with --data"
        )
    sources = [_source(weighted_path(text).path, splits, named=named) for text in paths]
    for source in sources:
        _refuse_empty(source)
    counts = Counter(
        file for source in sources for file in {file.resolve() for file in source.files}
    )
    if repeated := next((file for file, count in counts.items() if count > 1), None):
        raise UserError(
            f"data {repeated}",
            found="a file that is named twice",
            allowed="each file once",
            fix=f"give it a weight: {repeated.name}:{counts[repeated]}",
        )
    return sources


def _refuse_empty(source: DataSource) -> None:
    """Raises UserError if no file of `source` has a byte."""
    if source.files and not any(file.stat().st_size for file in source.files):
        one = len(source.files) == 1
        raise UserError(
            f"data {source.path}",
            found="an empty file" if one else f"{len(source.files)} empty files",
            allowed="files with data",
            fix="check how the file was written" if one else "check how the files were written",
        )


def hub_data(path: str | Path) -> HubData | None:
    """Returns the parts of `path` if it is the name of a data set on the hub, or None if it is a
    file or a folder. `path` has no weight.
    """
    named = parse_name(str(path))
    return None if named is None or is_path(str(path)) or kind_of(named.name) else named


def pinned(options: DataOptions) -> DataOptions:
    """Returns the options with the present commit in each name of a data set on the hub.

    Raises UserError if the hub does not answer.
    """

    def pin(text: str) -> str:
        path = weighted_path(text).path if text else Path()
        data = hub_data(path)
        if not data:
            return text
        # Path normalizes the text, so the weight is not found by the length of the path.
        weight = "" if path == Path(text) else f":{text.rpartition(':')[2]}"
        return f"{with_commit(data)}{weight}"

    data = options.data
    return msgspec.structs.replace(
        options,
        data=pin(data) if isinstance(data, str) else tuple(map(pin, data)),
        evaluation_data=pin(options.evaluation_data),
    )


def _source(path: Path, splits: Sequence[str], *, named: bool = True) -> DataSource:
    """Returns the source at `path`, which may be a data set on the hub."""
    data = hub_data(path)
    if data is None:
        return find(path, splits)
    root, listed = Path(data.name), list_files(data)
    source = _chosen(
        {root / name: size for name, size in listed.sizes.items()},
        root,
        (data.split,) if named and data.split else splits,
        by_split={split: [root / name for name in names] for split, names in listed.splits.items()},
    )
    names = [file.relative_to(root).as_posix() for file in source.files]
    files = tuple(fetch(data, listed.commit, names))
    return replace(source, path=root / (data.config or ""), files=files)


def find(path: Path, splits: Sequence[str] = ("train",)) -> DataSource:
    """Returns the source at `path`, which is a file or a folder.

    If a folder has several splits, the files of the first of `splits` that exists are read. If it
    has several kinds of files, only the kind with the most bytes is read.

    Raises UserError if `path` does not exist, has no readable data, or has none of `splits`.
    """
    allowed = f"a file or folder with {_listed()}"
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            return _file(path, splits)
        if not stat.S_ISDIR(mode):
            raise UserError(
                f"data {path}",
                found="no such file or folder, but a device or a pipe",
                allowed=allowed,
                fix="check the path",
            )
        if (path / "dataset_dict.json").is_file():
            return _dataset_dict(path, splits)
        if (path / "state.json").is_file():
            files, split = _saved_files(path)
            _one_of({"train": (), split: ()}, splits, path)
            return DataSource(path=path, kind="arrow", files=files)
        return _chosen({file: os.stat(file).st_size for file in _walk(path)}, path, splits)
    except (OSError, ValueError) as error:  # ValueError is raised for a name with a zero byte
        found = (
            "no such file or folder"
            if isinstance(error, FileNotFoundError)
            else (getattr(error, "strerror", None) or str(error)).lower()
        )
        raise UserError(
            f"data {getattr(error, 'filename', None) or path}",
            found=found,
            allowed=allowed,
            fix=_files_next_to(path),
        ) from None


def _files_next_to(path: Path) -> str:
    """Returns advice: the option for a split after the name of a folder, a data file next to
    `path` with a similar name or, if there is none, any data file there.
    """
    folder, _, split = str(path).rpartition(":")
    if split and os.path.isdir(folder):  # only names on the hub have splits
        return (
            f"write {folder} and --split {split}, or for evaluation data --evaluation-split {split}"
        )
    try:
        names = sorted(
            str(path.parent / file.name)
            for file in path.absolute().parent.iterdir()
            if kind_of(file.name) not in (None, "text") and file.name not in _METADATA
        )
    except (OSError, ValueError):
        names = []
    default = f"name a data file, such as {names[0]}" if names else "check the path"
    return suggestion(str(path), names, default)


def _listed() -> str:
    """Returns the endings of all data files, as a phrase for the user."""
    return (
        f"{', '.join(f'*{suffix}' for suffix in SUFFIXES)}, all except"
        f" {' and '.join(_NEVER_COMPRESSED)} also with {', '.join(COMPRESSIONS)}"
    )


def _file(path: Path, splits: Sequence[str]) -> DataSource:
    """Returns one file as a source. Raises UserError if it is not a data file."""
    kind = kind_of(path.name)
    if kind is None:
        raise UserError(
            f"data {path}",
            found=f"a file ending in {path.suffix!r}",
            allowed=_listed(),
            fix="convert or rename the file",
        )
    _one_of({"train": ()}, splits, path)
    return DataSource(path=path, kind=kind, files=(path,))


def _one_of(existing: Mapping[str, object], splits: Sequence[str], path: Path) -> str:
    """Returns the first of `splits` that is a key of `existing`. Synonyms such as `dev` also count.

    Raises UserError if there is none.
    """
    for split in splits:
        for name in (split, _KEYWORDS.get(split.lower(), split)):
            if name in existing:
                return name
    raise UserError(
        f"data {path}: split",
        found=repr(splits[0]),
        allowed=", ".join(existing) or "none: the folder names no splits",
        fix="name one of these, or its folder or file",
    )


# ---- folders of files ----


def _chosen(
    sizes: Mapping[Path, int],
    path: Path,
    splits: Sequence[str],
    *,
    by_split: Mapping[str, list[Path]] | None = None,
) -> DataSource:
    """Returns the files of one split and one kind as a source.

    Args:
        sizes: all files of the folder `path`, and their bytes.
        path: the folder.
        splits: the splits to read, the preferred first.
        by_split: the files of each split. If it is None or empty, the splits follow from the names
            of the files.
    """
    data: dict[Kind, list[Path]] = {}
    others: list[Path] = []
    for file in sizes:
        kind = None if file.name in _METADATA else kind_of(file.name)
        if kind is None:
            others.append(file)
        else:
            data.setdefault(kind, []).append(file)
    if not data:
        contents = (
            f"a folder without data, only {_named(others, path)}"
            if others
            else "a folder without data"
        )
        allowed = f"a file or folder with {_listed()}"
        raise UserError(f"data {path}", found=contents, allowed=allowed, fix=_files_next_to(path))
    kind_bytes = {kind: sum(sizes[file] for file in files) for kind, files in data.items()}
    chosen = max(sorted(kind_bytes), key=lambda kind: kind_bytes[kind])
    readable = set(data[chosen])
    split_files = {
        split: [file for file in files if file in readable]
        for split, files in (by_split or _by_split(data[chosen], path)).items()
    }
    split = _one_of(split_files, splits, path)
    files = tuple(sorted(split_files.pop(split)))
    unread = readable.difference(files, *split_files.values())
    left_out = [
        *(f"split {name} ({counted(len(rest), 'file')})" for name, rest in split_files.items()),
        *([_named(unread, path)] if unread else []),
        *(
            f"{_named(data[kind], path)} ({kind_bytes[kind]:,} bytes)"
            for kind in sorted(kind_bytes)
            if kind != chosen
        ),
        *([_named(others, path)] if others else []),
    ]
    return DataSource(
        path=path,
        kind=chosen,
        files=files,
        split=split if split_files else "",
        left_out=", ".join(left_out),
        kinds=len(data),
    )


def _walk(path: Path) -> Iterable[Path]:
    """Yields every file below `path`, except hidden ones."""

    def refuse(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(path, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (
            Path(folder, name)
            for name in sorted(names)
            if not name.startswith(".") and Path(folder, name).is_file()
        )


def _by_split(files: Sequence[Path], path: Path) -> dict[str, list[Path]]:
    """Returns the files of each split.

    Files without a split in their name are `train` if no file has this split in its name. Otherwise
    they are in no split.
    """
    by_split: dict[str, list[Path]] = {}
    unnamed: list[Path] = []
    for file in files:
        names = _splits_of(file.relative_to(path))
        for name in names:
            by_split.setdefault(name, []).append(file)
        if not names:
            unnamed.append(file)
    if unnamed and not any("train" in _words(name) for name in by_split):
        by_split["train"] = unnamed
    known = ("train", "validation", "test")
    return {
        name: by_split[name]
        for name in sorted(
            by_split, key=lambda name: (known.index(name) if name in known else len(known), name)
        )
    }


def _splits_of(file: Path) -> set[str]:
    """Returns the splits in the names of a file's folders or, if there are none, in its own name.

    The names of source files are not used: `test_parser.py` is not test data.
    """
    if suffix_of(file) in TEXT_SUFFIXES and suffix_of(file) != ".txt":
        return set()
    if (shard := _SHARD.fullmatch(file.as_posix())) and _words(shard[1]):
        return {_KEYWORDS.get(shard[1], shard[1])}
    return set().union(*map(_words, file.parent.parts)) or _words(file.name)


def _words(name: str) -> set[str]:
    """Returns the splits for which `name` has a word."""
    return {_KEYWORDS[word.lower()] for word in _WORD.findall(name)}


def _named(files: Iterable[Path], path: Path) -> str:
    """Returns a phrase that describes `files` by the endings of their names.

    For each ending it has the number of files, or the name of the only file. If there are many
    endings, only those with the most files are named.
    """
    by_ending: dict[str, list[Path]] = {}
    for file in files:
        by_ending.setdefault(_ending(file), []).append(file)
    endings = sorted(by_ending, key=lambda ending: (-len(by_ending[ending]), ending))
    named, rest = sorted(endings[:_MOST_ENDINGS]), endings[_MOST_ENDINGS:]
    phrases = [
        str(group[0].relative_to(path))
        if len(group := by_ending[ending]) == 1
        else f"{len(group):,} {f'*{ending}' if ending else 'without ending'}"
        for ending in named
    ]
    if rest:
        phrases.append(counted(sum(len(by_ending[ending]) for ending in rest), "other file"))
    return ", ".join(phrases)


def _ending(file: Path) -> str:
    """Returns the ending of a file's name in its own case, with the ending of a compression."""
    return "".join(file.suffixes[-2:]) if file.suffix.lower() in COMPRESSIONS else file.suffix


# ---- folders that datasets.save_to_disk wrote ----


def _dataset_dict(path: Path, splits: Sequence[str]) -> DataSource:
    """Returns one split of a folder that `DatasetDict.save_to_disk` wrote."""
    content = read_json(path / "dataset_dict.json")
    names = content.get("splits") if isinstance(content, dict) else None
    known = {name: () for name in names if isinstance(name, str)} if isinstance(names, list) else {}
    split = _one_of(known, splits, path)
    others = ", ".join(f"split {name}" for name in known if name != split)
    return DataSource(
        path=path / split,
        kind="arrow",
        files=_saved_files(path / split)[0],
        split=split if others else "",
        left_out=others,
    )


def _saved_files(path: Path) -> tuple[tuple[Path, ...], str]:
    """Returns the files that `state.json` of `datasets.save_to_disk` lists, and their split."""
    state = read_json(path / "state.json")
    listed = state.get("_data_files") if isinstance(state, dict) else None
    entries = (
        [entry.get("filename") if isinstance(entry, dict) else None for entry in listed]
        if isinstance(listed, list)
        else []
    )
    names = [name for name in entries if isinstance(name, str)]
    if not names or len(names) < len(entries) or state.get("_indices_data_files"):
        raise UserError(
            f"data {path / 'state.json'}",
            found="no list `_data_files` of file names, or indices into them",
            allowed="what datasets.save_to_disk writes",
            fix="save the dataset again, after flatten_indices()",
        )
    files = tuple(path / name for name in names)
    for file in files:
        if not file.is_file():
            raise UserError(
                f"data {file}",
                found="no such file, though state.json names it",
                allowed="every file of the dataset",
                fix="copy the whole folder",
            )
    return files, str(state.get("_split") or "train")
