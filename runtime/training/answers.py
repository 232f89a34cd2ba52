"""Reads and writes `answers.jsonl`, the answers of a run's models, one per line.

This module does not import torch.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import read_text, write_text

_FILE = "answers.jsonl"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a run's model to one question."""

    step: int
    """The number of the step after which the model was exported."""
    model: str
    """The name of the model's folder in the run folder."""
    question: str
    """The question."""
    answer: str
    """The generated text. Each token was the most likely one."""


def read_answers(run: Path) -> list[Answer]:
    """Returns the answers in the folder of a run, the newest last.

    Raises UserError if the file is damaged.
    """
    path = run / _FILE
    if not path.is_file():
        return []
    try:
        return msgspec.json.Decoder(Answer).decode_lines(read_text(path))
    except msgspec.MsgspecError as error:
        raise UserError(
            str(path),
            found=str(error),
            allowed="a line of JSON for each answer, as `megatrain train` writes it",
            fix="remove the file",
        ) from None


def add_answer(run: Path, answer: Answer) -> None:
    """Adds an answer to the file. It replaces an answer of the same model to the same question."""
    key = (answer.model, answer.question)
    kept = [other for other in read_answers(run) if (other.model, other.question) != key]
    encoded = msgspec.json.Encoder().encode_lines([*kept, answer])
    write_text(run / _FILE, encoded.decode())
