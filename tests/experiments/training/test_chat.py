"""Tests of `megatrain chat`: answers of a tiny model, with and without a chat template."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from megatrain.experiments.cli.training import generation


@pytest.fixture(scope="module")
def talker(prepared: Path, make_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model folder with a tokenizer and a chat template. Tests must not change it."""
    folder = tmp_path_factory.mktemp("talker") / "tiny"
    shutil.copytree(prepared / "tiny", folder)
    make_tokenizer(folder)
    return folder


class Terminal(io.StringIO):
    """A fake standard input that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that takes the lines that the user will type."""

    def type_lines(*lines: str | type[BaseException]) -> None:
        left: Iterator[str | type[BaseException]] = iter(lines)

        def next_line(_: str) -> str:
            line = next(left, EOFError)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("sys.stdin", Terminal())
        monkeypatch.setattr("builtins.input", next_line)

    return type_lines


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list to which each decoded prompt of the model is added."""
    from megatrain.runtime.training.conversation import ChatSession

    seen: list[str] = []
    original = ChatSession._ids

    def record(self: Any, *given: Any) -> list[int]:
        ids = original(self, *given)
        seen.append(self._tokenizer.decode(ids))
        return ids

    monkeypatch.setattr(ChatSession, "_ids", record)
    return seen


SHORT = ("--max-tokens", "5", "--device", "cpu")


def test_one_answer_is_printed_and_depends_on_the_seed(command: Any, talker: Path) -> None:
    words = ("chat", talker, "--prompt", "how are you", *SHORT, "--temperature", 2)
    one, again, other = (command(*words, "--seed", seed) for seed in (1, 1, 2))
    assert (one.status, one.err) == (0, "")
    assert one.out.strip()
    assert again.out == one.out
    assert other.out != one.out


def test_at_temperature_0_the_answer_is_the_most_likely_one(command: Any, talker: Path) -> None:
    words = ("chat", talker, "--prompt", "how", *SHORT, "--temperature", 0)
    assert command(*words, "--seed", 1).out == command(*words, "--seed", 2).out


def test_chat_accepts_the_folder_of_a_run(command: Any, finished: Path) -> None:
    """The run's model has no tokenizer, so it reads and writes bytes."""
    outcome = command("chat", finished, "--prompt", "line", *SHORT)
    assert outcome.status == 0
    assert outcome.err == "no chat template: the model continues the text\n"
    assert outcome.out.endswith("\n")


def test_standard_input_is_a_prompt_unless_it_is_a_terminal(
    command: Any, talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("how are you\n"))
    piped = command("chat", talker, *SHORT)
    assert (piped.status, piped.err) == (0, "")
    assert piped.out == command("chat", talker, "--prompt", "how are you", *SHORT).out
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert "standard input: found no text" in command("chat", talker, *SHORT).err


def test_a_prompt_that_is_not_utf_8_is_refused_in_one_line(
    command: Any, talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = command("chat", talker, "--prompt", "Caf\udce9?", *SHORT)
    assert given.status == 2
    assert "--prompt: found bytes that are not UTF-8, 'Caf\\udce9'; allowed: text" in given.err
    for errors in ("strict", "surrogateescape"):  # the latter in the C locale
        stream = io.TextIOWrapper(io.BytesIO(b"Who\xff are you?"), "utf-8", errors=errors)
        monkeypatch.setattr("sys.stdin", stream)
        piped = command("chat", talker, *SHORT)
        assert piped.status == 2
        assert "standard input: found bytes that are not UTF-8" in piped.err
        assert piped.err.count("\n") == 1


def test_a_line_that_is_not_utf_8_does_not_end_the_conversation(
    command: Any, talker: Path, monkeypatch: pytest.MonkeyPatch, prompts: list[str]
) -> None:
    """`input` either fails or returns characters that cannot be encoded."""
    lines = iter([b"Who\xff", "Caf\udce9?", b"how"])

    def next_line(_: str) -> str:
        line = next(lines, b"/quit")
        return line if isinstance(line, str) else line.decode()

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", next_line)
    outcome = command("chat", talker, *SHORT)
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.count("the prompt: found bytes that are not UTF-8") == 2
    assert prompts == [r"<s>user\nhow<e><s>assistant\n"]


def test_the_conversation_is_kept_until_new(
    command: Any, talker: Path, typed: Any, prompts: list[str]
) -> None:
    typed("how", "are", "/new", "you", "/quit", "not read")
    outcome = command("chat", talker, *SHORT)
    assert (outcome.status, outcome.err) == (0, "")
    first, second, third = prompts
    assert first == r"<s>user\nhow<e><s>assistant\n"
    assert second.startswith(r"<s>user\nhow<e><s>assistant\n")
    assert second.endswith(r"<e><s>user\nare<e><s>assistant\n")
    assert third == r"<s>user\nyou<e><s>assistant\n"


def test_a_tokenizer_adds_no_token_of_its_own_to_what_the_template_writes(
    command: Any, talker: Path, prompts: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(talker, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first = [("<s>", tokenizer.token_to_id("<s>"))]
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=first)
    assert tokenizer.encode("how").tokens[0] == "<s>"
    tokenizer.save(str(folder / "tokenizer.json"))
    assert command("chat", folder, "--prompt", "how", *SHORT).status == 0
    assert prompts == [r"<s>user\nhow<e><s>assistant\n"]


def test_without_a_template_the_text_is_continued(
    command: Any, finished: Path, typed: Any, prompts: list[str]
) -> None:
    typed("line", "of")
    outcome = command("chat", finished, *SHORT)
    assert outcome.status == 0
    assert outcome.err.count("no chat template") == 1
    assert prompts[0] == "line"
    assert prompts[1].startswith("line")
    assert prompts[1].endswith("\nof")


def test_ctrl_c_ends_an_answer_and_another_one_the_command(
    command: Any, talker: Path, typed: Any, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The incomplete answer is kept."""
    shown: list[str] = []

    def show(text: str) -> None:
        shown.append(text)
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "show", show)
    typed("how", "are", KeyboardInterrupt)
    outcome = command("chat", talker, "--max-tokens", 40, "--device", "cpu", "--temperature", 0)
    assert outcome.status == 130
    assert outcome.out.count("(ended)") == 2
    assert outcome.err == "megatrain: interrupted\n"
    assert shown[0].strip()
    assert shown[0].strip() in prompts[1]


def test_the_token_that_the_template_writes_after_an_answer_ends_it(
    talker: Path, tmp_path: Path
) -> None:
    """A base model that was trained on conversations ends its answers with it."""
    import torch

    from megatrain.runtime.training.conversation import ChatSession, Sampling

    folder = tmp_path / "talker"
    shutil.copytree(talker, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<s>"}))
    found = ChatSession(folder, torch.device("cpu"), Sampling(5, 0, 0))
    assert {0, 1} <= set(found._ends)


def test_a_conversation_beyond_the_model_s_limit_is_refused(
    command: Any, talker: Path, typed: Any
) -> None:
    outcome = command("chat", talker, "--prompt", "how are you " * 20, *SHORT)
    assert outcome.status == 2
    assert "allowed: less than the model's own limit of 64" in outcome.err
    assert outcome.err.count("\n") == 1
    typed("how are you " * 20, "how")
    outcome = command("chat", talker, *SHORT)
    assert outcome.status == 0
    assert "begin a new conversation, with /new" in outcome.out


def test_an_answer_ends_at_the_limit_of_the_model(
    talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from megatrain.runtime.training.conversation import ChatSession, Sampling
    from megatrain.simulator.base.errors import UserError

    found, prompt = ChatSession(talker, torch.device("cpu"), Sampling(5, 0, 0)), "how are you"
    length = len(found._ids([{"role": "user", "content": prompt}], prompt))
    found._limit = length
    with pytest.raises(UserError, match=f"found {length} tokens; allowed: less than the model's"):
        found.answer(prompt, print)
    rooms: list[int] = []
    monkeypatch.setattr(
        found._model, "generate", lambda *_, max_new_tokens, **__: rooms.append(max_new_tokens)
    )
    for found._limit in (length + 1, length + 4, length + 6, None):
        found.forget()
        found.answer(prompt, print)
    assert rooms == [1, 4, 5, 5]


def test_a_model_that_does_not_fit_is_refused_with_bytes(
    command: Any, talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Memory:
        available = 1000

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    for device in ("cpu", "auto"):
        outcome = command("chat", talker, "--prompt", "how", "--device", device)
        assert outcome.status == 3
        assert "allowed: 1000 B, the host memory that is free" in outcome.err


def test_a_run_without_a_model_says_how_to_get_one(
    command: Any, finished: Path, tmp_path: Path
) -> None:
    run = tmp_path / "a run"
    shutil.copytree(finished, run, ignore=shutil.ignore_patterns("model"))
    outcome = command("chat", run, "--prompt", "how")
    assert f"fix: megatrain export '{run}' --out MODEL, then megatrain chat MODEL" in outcome.err
    shutil.rmtree(run / "checkpoints")
    outcome = command("chat", run, "--prompt", "how")
    assert f"fix: megatrain train --resume '{run}' --from-scratch" in outcome.err


def test_the_error_for_a_file_names_only_options_of_chat(
    command: Any, talker: Path, tmp_path: Path
) -> None:
    (tmp_path / "chat.jsonl").write_text("{}")
    assert (
        "chat.jsonl: found a file; allowed: a folder"
        in command("chat", tmp_path / "chat.jsonl").err
    )
    (tmp_path / "bare").mkdir()
    shutil.copy(talker / "config.json", tmp_path / "bare")
    error = command("chat", tmp_path / "bare").err
    assert "found no *.safetensors file" in error
    assert error.endswith("fix: name a folder with weights\n")


def test_a_model_that_transformers_cannot_load_is_refused_in_one_line(
    command: Any, talker: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(talker, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "unheard"}))
    outcome = command("chat", folder, "--prompt", "how", *SHORT)
    assert outcome.status == 2
    assert f"model {folder}: found 'unheard'" in outcome.err
    assert "allowed: a language model that transformers can load" in outcome.err
    assert outcome.err.count("\n") == 1
