"""Random wrong invocations of the command: a valid invocation of any verb with one mistake.

As a program, this module reads invocations as JSON lines and executes each in its own process, in
which PyTorch cannot be imported. It answers each with a JSON line: [status, standard output,
standard error].
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

VALID: dict[str, tuple[str, ...]] = {
    "check": ("qwen3-0.6b", "--hardware", "h200", "--batch", "2", "--seq", "128"),
    "plan": ("tiny", "--hardware", "h200", "--batch", "2", "--seq", "16", "--out", "new.toml"),
    "simulate": ("plan.toml", "--trace", "trace.json"),
    "sweep": ("tiny", "--hardware", "h200", "--over", "batch", "1", "2", "--out", "new"),
    "calibrate": ("tiny", "--batch", "2", "--seq", "16", "--device", "cpu", "--out", "new.toml"),
    "train": ("plan.toml", "--data", "corpus", "--steps", "2", "--device", "cpu", "--out", "new"),
    "train MODEL": ("tiny", "--data", "corpus", "--device", "cpu", "--out", "new"),
    "chat": ("corpus", "--prompt", "hello", "--device", "cpu"),
    "data": ("corpus", "--model", "tiny"),
    "eval": ("corpus", "--data", "corpus", "--device", "cpu"),
    "export": ("corpus", "--out", "new"),
    "convert": ("corpus", "--state", "exact", "--out", "new"),
    "completion": ("bash",),
    "compare": ("corpus",),
    "report": ("corpus", "--out", "new.html"),
    "figures": ("figure1", "--out", "new"),
    "list": ("models",),
    "quality": ("--out", "new", "--variants", "exact", "--device", "cpu"),
    "serve": ("--static", "new", "--models", "qwen2.5-0.5b", "--machines", "rtx4090"),
}
"""Verb, and for `train` the target -> the other words of a valid invocation. With `chat`, `eval`,
`export`, `convert`, `compare` and `report`, it fails only because the folder is no run."""
BAD_NUMBERS = ("0", "-1", "two", "1e99", "nan", "", "3.5.2", "0x10", "½", "-24GiB", "--")
BAD_SIZES = ("-24GiB", "banana", "0", "", "24 apples", "1e9GiB", "nan")
BAD_NAMES = ("gone", "./gone", "h300", "qwen9", "no/such/name", "a b", "é", "\udce9", "x" * 300)
BAD_OUTS = ("/proc/nope/x", "plan.toml/x", "/dev/null/x", "corpus/one.txt/x", "corpus/one.txt")
BAD_FILES = ("gone.toml", "broken.toml", "binary.toml", "corpus", "corpus/one.txt", "/dev/null")
WORKLOAD = {
    **dict.fromkeys(("--batch", "--seq", "--accumulation", "--loss-chunk"), BAD_NUMBERS),
    "--dtype": ("fp16", "", "BF16", "fp8 "),
    "--fp8-scaling": ("rowwise", "tensorwise", "delayed", ""),
    "--clipping": ("all", "1.0", "AdaGC"),
    "--state": ("master16", "", "EXACT"),
    "--gradients": ("4bit", "", "8"),
    "--attention": ("sdpa",),
    "--optimizer": ("lion", "gone.py", "corpus"),
    **dict.fromkeys(("--device-memory", "--host-memory"), BAD_SIZES),
}
MACHINE = {"--hardware": (*BAD_NAMES, *BAD_FILES), "--policy": ("zigzag", "kbuffer", "gone.py", "")}
WRONG: dict[str, dict[str, tuple[str, ...]]] = {
    "check": {
        **WORKLOAD,
        **MACHINE,
        "--tokens": BAD_NUMBERS,
        "--gpus": (*BAD_NUMBERS, "64"),
        "--cores": BAD_NUMBERS,
    },
    "plan": {**WORKLOAD, **MACHINE, "--out": BAD_OUTS[:-1], "--tokens-per-step": BAD_NUMBERS},
    "simulate": {"--trace": BAD_OUTS[:-1]},
    "sweep": {
        **WORKLOAD,
        **MACHINE,
        "--over": ("slots", "batch", "dtype=bf16"),
        "--grid": BAD_FILES,
        "--out": BAD_OUTS,
        "--jobs": BAD_NUMBERS,
        "--steps": BAD_NUMBERS,
    },
    "calibrate": {
        **WORKLOAD,
        "--grid": ("4by16", "0x16", "", "1x99999999", "4x"),
        "--again": (*BAD_FILES, "h200"),
        "--several": (*BAD_NAMES, *BAD_FILES, "h200"),
        "--device": ("gpu", "cuda:0"),
        "--out": BAD_OUTS[:-1],
    },
    "train": {
        "--data": ("gone", "plan.toml", "/dev/zero", "tiny", "\udce9", "x" * 300),
        "--out": ("corpus", *BAD_OUTS),
        "--config": BAD_FILES,
        "--model": ("./gone", "corpus/one.txt", "a b"),
        "--resume": ("gone", "corpus", "plan.toml"),
        "--set": ("rat=1", "=", "steps", "every_steps=1", "batch=0", "rate=-1", "\udce9=1"),
        "--steps": BAD_NUMBERS,
        "--seed": BAD_NUMBERS[1:],
        "--eval-data": ("gone", "plan.toml"),
        "--eval-fraction": ("1", "-0.1", "much"),
        "--chat-template": ("gone", "corpus"),
        "--split": ("none",),
        "--init": ("zeros",),
        "--device": ("gpu",),
        **dict.fromkeys(("--adagc-factor", "--adagc-decay"), ("-1", "two", "nan", "", "0x10")),
        "--adagc-warm-up": BAD_NUMBERS[1:],
        "--state": ("exact ", "master24"),
        "--gradients": ("8bit",),
        "--fp8-scaling": ("rowwise",),
    },
    "train MODEL": {
        **WORKLOAD,
        "--hardware": (*BAD_NAMES, *BAD_FILES),
        "--policy": ("zigzag", "gone.py"),
        "--tokens-per-step": BAD_NUMBERS,
        "--data": ("gone", "plan.toml", "tiny", "\udce9"),
        "--out": ("corpus", *BAD_OUTS),
        "--chat-template": ("gone", "corpus"),
        "--epochs": BAD_NUMBERS[:-1],
    },
    "data": {
        "--model": (*BAD_NAMES[1:], "corpus"),
        **dict.fromkeys(("--seq", "--row"), BAD_NUMBERS),
        "--columns": ("rows",),
        "--loss": ("some",),
        "--split": ("none",),
        "--chat-template": ("gone", "corpus"),
    },
    "eval": {"--data": ("gone", "/dev/zero", "tiny", "\udce9", "x" * 300), "--device": ("gpu",)},
    "convert": {
        "--state": ("master16", "any", ""),
        "--from-step": BAD_NUMBERS,
        "--out": ("corpus", *BAD_OUTS),
    },
    "completion": {},
    "chat": {
        **dict.fromkeys(("--max-tokens", "--temperature"), BAD_NUMBERS[1:]),
        "--seed": BAD_NUMBERS[1:],
        "--prompt": ("",),
        "--device": ("gpu",),
    },
    "export": {"--from-step": BAD_NUMBERS, "--dtype": ("fp16",), "--out": BAD_OUTS},
    "compare": {},
    "report": {"--out": BAD_OUTS[:-1]},
    "figures": {},
    "list": {},
    "quality": {
        "--variants": ("master16", "exact+zigzag", "", "exact+layer+global", "master24+fp32"),
        "--seeds": ("-1", "two", "", "1.5"),
        **dict.fromkeys(
            ("--steps", "--parallel", "--hidden", "--batch", "--seq", "--evaluations"), BAD_NUMBERS
        ),
        "--lr": ("-1", "two", "nan", ""),
        "--text": ("gone", "plan.toml"),
        "--text-bytes": BAD_SIZES,
        "--out": BAD_OUTS,
        "--show": ("gone", "corpus"),
    },
    "serve": {
        "--static": BAD_OUTS,
        "--models": BAD_NAMES,
        "--machines": BAD_NAMES,
        "--port": BAD_NUMBERS,
    },
}
"""Verb -> option -> refused values."""


def _misspelt(word: str, draw: random.Random) -> str:
    """Returns `word` with two letters exchanged, or with one letter doubled or left out."""
    place = draw.randrange(word.count("-", 0, 2), len(word) - 1)
    first, second = word[place], word[place + 1]
    part = draw.choice([second + first, first + first + second, second])
    found = word[:place] + part + word[place + 2 :]
    return found if not word.startswith(found) else word[:place] + "xx" + word[place:]


def draw_mistake(name: str, draw: random.Random) -> list[str]:
    """Returns an invocation with one mistake. `name` is one of the keys of `VALID`."""
    words, wrong, verb = list(VALID[name]), WRONG[name], name.partition(" ")[0]
    every = ["--json", "--hardware", "--accumulation", "--policy", *wrong]
    kind = draw.choice(
        ["verb", "option", "word", "value lost", *["first word"] * 2, *["value"] * 9]
    )
    if kind == "verb":
        return [_misspelt(verb, draw), *words]
    if kind == "option":
        return [verb, *words, _misspelt(draw.choice(every), draw), "1"]
    if kind == "word":
        return [verb, *words, *draw.choice([("--", "extra", "words"), ("--no-such",), ("-x",)])]
    if kind == "value lost" and wrong:
        return [verb, *words, draw.choice(list(wrong))]
    if kind == "value" and wrong:
        option = draw.choice(list(wrong))
        value = draw.choice(wrong[option])
        joined = draw.choice([True, False]) and option != "--over"
        return [verb, *words, *([f"{option}={value}"] if joined else [option, value])]
    files = ("broken.toml", "edited.toml") if words[0] == "plan.toml" else ()
    return [verb, draw.choice([*BAD_NAMES, *files]), *words[1:]]


def write_files(plan: Path) -> None:
    """Writes broken files and a plan edited by hand into the folder of `plan`."""
    text = plan.read_text()
    (plan.parent / "broken.toml").write_text(text[: len(text) // 2].rpartition("=")[0])
    (plan.parent / "binary.toml").write_bytes(b"\xff\xfe\x00\x81" * 64)
    edited = text.replace("checkpoint_interval = 1", "checkpoint_interval = 2")
    (plan.parent / "edited.toml").write_text(edited)


def draw_mistakes(count: int, seed: int = 0) -> list[list[str]]:
    """Returns wrong invocations, about the same number for each verb."""
    draw, verbs = random.Random(seed), list(VALID)
    return [draw_mistake(verbs[number % len(verbs)], draw) for number in range(count)]


class _NoPyTorch:
    """Refuses to import PyTorch and transformers."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] in ("torch", "transformers"):
            raise AssertionError(f"imports {name}")


def execute(words: list[str]) -> tuple[int | None, str, str]:
    """Returns the status, the standard output and the standard error of one invocation.

    The status is None if an exception escapes. `quality` is a separate program and not a verb.
    """
    from megatrain.experiments.cli import main as cli
    from megatrain.experiments.quality import __main__ as quality

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status: int | None = (
                quality.main(words[1:]) if words[:1] == ["quality"] else cli.main(words)
            )
        except BaseException:
            status = None
            traceback.print_exc(file=err)
    return status, out.getvalue(), err.getvalue()


def main() -> NoReturn:
    """Executes the invocations read from standard input."""
    finder: Any = _NoPyTorch()
    sys.meta_path.insert(0, finder)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(execute(json.loads(line))) + "\n")
        sys.stdout.flush()
    sys.exit(0)


if __name__ == "__main__":
    main()
