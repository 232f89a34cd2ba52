"""Fixtures of the data tests: small tokenizers with and without a chat template, and data files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_rows import WORK
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatrain.runtime.data.opening import open_data
from megatrain.runtime.data.options import DataOptions
from megatrain.simulator.model.workload import Workload

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation"
    " %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif"
    " %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
EMPTY_THOUGHT = (  # as in Qwen3, only the last assistant turn begins with a thought
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last"
    " %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if"
    " add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COUNTING = (
    "{{ messages | length }}:{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content"
    " }}<|im_end|>\n{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{"
    " raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content"
    " }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TEMPLATES = {
    "marked": MARKED,
    "unmarked": UNMARKED,
    "thought": EMPTY_THOUGHT,
    "counting": COUNTING,
    "strict": STRICT,
}
TEXT = ["hello world, you are the one", "the other one is you", "are the words in the world"]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns a function that makes a model folder with a byte-level BPE of about 300 ids.

    Ids 0 to 3 are special tokens.
    """
    made: dict[tuple, Path] = {}

    def make(template: str | None = None, **specials: str) -> Path:
        key = (template, *specials.items())
        if key not in made:
            tokenizer = Tokenizer(models.BPE())
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            trainer = trainers.BpeTrainer(
                vocab_size=300,
                special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>", "<s>"],
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            )
            tokenizer.train_from_iterator(TEXT, trainer)
            fast = PreTrainedTokenizerFast(
                tokenizer_object=tokenizer,
                **(specials or {"eos_token": "<|end|>"}),
                extra_special_tokens=["<|im_end|>"],
            )
            fast.chat_template = TEMPLATES[template] if template else None
            made[key] = tmp_path_factory.mktemp("tokenizer")
            fast.save_pretrained(made[key])
        return made[key]

    return make


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that writes rows to a JSONL file. Strings become lines unchanged."""

    def write(rows: list[Any], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text(
            "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows),
            encoding="utf-8",
        )
        return path

    return write


@pytest.fixture
def opened(tmp_path: Path, tokenizer_folder: Callable[..., Path]) -> Callable[..., Any]:
    """Returns a function that opens data: (training corpus, evaluation corpus, notes)."""

    def make(
        data: Path | tuple[str, ...],
        *,
        template: str | None = "marked",
        work: Workload = WORK,
        vocabulary: int = 400,
        folder: Path | None = None,
        seed: int = 0,
        on_summary: Callable[[Any], object] = lambda _: None,
        **changes: Any,
    ) -> Any:
        notes: list[str] = []
        options = DataOptions(
            **{
                "data": data if isinstance(data, tuple) else str(data),
                "cache": str(tmp_path / "cache"),
                "packing": "documents",
                **changes,
            }
        )
        return (
            *open_data(
                options,
                work,
                folder or tokenizer_folder(template),
                vocabulary,
                notes.append,
                seed=seed,
                on_summary=on_summary,
            ),
            notes,
        )

    return make
