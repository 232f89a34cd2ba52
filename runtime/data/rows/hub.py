"""Data sets on the hub, by name: `org/name`, `org/name/config`, `org/name@revision:split`.

The names and sizes of a data set's files are fetched from the hub once for each commit, and kept in
the user's cache folder. The files themselves are in the cache of huggingface_hub. A data set whose
revision is a commit can therefore be read again without a network.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from megatrain.runtime.files.hub_errors import hub_errors
from megatrain.runtime.user_cache import user_cache
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import write_json

_PART = r"[A-Za-z0-9][\w.-]{0,95}"
_NAME = re.compile(
    rf"(?P<name>{_PART}/{_PART})(/(?P<config>{_PART}))?"
    rf"(@(?P<revision>[A-Za-z0-9][\w./-]{{0,127}}))?(:(?P<split>[A-Za-z][\w.-]*))?"
)
_COMMIT = re.compile("[0-9a-f]{40}")
_NEWEST = "main"
_NO_DATA = (".gitattributes", "README.md")
"""Files without rows. README.md is the data set's card."""


class HubData(NamedTuple):
    """The name of a data set on the hub."""

    name: str
    """`org/name`."""
    config: str | None
    """The config, which is a part of the data set, or None for the default."""
    revision: str | None
    """A branch, a tag or a commit, or None for the newest commit."""
    split: str | None
    """The split, or None if the name has none."""

    def __str__(self) -> str:
        parts = (("/", self.config), ("@", self.revision), (":", self.split))
        return self.name + "".join(f"{mark}{part}" for mark, part in parts if part)


class HubFiles(NamedTuple):
    """The files of a data set, or of one of its configs."""

    sizes: dict[str, int]
    """Path of a file in the data set -> its size in bytes."""
    splits: dict[str, list[str]]
    """Split -> its files. Empty if the data set's card does not name them."""
    commit: str
    """The commit that has the files."""


class _Listing(msgspec.Struct, frozen=True):
    """The hub's information on one commit of a data set."""

    commit: str
    """The commit."""
    sizes: dict[str, int]
    """Path of a file -> its size in bytes."""
    configs: list[dict[str, Any]]
    """The entries `configs` of the data set's card."""


def parse_name(text: str) -> HubData | None:
    """Returns the parts of the name `text`, or None if no data set can have this name."""
    match = _NAME.fullmatch(text)
    return HubData(**match.groupdict()) if match else None


def with_commit(data: HubData) -> HubData:
    """Returns the name with its revision replaced by the commit that this revision is now.

    Raises UserError if the hub does not answer.
    """
    if data.revision and _COMMIT.fullmatch(data.revision):
        return data
    return data._replace(revision=_listing(data).commit)


def list_files(data: HubData) -> HubFiles:
    """Returns the files of a data set, without fetching them.

    The data set's card says which files belong to its configs and splits. Without a card, a config
    is a folder.

    Raises UserError if the hub does not answer, if the config does not exist, or if no config is
    named and there are several without a default.
    """
    listing = _listing(data)
    if not listing.configs:
        return HubFiles(_in_folder(data, listing, data.config), {}, listing.commit)
    config = _config(data, listing.configs)
    sizes = _in_folder(data, listing, config.get("data_dir"))
    patterns = config.get("data_files")
    if not patterns:
        return HubFiles(sizes, {}, listing.commit)
    entries = patterns if isinstance(patterns, list) else [patterns]
    splits: dict[str, list[str]] = {}
    for entry in entries:
        named = isinstance(entry, dict)
        paths = entry.get("path", []) if named else entry
        for pattern in [paths] if isinstance(paths, str) else paths:
            files = splits.setdefault(str(entry.get("split", "train")) if named else "train", [])
            matches = _pattern(data, pattern).match
            files += [name for name in sizes if matches(name) and name not in files]
    chosen = {name: sizes[name] for names in splits.values() for name in names}
    return HubFiles(chosen, splits, listing.commit)


def fetch(data: HubData, commit: str, names: Sequence[str]) -> list[Path]:
    """Returns the local paths of the files `names` of a data set. Fetches them if they are not in
    the cache.

    Raises UserError if they cannot be fetched.
    """
    with hub_errors(lambda reason: _unreachable(data, reason)):
        from huggingface_hub import snapshot_download, try_to_load_from_cache

        stored = [
            try_to_load_from_cache(data.name, name, revision=commit, repo_type="dataset")
            for name in names
        ]
        if all(isinstance(path, str) for path in stored):
            return [Path(str(path)) for path in stored]
        folder = Path(
            snapshot_download(
                data.name,
                repo_type="dataset",
                revision=commit,
                allow_patterns=[glob.escape(name) for name in names],
            )
        )
        files = [folder / name for name in names]
        if missing := next((file for file in files if not file.is_file()), None):
            raise _unreachable(data, f"{missing.relative_to(folder)} is missing")
        return files


def _listing(data: HubData) -> _Listing:
    """Returns the hub's information on a data set.

    The information on a commit never changes, so it is fetched only once. For a branch, an earlier
    answer is used if the hub does not answer.
    """
    revision = data.revision or _NEWEST
    cached = _file(data.name, revision)
    if _COMMIT.fullmatch(revision) and (stored := _stored(cached)):
        return stored
    try:
        with hub_errors(lambda reason: _unreachable(data, reason)):
            from huggingface_hub import HfApi

            info = HfApi().dataset_info(
                data.name, revision=data.revision, files_metadata=True, timeout=30
            )
    except UserError:
        if stored := _stored(cached):
            return stored
        raise
    card = info.card_data.to_dict() if info.card_data else {}
    configs = card.get("configs")
    listing = _Listing(
        commit=str(info.sha),
        sizes={
            file.rfilename: file.size or 0
            for file in info.siblings or []
            if file.rfilename not in _NO_DATA
        },
        configs=[config for config in configs if isinstance(config, dict)]
        if isinstance(configs, list)
        else [],
    )
    for file in {cached, _file(data.name, listing.commit)}:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, listing)
    return listing


def _file(name: str, revision: str) -> Path:
    """Returns the file in the user's cache folder for the listing of a revision."""
    return user_cache() / "hub" / f"{name}@{revision}.json".replace("/", "--")


def _stored(file: Path) -> _Listing | None:
    """Returns the listing in `file`, or None if there is none or if it is damaged."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Listing)
    except (OSError, msgspec.MsgspecError):
        return None


def _config(data: HubData, configs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the config that `data` names or, if it names none, the default or the only config.

    Raises UserError if there is no such config.
    """
    names = [str(config.get("config_name", "default")) for config in configs]
    by_name = dict(zip(names, configs, strict=True))
    default = [config for config in configs if config.get("default")]
    if data.config in by_name:
        return by_name[data.config]
    if data.config is None and (default or "default" in by_name or len(configs) == 1):
        return (default or [by_name.get("default", configs[0])])[0]
    raise UserError(
        f"data {data}: config",
        found=repr(data.config) if data.config else "none",
        allowed=", ".join(names),
        fix=f"name one, like {data.name}/{names[0]}",
    )


def _pattern(data: HubData, text: str) -> re.Pattern[str]:
    """Returns a regular expression for the glob pattern `text` of a card, as the hub reads it: `*`
    matches within one folder, and `**` matches any number of folders. Raises UserError if it is not
    a pattern.
    """
    from fsspec.utils import glob_translate  # a package that huggingface_hub requires

    try:
        return re.compile(glob_translate(text))
    except ValueError as error:
        raise UserError(
            f"data {data}: data_files",
            found=f"{text!r} on the data set's card ({error})",
            allowed="patterns in which ** is a whole part of a path",
            fix="fetch the files, and name their folder",
        ) from None


def _in_folder(data: HubData, listing: _Listing, folder: object) -> dict[str, int]:
    """Returns the files in `folder` of a data set, or all of them if it is None."""
    if folder is None:
        return listing.sizes
    sizes = {name: size for name, size in listing.sizes.items() if name.startswith(f"{folder}/")}
    if not sizes:
        folders = sorted({name.partition("/")[0] for name in listing.sizes if "/" in name})
        raise UserError(
            f"data {data}: config",
            found=repr(folder),
            allowed=", ".join(folders) or "none: the data set has no folders",
            fix=f"name one of these, or {data.name} alone",
        )
    return sizes


def _unreachable(data: HubData, reason: str) -> UserError:
    return UserError(
        f"data {data}",
        found=f"no such file or folder, and it could not be fetched from the hub ({reason})",
        allowed="a file, a folder, or a data set on the hub such as org/name",
        fix="check the name and the network; for a private data set, log in with `hf auth login`",
    )
