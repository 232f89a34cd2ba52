"""Tests of reading and writing files.

A file is written whole or not at all, and wrong content is a UserError of one line.
"""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatrain.experiments.cli.file_arguments import check_writable
from megatrain.simulator.base import files
from megatrain.simulator.base.errors import DoesNotFit, UserError
from megatrain.simulator.base.files import (
    csv_text,
    read_config,
    read_json,
    read_text,
    read_toml,
    write_json,
    write_text,
)
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.schedule.plan import Knobs, Plan
from megatrain.simulator.schedule.timeline import Span, Timeline

Make = Callable[..., Plan]
fuzz = settings(
    max_examples=400,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# ---- writing


def test_text_is_written_with_its_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "note.txt"
    write_text(path, "größer\n")
    assert path.read_text(encoding="utf-8") == "größer\n"
    write_text(path, "again")
    assert path.read_text() == "again"
    assert os.listdir(path.parent) == ["note.txt"]


def test_a_csv_text_may_have_one_row() -> None:
    assert csv_text([{"name": "a", "size": 1}]) == "name,size\na,1\n"


def test_a_written_file_has_the_permissions_that_the_user_s_mask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "note.txt", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "note.txt").stat().st_mode) == 0o640


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize(
    "failure",
    [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "Input/output error")],
    ids=str,
)
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, failure: OSError
) -> None:
    path = tmp_path / "note.txt"
    write_text(path, "old")

    def fail(*_: object) -> None:
        raise failure

    with monkeypatch.context() as patched:
        patched.setattr(files.os, step, fail)
        with pytest.raises(UserError) as caught:
            write_text(path, "new")
    assert (
        str(caught.value)
        == f"{path}: found {failure.strerror.lower()}; allowed: a disk with room; fix: free some"
        " space or name another folder"
    )
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["note.txt"]


@pytest.mark.parametrize(
    "check", [lambda path: write_text(path, "x"), check_writable], ids=["write", "before work"]
)
def test_a_device_or_pipe_is_not_replaced_by_a_file(
    tmp_path: Path, check: Callable[[Path], None]
) -> None:
    """A device is not replaced by a file.

    The test uses a pipe instead of `/dev/null`.
    """
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        UserError,
        match=(
            r"pipe: found a device, a pipe or a socket; allowed: a file to write; fix: name another"
            r" place"
        ),
    ):
        check(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "note.txt"
    write_text(path, "old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["note.txt"]


def test_a_text_that_is_not_unicode_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):  # a mistake of the program, not of the user
        write_text(path, "\ud800")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["note.txt"]


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import write_json
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_json(Path(sys.argv[1]), ["x" * 100] * 1000)
except UserError as error:
    print(error)
    sys.exit(2)
"""


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    write_json(path, {"old": True})
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "")
    assert (
        done.stdout
        == f"{path}: found file too large; allowed: a disk with room; fix: free some space or name"
        " another folder\n"
    )
    assert read_json(path) == {"old": True}
    assert os.listdir(tmp_path) == ["timeline.json"]


@pytest.mark.parametrize("target", ["file/note.txt", "folder", "no\0name"])
def test_an_unwritable_path_gives_a_one_line_error(tmp_path: Path, target: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError) as caught:
        write_text(tmp_path / target, "x")
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


# ---- reading


@pytest.mark.parametrize("text", ["key = ", "key = [1", "1" * 5000, "key = " + "1" * 5000])
def test_text_in_no_format_is_refused_with_the_name_of_its_file(tmp_path: Path, text: str) -> None:
    """Python refuses numbers of thousands of digits with an error of its own."""
    (tmp_path / "text").write_text(text)
    with pytest.raises(UserError, match=r"/text: found text that is not TOML \(.*a TOML file"):
        read_toml(tmp_path / "text", Knobs)
    (tmp_path / "text").write_text(f"[{text}")
    with pytest.raises(UserError, match=r"/text: found text that is not JSON \(.*a JSON file"):
        read_json(tmp_path / "text")


def test_an_unreadable_path_gives_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"gr\xf6\xdfte")
    (tmp_path / "large.txt").write_text("12345")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.setattr(files, "_LARGEST_BYTES", 4)
    for name, found in [
        ("missing.txt", "found no such file or directory"),
        ("latin.txt/below", "found not a directory"),
        (".", "found a folder"),
        ("loop", "found too many levels of symbolic links"),
        ("latin.txt", "found 6 bytes; allowed: at most 4"),
        ("large.txt", "found 5 bytes; allowed: at most 4"),
        ("no\0name", "found "),
        ("a" * 5000, "found file name too long"),
    ]:
        with pytest.raises(UserError) as caught:
            read_text(tmp_path / name)
        assert found in str(caught.value)
        assert "\n" not in str(caught.value)
    monkeypatch.setattr(files, "_LARGEST_BYTES", 100)
    with pytest.raises(
        UserError,
        match=(
            r"latin.txt: found bytes that are not utf-8 text; allowed: a readable text file; fix: "
        ),
    ):
        read_text(tmp_path / "latin.txt")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_gives_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "secret.toml").write_text("")
    (tmp_path / "secret.toml").chmod(0)
    with pytest.raises(UserError, match="found permission denied"):
        read_text(tmp_path / "secret.toml")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="allowed: "):
        read_text(tmp_path / "pipe")


def test_a_mistake_in_a_list_names_its_place() -> None:
    with pytest.raises(UserError) as caught:
        files.convert(
            {
                "name": "x",
                "digest": "",
                "spans": [{"op": "F0.m0", "lane": "compute", "start_ns": 0, "end_ns": "1"}],
            },
            Timeline,
            "t.json",
        )
    assert (
        str(caught.value)
        == "t.json: spans[0].end_ns: found `str`; allowed: `int`; fix: correct this value"
    )
    with pytest.raises(UserError) as caught:
        files.convert({"name": "x", "digest": "", "spans": [{"op": "F0.m0"}]}, Timeline, "t.json")
    assert (
        "t.json: spans[0]: found no key `lane`; allowed: end_ns, lane, op, start_ns; fix: add"
        " `lane`" in str(caught.value)
    )


class Shelf(msgspec.Struct):
    heights: dict[str, list[Annotated[int, msgspec.Meta(ge=1)]]] = {}
    books: tuple[Annotated[int, msgspec.Meta(le=9)], ...] = ()


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (
            {"books": [3, 12]},
            "shelf.toml: books[1]: found 12; allowed: `int` <= 9; fix: correct this value",
        ),
        (
            {"heights": {"left": [2, 0]}},
            (
                "shelf.toml: heights[...][1]: found another value; allowed: `int` >= 1; fix:"
                " correct this value"
            ),
        ),
    ],
)
def test_a_value_out_of_range_is_shown_where_its_place_is_known(
    data: dict[str, Any], line: str
) -> None:
    with pytest.raises(UserError) as caught:
        files.convert(data, Shelf, "shelf.toml")
    assert str(caught.value) == line


def test_a_user_error_can_be_passed_between_processes() -> None:
    error = UserError("plan.toml: knobs", found=3, allowed=[1, 2], fix="set 2")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_an_error_of_a_plan_that_does_not_fit_keeps_its_exit_status() -> None:
    error = DoesNotFit("host memory", found="9 GiB", allowed="8 GiB", fix="add 1 GiB")
    for same in (error, error.inside("plan.toml"), pickle.loads(pickle.dumps(error))):
        assert isinstance(same, UserError)
        assert (type(same), same.status) == (DoesNotFit, 3)
    assert UserError.status == 2


def test_a_very_long_value_is_cut() -> None:
    assert len(str(UserError("here", found="x" * 10**6, allowed="less", fix="shorten it"))) < 500


# ---- fuzz: any content of a file is read or is a UserError


def survives(load: Callable[[], object]) -> None:
    """Asserts that `load` succeeds or raises a UserError of one line."""
    message = "none"
    try:
        load()
    except UserError as error:
        message = str(error)
    assert len(message.splitlines()) == 1


def mutations(valid: bytes) -> st.SearchStrategy[bytes]:
    """Returns random bytes, and `valid` with some of its bytes removed or replaced."""
    place = st.integers(0, len(valid))
    cut = st.tuples(
        place,
        st.integers(0, 40),
        st.binary(max_size=12)
        | st.sampled_from(
            [b"9" * 5000, b"[" * 2000, b"-1", b"nan", b"1e999", b'"', b"null", b"{}", b"\n"]
        ),
    )
    edited = st.lists(cut, min_size=1, max_size=3).map(lambda cuts: apply(valid, cuts))
    return st.binary(max_size=200) | edited | edited


def apply(content: bytes, cuts: list[tuple[int, int, bytes]]) -> bytes:
    for start, length, inserted in cuts:
        content = content[:start] + inserted + content[start + length :]
    return content


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([2**64, -(2**70), 10**400]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)

VALID_PLAN = b"""format = 1
policy = "double_buffer"
hardware = "h.toml"
source = "m"
device_limit_bytes = 16777216
host_limit_bytes = 67108864
[model]
name = "small"
[model.config]
model_type = "llama"
num_hidden_layers = 4
hidden_size = 32
intermediate_size = 96
num_attention_heads = 4
num_key_value_heads = 2
vocab_size = 256
layer_types = ["full_attention", "full_attention"]
[workload]
batch = 2
sequence = 16
dtype = "bf16"
[knobs]
weight_slots = 2
"""
VALID_TIMELINE = (
    b'{"name":"measured","digest":"0123456789abcdef","spans":['
    b'{"op":"F0.m0","lane":"compute","start_ns":0,"end_ns":12},'
    b'{"op":"H.m0","lane":"compute","start_ns":12,"end_ns":20}]}'
)
VALID_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "hidden_act": "silu",
    "head_dim": 16,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
}


def test_the_fuzz_tests_start_from_valid_files(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_bytes(VALID_PLAN)
    assert Plan.load(tmp_path / "plan.toml").knobs == Knobs()
    (tmp_path / "timeline.json").write_bytes(VALID_TIMELINE)
    assert Timeline.load(tmp_path / "timeline.json").spans[1] == Span(
        op="H.m0", lane="compute", start_ns=12, end_ns=20
    )
    (tmp_path / "config.json").write_text(json.dumps(VALID_CONFIG))
    assert ModelSpec.load(str(tmp_path)).layers == 2


@fuzz
@given(content=mutations(VALID_PLAN))
def test_any_plan_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plan.toml").write_bytes(content)
    survives(lambda: Plan.load(tmp_path / "plan.toml"))


@fuzz
@given(content=mutations(VALID_TIMELINE))
def test_any_timeline_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "timeline.json").write_bytes(content)
    survives(lambda: Timeline.load(tmp_path / "timeline.json"))


@fuzz
@given(content=mutations(json.dumps(VALID_CONFIG).encode()))
def test_any_config_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    survives(lambda: ModelSpec.load(str(tmp_path)))


@fuzz
@given(
    changes=st.dictionaries(
        st.sampled_from(sorted(VALID_CONFIG)), json_values, min_size=1, max_size=3
    )
)
def test_any_value_in_a_config_file(changes: dict[str, Any]) -> None:
    survives(lambda: ModelSpec.from_config({**VALID_CONFIG, **changes}, "config.json"))


@fuzz
@given(value=json_values)
def test_any_json_as_a_timeline(value: object) -> None:
    survives(lambda: files.convert(value, Timeline, "timeline.json"))
    survives(
        lambda: files.convert(
            {"name": "x", "digest": "", "spans": value}, Timeline, "timeline.json"
        )
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nul",
        b"[" * 100_000,
        b"{" * 1000,
        b'{"a": 1',
        b"\xef\xbb\xbf{}",
        b"9" * 5000,
        b"NaN",
        b'"\\ud800"',
    ],
    ids=lambda content: repr(content[:8]),
)
def test_a_corrupt_json_file_is_read_or_gives_a_one_line_error(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "x.json").write_bytes(content)
    survives(lambda: read_json(tmp_path / "x.json"))
    survives(lambda: read_config(tmp_path / "x.json"))
    survives(lambda: Timeline.load(tmp_path / "x.json"))
    survives(lambda: read_toml(tmp_path / "x.json", Plan))


def test_a_config_may_have_the_floats_that_json_lacks(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    value = {"a": [0.0, math.inf, {"b": -math.inf}], "text": "Infinity", "ä": 2**70}
    path.write_text(json.dumps(value), encoding="utf-8")
    assert read_config(path) == {
        **value,
        "a": [0.0, {"__float__": "Infinity"}, {"b": {"__float__": "-Infinity"}}],
    }
    path.write_text('{"a": NaN}')
    assert read_config(path) == {"a": {"__float__": "NaN"}}
    with pytest.raises(UserError, match="found text that is not JSON"):
        read_json(path)


@pytest.mark.parametrize(
    "text",
    [
        "{'a': 1}",
        '{"a": inf}',
        '{"a": nan}',
        '{"a": +Infinity}',
        '{"a": Infinity',
        '{"a": Infinity,}',
        '{"a": Infinity} {}',
        "{Infinity: 1}",
        '{"a": Infinity, "b": 1e999}',
        '{"a": Infinity, "b": "\\ud800"}',
        '{"a": Infinity} // 1',
        '{"a": Infinity, "b": ' + "9" * 5000 + "}",
    ],
)
def test_other_malformed_configs_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError, match="found text that is not JSON"):
        read_config(path)
