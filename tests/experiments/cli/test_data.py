"""Tests of `megatrain data`: recognized layouts, counts, and shown documents."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.experiments.cli.training.row_choice import described


def conversation(words: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": "how are you"},
            {"role": "assistant", "content": "I " * words},
        ]
    }


@pytest.fixture
def place(
    prepared: Path,
    make_tokenizer: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Makes a model folder `tiny` without weights, and `chat.json` with a bad row."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_bytes((prepared / "tiny/config.json").read_bytes())
    make_tokenizer(tmp_path / "tiny")
    rows = [conversation(words) for words in range(1, 42)]
    (tmp_path / "chat.json").write_text(json.dumps([*rows, {"messages": []}]))
    return tmp_path


@pytest.mark.usefixtures("place")
def test_data_shows_lengths_cuts_bad_rows_and_one_document(command: Any) -> None:
    outcome = command("data", "chat.json", "--model", "tiny", "--json")
    assert (outcome.status, outcome.err) == (0, "")
    found = json.loads(outcome.out)
    (source,) = found["sources"]
    assert (source["kind"], source["rows"], source["left_out"]) == ("json", 42, 1)
    assert source["reasons"] == [["chat.json:42: `messages` is not a list of messages", 1]]
    assert source["layout"].startswith("messages, chat template of the tokenizer, ")
    shortest = found["longest"] - 40  # a word is one token
    lengths = [shortest + number for number in range(41)]
    assert (found["documents"], found["tokens"]) == (41, sum(lengths))
    assert (found["median"], found["percentile_95"]) == (lengths[20], lengths[38])
    in_training = described(np.array(lengths), 64, cuts=True)
    assert in_training.startswith(f"median {lengths[20]} tokens, 95 % up to {lengths[38]}, ")
    for cut in found["cuts"]:
        longer = [length for length in lengths if length > cut["sequence"]]
        assert cut["documents"] == len(longer)
        assert cut["tokens"] == sum(length - cut["sequence"] for length in longer)
    assert [cut["sequence"] for cut in found["cuts"]][-1] >= found["longest"]
    assert found["cuts"][-1]["documents"] == 0
    assert found["shown"] == [
        f"the first document, {shortest} tokens, loss on text between « and »:",
        "    <s>user\\nhow are you<e><s>assistant\\n«I <e>»",
    ]


@pytest.mark.usefixtures("place")
def test_the_text_says_the_same(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("data", "chat.json", "--model", "tiny", "--seq", 50)
    found = json.loads(command(*words, "--json").out)
    monkeypatch.setenv("COLUMNS", "200")
    outcome = command(*words, "--row", 2)
    assert (outcome.status, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0] == "data chat.json: json, 1 file"
    assert any(line.startswith("1 bad row left out, ") for line in lines)
    assert f"length: median {found['median']} tokens, 95 % at most {found['percentile_95']}, " in (
        outcome.out
    )
    (row,) = [line.split() for line in lines if line.split()[:1] == ["50"]]
    (cut,) = [cut for cut in found["cuts"] if cut["sequence"] == 50]
    assert (row[1], row[3], row[5]) == tuple(
        str(cut[key]) for key in ("documents", "tokens", "left_out")
    )
    assert f"packed: {found['packed']}" in lines
    assert "rows of 50;" in found["packed"]
    assert lines[-1] == "    <s>user\\nhow are you<e><s>assistant\\n«I I <e>»"
    assert "\x1b" not in outcome.out


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("no_colour", ["", "1"])
def test_loss_is_green_on_a_terminal(
    command: Any, monkeypatch: pytest.MonkeyPatch, no_colour: str
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", no_colour)
    shown = command("data", "chat.json", "--model", "tiny").out.splitlines()[-1]
    assert shown.endswith("«I <e>»" if no_colour else "\x1b[1;32mI <e>\x1b[0m")


def test_several_files_have_weights(place: Path, command: Any) -> None:
    (place / "a.csv").write_text('instruction,input,output\n"how\nare",,you\nhow,are,you\n')
    words = ("data", "chat.json:0.5", "a.csv:3", "--model", "tiny")
    found = json.loads(command(*words, "--json").out)
    assert [source["kind"] for source in found["sources"]] == ["json", "csv"]
    assert found["documents"] == 20 + 2 * 3
    assert "weight 3 of a.csv: 6 documents an epoch, from 2, " in command(*words).out


def test_text_is_not_cut_and_is_read_as_bytes_without_a_tokenizer(
    place: Path, command: Any
) -> None:
    (place / "text.txt").write_text("how are you " * 100)
    outcome = command("data", "text.txt", "--model", "tiny")
    assert "documents cut" not in outcome.out
    assert "loss on every token:" in outcome.out
    for file in place.glob("tiny/[!c]*"):
        file.unlink()
    (place / "tiny" / "chat_template.jinja").unlink()
    outcome = command("data", "text.txt", "--model", "tiny")
    assert (outcome.status, outcome.err) == (0, "")
    assert "each byte of the text is a token" in outcome.out
    assert "length: median 1,201 tokens, " in outcome.out


@pytest.mark.parametrize("file", ["text.txt", "chat.json"])
def test_rows_are_at_most_as_long_as_the_model_s_limit(
    place: Path, command: Any, file: str
) -> None:
    (place / "text.txt").write_text("how are you " * 100)
    config = place / "tiny" / "config.json"
    limited = json.loads(config.read_text()) | {"max_position_embeddings": 32}
    config.write_text(json.dumps(limited))
    assert "rows of 32;" in command("data", file, "--model", "tiny").out
    assert " of 64;" in command("data", file, "--model", "tiny", "--seq", 64).out


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("none.jsonl", "--model", "tiny"), "data none.jsonl: found no such file or folder"),
        (("chat.json", "--model", "none"), "model none: found no such folder"),
        (("chat.json:0", "--model", "tiny"), "data chat.json: weight: found 0; allowed: a number"),
        (("chat.json", "--model", "tiny", "--row", "42"), "found 42; allowed: 1 to 41"),
        (("chat.json", "--model", "tiny", "--seq", "3"), "no document with an answer within 3"),
        (("chat.json", "--model", "tiny", "--strict"), "bad row chat.json:42"),
        (("chat.json",), "found no --model"),
    ],
)
def test_mistakes_give_one_line_errors(command: Any, words: tuple[str, ...], reason: str) -> None:
    outcome = command("data", *words)
    assert outcome.status == 2
    assert reason in outcome.err
    assert outcome.err.count("\n") == 1
