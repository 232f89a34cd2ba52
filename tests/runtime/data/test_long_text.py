"""Tests of LongText: tokenizing a text in overlapping windows gives the ids of the whole text.

This holds for any tokenizer and any window ends, and memory stays bounded.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatrain.runtime.data import long_text
from megatrain.runtime.data.long_text import LongText, Piece

WORDS = [
    "hello",
    "world",
    "the",
    "others",
    "übergröße",
    "数据模型",
    "don't",
    "1234567",
    "🙂👍🏽",
    "e\u0301\u0323e",
    "x",
    "==",
    "--",
    ",",
]
BLANKS = [" ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", " " * 40, ""]
SPECIAL = ["<s>", "<cut>", "<r>"]
TRAINED = [
    " ".join(WORDS),
    "\n".join(WORDS * 3),
    "hello the  world\n\n  others  数据",
    "the,the,the x x == --",
] * 20
LLAMA3 = (
    r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained(tokenizer: Tokenizer, trainer: Any) -> PreTrainedTokenizerFast:
    tokenizer.train_from_iterator(TRAINED, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    fast.add_tokens(
        [
            AddedToken("<s>"),
            AddedToken("<cut>", lstrip=True),
            AddedToken("<r>", rstrip=True, normalized=False),
        ]
    )
    return fast


def bpe(vocabulary: int = 330, **given: Any) -> Any:
    return trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<unk>", "</s>"], show_progress=False, **given
    )


def byte_level(normalizer: Any, pre_tokenizer: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    return trained(tokenizer, bpe(initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))


def metaspace(scheme: str, *, split: bool = True) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    return trained(tokenizer, bpe(100))


def llama2() -> PreTrainedTokenizerFast:
    """Returns a tokenizer like Llama 2's: blanks become ▁ and nothing is split.

    A whole text is therefore one word.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return trained(tokenizer, bpe(400, initial_alphabet=["▁"]))


def unigram() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return trained(
        tokenizer,
        trainers.UnigramTrainer(
            vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
        ),
    )


def word_piece() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    return trained(
        tokenizer,
        trainers.WordPieceTrainer(
            vocab_size=100, special_tokens=["<unk>", "</s>"], show_progress=False
        ),
    )


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "gpt2": lambda: byte_level(None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt2 with a blank": lambda: byte_level(None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "llama3": lambda: byte_level(
        normalizers.NFC(),
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
    ),
    "metaspace always": lambda: metaspace("always"),
    "metaspace first": lambda: metaspace("first"),
    "metaspace never": lambda: metaspace("never"),
    "metaspace in one word": lambda: metaspace("first", split=False),
    "llama2": llama2,
    "unigram": unigram,
    "wordpiece": word_piece,
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return KINDS[request.param]()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CONTEXT", 47), ("_WINDOW", 150), ("_ZONE", 60)):
        monkeypatch.setattr(long_text, name, value)
    monkeypatch.setattr(long_text, "BATCH_SIZE", 400)


def pieces(
    tokenizer: PreTrainedTokenizerFast, text: str, sizes: list[int] | None = None
) -> list[Piece]:
    """Encodes the text in parts of these sizes."""

    def parts() -> Iterator[tuple[str, bool]]:
        at = 0
        for size in sizes or []:
            yield text[at : at + size], False
            at += size
        yield text[at:], True

    return [piece for piece in LongText(tokenizer).encode(parts()) if isinstance(piece, Piece)]


def ids(found: list[Piece]) -> list[int]:
    return np.concatenate([piece.ids for piece in found]).tolist()


def at_once(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


TEXTS = st.lists(
    st.tuples(st.sampled_from([*WORDS, *WORDS, *SPECIAL]), st.sampled_from(BLANKS)).map("".join),
    min_size=20,
    max_size=60,
).map(lambda found: "".join(found) * 4)


@pytest.mark.usefixtures("small")
@settings(max_examples=10)
@given(text=TEXTS, sizes=st.lists(st.integers(0, 400), max_size=4))
def test_windows_have_the_ids_of_the_whole_text(
    tokenizer: PreTrainedTokenizerFast, text: str, sizes: list[int]
) -> None:
    assert ids(pieces(tokenizer, text, sizes)) == at_once(tokenizer, text)


@pytest.mark.usefixtures("small")
@settings(max_examples=10, deadline=None)
@given(text=TEXTS, places=st.lists(st.integers(0, 500), min_size=1, max_size=5))
def test_a_position_in_the_text_is_the_same_token_in_windows_and_in_the_whole(
    tokenizer: PreTrainedTokenizerFast, text: str, places: list[int]
) -> None:
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)[
        "offset_mapping"
    ]
    found = pieces(tokenizer, text)
    for begin in places:
        for end in (begin + 1, begin + 70):
            ours = [
                np.isin(
                    np.arange(len(piece.ids)), np.arange(len(piece.ids))[piece.between(begin, end)]
                )
                for piece in found
            ]
            assert np.concatenate(ours).tolist() == [
                first < end and last > begin for first, last in offsets
            ]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("small")
@settings(max_examples=500, deadline=None)
@given(text=TEXTS, sizes=st.lists(st.integers(0, 400), max_size=4))
def test_windows_have_the_ids_of_the_whole_text_500_times(
    tokenizer: PreTrainedTokenizerFast, text: str, sizes: list[int]
) -> None:
    assert ids(pieces(tokenizer, text, sizes)) == at_once(tokenizer, text)


@pytest.mark.parametrize(
    "text",
    [
        "hello the world\n",
        "the others, don't. ",
        "hello  \n\n  world",
        "e\u0301hello 数据, 1234567 the",
    ],
)
def test_a_text_is_cut(
    tokenizer: PreTrainedTokenizerFast, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_text, "_WINDOW", 2**14)
    text *= 4 * long_text._WINDOW // len(text)
    found = pieces(tokenizer, text)
    assert len(found) >= 4
    assert ids(found) == at_once(tokenizer, text)
    assert [piece.first for piece in found] == [True] + [False] * (len(found) - 1)
    assert [piece.last for piece in found] == [False] * (len(found) - 1) + [True]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "text",
    [
        "数据模型",
        "1",
        "12",
        " ",
        "a",
        "=",
        "\n",
        "e\u0301",
        "\u0301",
        "🙂",
        "<s>",
        "<cut> ",
        "<r> ",
    ],
)
def test_a_text_of_one_endless_word_has_the_ids_of_the_whole_text(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    for begin in ("", "the x ", "the"):
        whole = begin + text * (1000 // len(text))
        assert ids(pieces(tokenizer, whole)) == at_once(tokenizer, whole)


def test_a_text_without_blanks_is_cut_within_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_text, "_WINDOW", 2**14)
    for kind in ("gpt2", "llama2"):
        tokenizer = KINDS[kind]()
        text = "数据模型" * long_text._WINDOW
        found = pieces(tokenizer, text)
        assert len(found) > 3
        assert ids(found) == at_once(tokenizer, text)


@pytest.mark.usefixtures("small")
def test_windows_that_do_not_meet_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = KINDS["gpt2"]()
    made = LongText._at

    def careless(self: LongText, *given: Any, **options: Any) -> Any:
        cut = made(self, *given, **options)
        return cut and long_text._Cut(
            left=cut.left,
            right=cut.right,
            left_ids=cut.left_ids,
            right_ids=[*cut.right_ids[:-1], 1],
        )

    monkeypatch.setattr(LongText, "_at", careless)
    (piece,) = pieces(tokenizer, "hello the world\n" * 100)
    assert piece.ids.tolist() == at_once(tokenizer, "hello the world\n" * 100)


def test_tokens_between_texts_keep_their_position() -> None:
    found = list(
        LongText(KINDS["gpt2"]()).encode(
            [("the", True), 1, ("", True), ("x", False), (" x", True), 2]
        )
    )
    assert [item if isinstance(item, int) else (item.first, item.last) for item in found] == [
        (True, True),
        1,
        (True, True),
        (True, True),
        2,
    ]
    assert LongText(KINDS["gpt2"]()).whole(["the", "", "x"])[1].tolist() == []


_MEASURE = """
import json, resource, sys
from pathlib import Path
from megatrain.runtime.data.columns import Layout
from megatrain.runtime.data.rows.formats import rows
from megatrain.runtime.data.rows.sources import find
from megatrain.runtime.data.tokens.tokenize import Encoder, load_tokenizer

name = sys.argv[4]
encoder = Encoder(load_tokenizer(Path(sys.argv[1])), Layout(name, (name,)), "assistant", "")
list(encoder.encode(rows(find(Path(sys.argv[2])))))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = sum(len(piece[0]) for piece in encoder.encode(rows(find(Path(sys.argv[3])))))
print(json.dumps([count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before]))
"""


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "begin", "end", "limit"),
    [
        ("text", '{"text": "', '"}', 4),
        (
            "messages",
            '{"messages": [{"role": "user", "content": "',
            '"}, {"role": "assistant", "content": "the end"}]}',
            16,
        ),
    ],
)
def test_a_row_of_64_mib_takes_a_few_bytes_of_memory_per_byte(
    tokenizer_folder: Callable[..., Path],
    tmp_path: Path,
    name: str,
    begin: str,
    end: str,
    limit: int,
) -> None:
    """A text row of 64 MiB takes at most 4 bytes of memory per byte, and a conversation 16.

    The memory of a row of 8 MB, which fills every batch, is subtracted. A conversation is in memory
    as its row, its messages, and its text with and without marks.
    """
    for file_name, count in (("short", 2**19), ("long", 2**22)):
        with (tmp_path / f"{file_name}.jsonl").open("w") as file:
            file.write(begin)
            for _ in range(count // 2**16):
                file.write("hello the world " * 2**16)
            file.write(end + "\n")
    paths = [
        str(tokenizer_folder("unmarked")),
        str(tmp_path / "short.jsonl"),
        str(tmp_path / "long.jsonl"),
    ]
    outcome = subprocess.run(
        [sys.executable, "-c", _MEASURE, *paths, name], capture_output=True, text=True, check=True
    )
    count, grown_kib = json.loads(outcome.stdout)
    assert count > 1e7
    assert grown_kib * 1024 < limit * (tmp_path / "long.jsonl").stat().st_size
