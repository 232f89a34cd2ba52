"""Reads and writes the project's own files: TOML and JSON from and to frozen structs, and CSV.

Every error is a UserError of one line. Writes are atomic: a file is written completely or not at
all.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tomli_w

from megatrain.simulator.base.atomic_files import AtomicWrite
from megatrain.simulator.base.errors import UserError

T = TypeVar("T")
# A list of two numbers, such as a point of a curve, is written on one line.
_PAIR = re.compile(r"\[\n\s+([-+.\w]+),\n\s+([-+.\w]+),\n\s*\]")
_LARGEST_BYTES = 256 * 2**20  # a timeline of 10,000 ops and 100 steps takes 60 MiB as JSON


def read_toml(path: Path, into: type[T]) -> T:
    """Returns the TOML file at `path` as a validated struct of type `into`. Raises UserError if the
    file is missing, unreadable or malformed, or if the struct refuses its values.
    """
    try:
        data = tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        # A ValueError is a TOMLDecodeError, or int() refusing a number of thousands of digits.
        raise UserError(
            str(path),
            found=f"text that is not TOML ({error})",
            allowed="a TOML file",
            fix="correct the file, or write it again with the command that made it",
        ) from None
    return convert(data, into, str(path))


def refuse_existing(path: Path) -> None:
    """Raises UserError if `path` exists. A command calls this before it makes a folder there."""
    if os.path.lexists(path):
        raise UserError(
            str(path),
            found="something there already",
            allowed="a folder that does not exist",
            fix="name another one with --out",
        )


def read_json(path: Path) -> Any:
    """Returns the content of the JSON file at `path`. Raises UserError if the file is missing,
    unreadable or malformed.
    """
    return _read_json(path, msgspec.json.decode)


def read_config(path: Path) -> Any:
    """Returns the content of the config.json at `path`, with floats as in `decode_config`. Raises
    UserError if the file is missing, unreadable or malformed.
    """
    return _read_json(path, decode_config)


def decode_config(text: str) -> Any:
    """Returns the content of a config.json.

    Unlike other JSON, it may have `Infinity`, `-Infinity` and `NaN`, which Python's json module
    writes and transformers reads. Each becomes a table such as {"__float__": "Infinity"}, which is
    what transformers 5 writes.

    Raises ValueError or RecursionError if `text` is malformed.
    """
    try:
        return msgspec.json.decode(text)
    except ValueError as error:
        try:
            named = json.loads(text, parse_constant=lambda name: {"__float__": name})
            return msgspec.json.decode(json.dumps(named))
        except ValueError:
            raise error from None


def _read_json(path: Path, decode: Callable[[str], Any]) -> Any:
    try:
        return decode(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(
            str(path),
            found=f"text that is not JSON ({error})",
            allowed="a JSON file",
            fix="write the file again with the command that made it",
        ) from None


def read_text(path: Path) -> str:
    """Returns the UTF-8 text at `path`. Raises UserError if the path is not a readable text file or
    the file is too large.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device may never end
            raise UserError(
                str(path),
                found="a folder" if path.is_dir() else "no regular file",
                allowed="a readable text file",
                fix="name an existing file",
            )
        if status.st_size > _LARGEST_BYTES:
            raise UserError(
                str(path),
                found=f"{status.st_size} bytes",
                allowed=f"at most {_LARGEST_BYTES}",
                fix="name the right file",
            )
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "bytes that are not UTF-8 text"
        raise UserError(
            str(path),
            found=str(reason).lower(),
            allowed="a readable text file",
            fix="name an existing file",
        ) from None


def convert(data: object, into: type[T], where: str) -> T:
    """Returns plain data as a validated struct of type `into`. Raises UserError if a key or a value
    is not allowed; the error names the key.
    """
    try:
        return msgspec.convert(data, into, strict=True)
    except UserError as error:
        raise error.inside(where) from None
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        key = place.rstrip("`").lstrip(".") or "top level"
        unknown = re.search(r"unknown field `(.*)`", message)
        if unknown:
            raise UserError(
                f"{where}: {key}",
                found=f"unknown key `{unknown[1]}`",
                allowed=_allowed_keys(into, key),
                fix=f"remove `{unknown[1]}` or correct its spelling",
            ) from None
        missing = re.search(r"missing required field `(.*)`", message)
        if missing:
            raise UserError(
                f"{where}: {key}",
                found=f"no key `{missing[1]}`",
                allowed=_allowed_keys(into, key),
                fix=f"add `{missing[1]}`",
            ) from None
        invalid = re.search(r"Invalid enum value (.*)", message)
        if invalid:
            raise UserError(
                f"{where}: {key}",
                found=invalid[1],
                allowed=_allowed_values(into, key),
                fix="correct this value",
            ) from None
        found, _, allowed = message.partition(", got ")[::-1]
        raise UserError(
            f"{where}: {key}",
            found=found or _value(data, key, "another value"),
            allowed=(allowed or message).removeprefix("Expected ").replace(" | null", ""),
            fix="correct this value",
        ) from None


def _value(data: Any, key: str, otherwise: str) -> str:
    """Returns the text of the value at `key`, a path such as `knobs.batch` or `copies[0].bytes`, or
    `otherwise` if it cannot be found.
    """
    try:
        for part in re.findall(r"[^.\[\]]+", key):
            data = data[int(part)] if isinstance(data, list | tuple) else data[part]
        return repr(data)
    except (LookupError, TypeError, ValueError):  # msgspec writes `...` for a key of a table
        return otherwise


def _allowed_keys(into: Any, key: str) -> str:
    """Returns the keys of the struct at `key`."""
    return ", ".join(
        sorted(
            field.encode_name
            for field in msgspec.structs.fields((_structs(_annotation(into, key)) or [into])[0])
        )
    )


def _allowed_values(into: Any, key: str) -> str:
    """Returns the values of the Literal at `key`."""
    annotation = _annotation(into, key)
    # Annotated[Literal[...], Meta(...)] has the Literal as its origin.
    plain = annotation.__origin__ if hasattr(annotation, "__metadata__") else annotation
    return ", ".join(repr(value) for value in getattr(plain, "__args__", ()))


def _annotation(into: Any, key: str) -> Any:
    """Returns the type of the value at `key`, a path such as `knobs` or `copies[0].bytes`."""
    for part in [] if key == "top level" else re.sub(r"\[[^\]]*\]", "", key).split("."):
        fields = {
            field.encode_name: field.type
            for struct in _structs(into)[:1]
            for field in msgspec.structs.fields(struct)
        }
        if part not in fields:
            break
        into = fields[part]
    return into


def _structs(annotation: Any) -> list[Any]:
    """Returns every struct type in an annotation such as `tuple[Point, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return [annotation]
    return [found for arm in getattr(annotation, "__args__", ()) for found in _structs(arm)]


def write_toml(
    path: Path,
    value: msgspec.Struct | dict[str, Any],
    heading: str = "",
    comments: Mapping[str, str] | None = None,
) -> None:
    """Writes `value` as TOML to `path`, atomically. The arguments are those of `toml_text`."""
    write_text(path, toml_text(value, heading, comments))


def toml_text(
    value: msgspec.Struct | dict[str, Any],
    heading: str = "",
    comments: Mapping[str, str] | None = None,
) -> str:
    """Returns `value` as TOML. Keys whose value is None are left out.

    Args:
        value: the content.
        heading: a comment at the top of the text.
        comments: key or section -> a comment that is written above its first line.
    """
    text = tomli_w.dumps(_without_none(msgspec.to_builtins(value)))
    text = _PAIR.sub(r"[\1, \2]", text)
    for name, comment in (comments or {}).items():
        if line := re.search(rf"^\[{{0,2}}{re.escape(name)}[\] .]", text, re.MULTILINE):
            text = text[: line.start()] + _commented(comment) + text[line.start() :]
    return _commented(heading) + text


def _commented(text: str) -> str:
    return "".join(f"# {line}\n" for line in text.splitlines())


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list | tuple) else value


def write_json(path: Path, value: object) -> None:
    """Writes `value` as JSON to `path`, atomically."""
    write_text(path, msgspec.json.encode(value).decode() + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes `text` to `path` as UTF-8, atomically.

    Raises UserError if `path` cannot be written, or if `text` contains a file name that is not
    UTF-8.
    """
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        # Python represents a byte of a file name that is not UTF-8 by these characters. Any other
        # character that cannot be encoded is a bug.
        if not "\udc80" <= text[error.start] <= "\udcff":
            raise
        around = ascii(text[max(error.start - 20, 0) : error.end])
        raise UserError(
            str(path),
            found=f"a name that is not UTF-8 text, {around}",
            allowed="names of files that can be stored as text",
            fix="rename the file, or set LC_ALL=C.UTF-8",
        ) from None
    write_bytes(path, data)


def printable(path: str | Path) -> str:
    """Returns a path as text. Bytes that are not UTF-8 become escape sequences."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def refuse_special(path: Path) -> None:
    """Raises UserError if `path` is a device, a pipe or a socket. An atomic write would replace it
    with a file, even `/dev/null`.
    """
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise UserError(
            str(path),
            found="a device, a pipe or a socket",
            allowed="a file to write",
            fix="name another place",
        )


def write_bytes(path: Path, data: bytes) -> None:
    """Writes `data` to `path`, atomically: a reader sees the old file or the new one, never a part
    of it. The data goes to a temporary file, which is synced and then renamed.

    Raises UserError if `path` cannot be written.
    """
    refuse_special(path)
    try:
        temporary = AtomicWrite(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            str(path),
            found=reason.lower(),
            allowed="a folder that can be written",
            fix="name another folder",
        ) from None
    try:
        with temporary as written:
            with written.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(written, 0o666 & ~umask)
            os.replace(written, path)
    except OSError as error:
        raise UserError(
            str(path),
            found=str(error.strerror).lower(),
            allowed="a disk with room",
            fix="free some space or name another folder",
        ) from None


def csv_text(rows: Sequence[Mapping[str, object]]) -> str:
    """Returns rows as CSV text with a header line. All rows have the same keys. Raises IndexError
    if there is no row.

    >>> csv_text([{"name": "a", "size": 1}, {"name": "b, c", "size": 2}])
    'name,size\\na,1\\n"b, c",2\\n'
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
