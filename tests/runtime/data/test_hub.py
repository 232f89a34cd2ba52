"""Tests of data sets on the hub, with a fake hub in a folder."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import msgspec
import pytest
from fake_hub import FIRST, SECOND, FakeHub, jsonl

from megatrain.runtime.data.options import DataOptions
from megatrain.runtime.data.rows.hub import parse_name
from megatrain.runtime.data.rows.sources import hub_data, pinned, sources_at, sources_of
from megatrain.simulator.base.errors import UserError

LETTERS = {
    "README.md": "a card",
    "data/train-00000-of-00002.jsonl": jsonl("a"),
    "data/train-00001-of-00002.jsonl": jsonl("b"),
    "data/test-00000-of-00001.jsonl": jsonl("t"),
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    monkeypatch.chdir(tmp_path)
    found = FakeHub(tmp_path, monkeypatch)
    found.write("some/letters", LETTERS)
    return found


def read(*paths: str, split: str = "train") -> list[str]:
    """Returns the contents of all files that are read."""
    return [file.read_text() for source in sources_at(paths, (split,)) for file in source.files]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("org/name", ("org/name", None, None, None)),
        ("org/name:test", ("org/name", None, None, "test")),
        ("org/name/en", ("org/name", "en", None, None)),
        ("org/na.me/en@v1/x:dev", ("org/na.me", "en", "v1/x", "dev")),
    ],
)
def test_the_parts_of_a_name(text: str, parts: tuple[str | None, ...]) -> None:
    found = parse_name(text)
    assert found == parts
    assert str(found) == text


@pytest.mark.parametrize(
    "text", ["name", "./org/name", "/org/name", "a/b/c/d", "org/name:", "a b/c"]
)
def test_other_texts_are_paths(text: str) -> None:
    assert hub_data(text) is None


def test_a_path_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_data("org/name")
    assert hub_data("data/chat.jsonl") is None  # a data file that is missing
    (tmp_path / "org").mkdir()
    assert hub_data("org/name") is None


def test_only_the_files_of_the_split_are_fetched(hub: FakeHub) -> None:
    (source,) = sources_at(["some/letters"], ("train",))
    assert [file.read_text() for file in source.files] == [jsonl("a"), jsonl("b")]
    assert hub.fetched == ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"]
    assert source.left_out == "split test (1 file)"
    assert str(source.path) == "some/letters"


@pytest.mark.usefixtures("hub")
def test_a_split_in_the_name_is_preferred() -> None:
    assert read("some/letters:test") == [jsonl("t")]
    options = DataOptions(data="some/letters:test", evaluation_split="train")
    training, evaluation = sources_of(options)
    assert training[0].split == "test"
    assert evaluation is not None
    assert evaluation[0].split == "train"


@pytest.mark.usefixtures("hub")
def test_a_weight_follows_the_name() -> None:
    assert read("some/letters:test:0.5") == [jsonl("t")]
    options = pinned(DataOptions(data=("some/letters:test:0.5", "rows.jsonl:2")))
    assert options.data == (f"some/letters@{FIRST}:test:0.5", "rows.jsonl:2")


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("name", ["some//letters", "some/letters/", "some/./letters"])
def test_a_name_with_superfluous_slashes_is_pinned(name: str) -> None:
    options = pinned(DataOptions(data=(name, f"{name}:0.5"), evaluation_data=name))
    pin = f"some/letters@{FIRST}"
    assert (options.data, options.evaluation_data) == ((pin, f"{pin}:0.5"), pin)


@pytest.mark.usefixtures("hub")
def test_a_missing_split_or_config_is_refused_with_the_existing_ones() -> None:
    with pytest.raises(UserError, match="split: found 'dev'; allowed: train, test"):
        read("some/letters:dev")
    with pytest.raises(UserError, match="config: found 'en'; allowed: data;"):
        read("some/letters/en")


def test_a_config_is_a_folder_without_a_card(hub: FakeHub) -> None:
    hub.write("some/words", {"en/train.jsonl": jsonl("hello"), "de/train.jsonl": jsonl("hallo")})
    assert read("some/words/de") == [jsonl("hallo")]
    assert read("some/words") == [jsonl("hallo"), jsonl("hello")]


def test_the_card_says_which_files_a_config_and_a_split_have(hub: FakeHub) -> None:
    configs = [
        {"config_name": "en", "data_files": [{"split": "train", "path": "a/*"}]},
        {"config_name": "de", "data_files": [{"split": "train", "path": ["b/1.jsonl"]}]},
        {"config_name": "all", "data_files": "*/*.jsonl"},
        {"config_name": "dir", "data_dir": "b"},
    ]
    files = {"a/1.jsonl": jsonl("a"), "b/1.jsonl": jsonl("b"), "b/2.jsonl": jsonl("c")}
    hub.write("some/words", files, configs=configs)
    assert read("some/words/en") == [jsonl("a")]
    assert read("some/words/de") == [jsonl("b")]
    assert len(read("some/words/all")) == 3
    assert read("some/words/dir") == [jsonl("b"), jsonl("c")]
    with pytest.raises(UserError, match="config: found none; allowed: en, de, all, dir; fix"):
        read("some/words")
    hub.write("some/words", files, configs=[*configs[:2], {**configs[2], "default": True}])
    assert len(read("some/words")) == 3


def test_the_card_s_patterns_match_as_on_the_hub(hub: FakeHub) -> None:
    configs = [
        {"config_name": "one", "data_files": "a/*.jsonl"},
        {"config_name": "any", "data_files": "**/*.jsonl"},
        {"config_name": "twice", "data_files": ["a/*", "a/1.jsonl"]},
        {"config_name": "wrong", "data_files": "a**b"},
    ]
    files = {"0.jsonl": jsonl("0"), "a/1.jsonl": jsonl("1"), "a/raw/2.jsonl": jsonl("2")}
    hub.write("some/words", files, configs=configs)
    assert read("some/words/one") == [jsonl("1")]
    assert read("some/words/any") == [jsonl("0"), jsonl("1"), jsonl("2")]
    assert read("some/words/twice") == [jsonl("1")]
    with pytest.raises(UserError, match=r"some/words/wrong: data_files: found 'a\*\*b'"):
        read("some/words/wrong")


def test_a_pinned_name_reads_the_same_bytes_later_also_offline(hub: FakeHub) -> None:
    options = pinned(DataOptions(data="some/letters", evaluation_data="some/letters:test"))
    assert options.data == f"some/letters@{FIRST}"
    assert options.evaluation_data == f"some/letters@{FIRST}:test"
    before = [source.files for source in sources_of(options)[0]]
    hub.write("some/letters", {"train.jsonl": jsonl("new")}, SECOND)
    assert read("some/letters") == [jsonl("new")]
    hub.asked.clear()
    hub.online = False
    assert [source.files for source in sources_of(options)[0]] == before
    assert pinned(options) == options
    assert hub.asked == []


def test_offline_a_branch_has_its_last_known_commit(hub: FakeHub) -> None:
    read("some/letters")
    hub.online = False
    assert read("some/letters") == [jsonl("a"), jsonl("b")]


def test_without_a_network_the_error_is_one_line(hub: FakeHub) -> None:
    hub.online = False
    with pytest.raises(
        UserError, match=r"could not be fetched from the hub \(Cannot reach"
    ) as found:
        read("some/letters")
    assert "\n" not in str(found.value)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("RepositoryNotFoundError", "it does not exist or is private; there is no token"),
        ("GatedRepoError", "access must be requested on its page; there is no token"),
    ],
)
def test_without_a_token_the_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, kind: str, reason: str
) -> None:
    error = getattr(huggingface_hub.errors, kind)

    def refuse(*_: object, **__: object) -> None:
        raise error.__new__(error)

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    with pytest.raises(UserError, match=reason):
        read("some/letters")


def test_files_that_are_gone_are_fetched_or_refused(hub: FakeHub) -> None:
    (source,) = sources_at(["some/letters"], ("train",))
    source.files[0].unlink()
    assert read("some/letters") == [jsonl("a"), jsonl("b")]
    source.files[0].unlink()
    hub.online = False
    with pytest.raises(UserError, match="could not be fetched"):
        read("some/letters")


@pytest.mark.usefixtures("hub")
def test_options_keep_their_other_fields() -> None:
    options = DataOptions(data="some/letters", split="test", strict=True)
    assert pinned(options) == msgspec.structs.replace(options, data=f"some/letters@{FIRST}")
