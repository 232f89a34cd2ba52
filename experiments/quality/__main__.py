"""Trains the same small model with several state formats, kinds of clipping, optimizers and dtypes,
and compares the loss on held-out text.

    python -m megatrain.experiments.quality --out DIR --variants exact,master24,bf16-sr

The text is the source and documentation of the packages that are installed here. A seed sets the
initial weights and the order of the data, so runs with the same seed are compared in pairs. Each
run is a process of its own. To continue an interrupted command, repeat it: complete runs are not
repeated. `--show DIR` runs nothing and writes the table, the figure and the result again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatrain.experiments.benchmark import commit
from megatrain.experiments.cli import file_arguments, options
from megatrain.experiments.cli.program import run_program
from megatrain.experiments.quality import text
from megatrain.experiments.quality.picture import quality_png
from megatrain.experiments.quality.rows import Part, QualityRow, RunSettings, load_rows
from megatrain.experiments.quality.running import run_all, specs
from megatrain.experiments.quality.summary import summarize_variants, table
from megatrain.experiments.quality.variant import variants, workload_of
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import convert, read_json, write_json, write_text
from megatrain.simulator.model.state_format import EXACT

_SETTINGS, _RESULT, _TABLE, _PICTURE = "settings.json", "quality.json", "table.md", "quality.png"


def seeds(words: str) -> list[int]:
    """Returns the seeds in a comma-separated list, each once. It is the argparse type of `--seeds`.
    Raises UserError if there is none or if one is not a whole number.
    """
    parts = [part for part in words.replace(" ", "").split(",") if part]
    if not parts:
        raise UserError("--seeds", found="none", allowed="numbers", fix="write it like --seeds 0,1")
    return list(dict.fromkeys(int(options.number(int, 0, part, "--seeds")) for part in parts))


def parser() -> options.OneLineParser:
    """Returns the parser for the options of the comparison."""
    parser = options.OneLineParser(
        prog="python -m megatrain.experiments.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--out", type=Path, metavar="DIR", help="folder for runs and result")
    place.add_argument("--show", type=Path, metavar="DIR", help="summarize the runs in DIR")
    parser.add_argument(
        "--variants",
        type=variants,
        default=variants("exact,master24,bf16-sr"),
        metavar="NAMES",
        help=(
            "STATE[+WORD ...] each: a state format and values of other fields of a workload, such"
            " as exact+layer (default exact,master24,bf16-sr)"
        ),
    )
    parser.add_argument("--seeds", type=seeds, default=[0, 1, 2], help="default 0,1,2")
    parser.add_argument(
        "--fine-tune",
        action="store_true",
        help=(
            "also train each variant at a small constant rate, from the weights of the `exact` run"
            " with the lowest seed"
        ),
    )
    parser.add_argument(
        "--parallel",
        type=options.whole("--parallel"),
        default=3,
        help="runs at a time, each a process; a small model does not fill a GPU (default 3)",
    )
    for name, default, what in (
        ("--steps", 3000, "optimizer steps from random weights"),
        ("--fine-tune-steps", 1000, "optimizer steps of a fine-tuning"),
        ("--evaluations", 6, "evaluations in each run"),
        ("--hidden", 1024, "width of the model, a multiple of 128"),
        ("--layers", 8, "decoder layers"),
        ("--vocabulary", 8192, "tokens of the tokenizer"),
        ("--batch", 8, "rows of a step"),
        ("--seq", 1024, "tokens of a row"),
    ):
        parser.add_argument(
            name, type=options.whole(name), default=default, help=f"{what} (default {default})"
        )
    for name, rate, what in (
        ("--lr", 6e-4, "peak learning rate from random weights"),
        ("--fine-tune-lr", 1e-6, "learning rate of a fine-tuning"),
    ):
        parser.add_argument(
            name, type=options.real(name), default=rate, help=f"{what} (default {rate:g})"
        )
    parser.add_argument(
        "--text",
        type=Path,
        action="append",
        metavar="DIR",
        help="folder with text; may be repeated (default: this Python's packages)",
    )
    parser.add_argument(
        "--text-bytes",
        type=options.size("--text-bytes"),
        default=96 * 2**20,
        metavar="SIZE",
        help="read no further file after this much text (default 96MiB)",
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="layers run through torch.compile (default)",
    )
    parser.add_argument(
        "--commit", metavar="HASH", help="commit to record if the code is not in a git repository"
    )
    options.add_device(parser)
    return parser


def model_config(settings: RunSettings) -> dict[str, object]:
    """Returns `config.json` of a Llama with the sizes of `settings`.

    Raises UserError if the width is not a multiple of the head size, which is 128, or 16 for widths
    below 128.
    """
    head = 128 if settings.hidden >= 128 else 16
    if settings.hidden % head:
        raise UserError(
            "--hidden",
            found=settings.hidden,
            allowed=f"a multiple of {head}",
            fix=f"write it like --hidden {-(-settings.hidden // head) * head}",
        )
    heads = settings.hidden // head
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": settings.hidden,
        "intermediate_size": settings.hidden * 5 // 2,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4 if heads % 4 == 0 else heads,
        "head_dim": head,
        "vocab_size": settings.vocabulary,
        "max_position_embeddings": settings.sequence,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": 0,
    }


def checked_settings(args: argparse.Namespace) -> RunSettings:
    """Returns the settings that the options name, and stores them in the folder.

    Raises UserError if the folder has runs with other settings, or if a variant or the model
    cannot be trained. In this case nothing is written.
    """
    settings = RunSettings(
        hidden=args.hidden,
        layers=args.layers,
        vocabulary=args.vocabulary,
        batch=args.batch,
        sequence=args.seq,
        steps=args.steps,
        rate=args.lr,
        fine_tune_steps=args.fine_tune_steps,
        fine_tune_rate=args.fine_tune_lr,
        evaluations=args.evaluations,
        text_bytes=args.text_bytes,
        compiled=args.compile,
    )
    for name in args.variants:
        workload_of(name, settings)
    model_config(settings)
    path = args.out / _SETTINGS
    if path.is_file():
        stored = convert(read_json(path), RunSettings, str(path))
        differing = [
            name
            for name in RunSettings.__struct_fields__
            if getattr(stored, name) != getattr(settings, name)
        ]
        if differing:
            raise UserError(
                str(args.out),
                found=f"runs with another {', '.join(differing)}",
                allowed="the settings of its runs",
                fix="give the same options, or name another folder with --out",
            )
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        write_json(path, settings)
    return settings


def show(
    folder: Path, arguments: dict[str, object] | None = None, commit_hash: str | None = None
) -> str:
    """Writes result, table and picture of the runs in `folder`, and returns the table.

    Args:
        folder: the folder of the comparison.
        arguments: the options of the command, to record; None keeps the recorded ones.
        commit_hash: the commit to record with the options.

    Raises UserError if there are no runs.
    """
    rows = load_rows(folder)
    if not rows:
        raise UserError(
            str(folder), found="no runs", allowed="a folder of --out", fix="name that folder"
        )
    summaries, settings = summarize_variants(rows, folder), rows[0].spec.settings
    origin: dict[str, object] = {}
    if arguments is not None:
        origin = {"date": time.strftime("%Y-%m-%d"), "commit": commit_hash, "arguments": arguments}
    elif (folder / _RESULT).is_file():
        before = read_json(folder / _RESULT)
        origin = {key: before[key] for key in ("date", "commit", "arguments") if key in before}
    data = folder / "data" / text.SUMMARY
    done = [row for row in rows if not row.failure]
    result = {
        **origin,
        "settings": settings,
        "model": model_config(settings),
        "parameters": done[0].parameters if done else None,
        "tokens": {row.spec.part: row.tokens for row in done},
        "epoch_tokens": done[0].epoch_tokens if done else None,
        "held_out_tokens": done[0].held_out_tokens if done else None,
        "machine": done[0].machine if done else {},
        "text": read_json(data) if data.is_file() else None,
        "summary": summaries,
        "runs": [
            {"name": row.spec.name, "parallel": row.spec.parallel}
            | {
                key: getattr(row, key)
                for key in (
                    "training",
                    "held_out",
                    "step_seconds",
                    "interval_seconds",
                    "seconds",
                    "movement",
                    "failure",
                )
            }
            for row in rows
        ],
    }
    write_json(folder / _RESULT, result)
    lines = table(summaries)
    write_text(folder / _TABLE, f"```\n{lines}\n```\n")
    quality_png(folder / _PICTURE, summaries, describe(settings, done))
    return lines


def describe(settings: RunSettings, done: Sequence[QualityRow]) -> str:
    """Returns one line on the model and the tokens of a run, or an empty text without a run."""
    if not done:
        return ""
    row = done[0]
    return (
        f"{row.parameters / 1e6:.1f} M parameters, width {settings.hidden}, {settings.layers}"
        f" layers, {settings.vocabulary:,} tokens in the vocabulary; {settings.steps:,} steps of"
        f" {settings.step_tokens:,} tokens, {row.epoch_tokens / 1e6:.1f} M tokens an epoch"
    )


def run(args: argparse.Namespace) -> int:
    """Trains all variants and shows the result. Returns 1 if a run failed, otherwise 0."""
    if args.show:
        print(show(args.show))
        return 0
    begin = time.monotonic()
    options.refuse_missing_gpu(args)
    if args.fine_tune and EXACT not in args.variants:
        raise UserError(
            "--fine-tune",
            found=f"--variants without {EXACT}",
            allowed=f"{EXACT}, because fine-tuning starts from its weights",
            fix=f"add {EXACT} to --variants",
        )
    if not args.out.is_dir():
        file_arguments.check_writable(args.out)
    for root in args.text or ():
        if not root.is_dir():
            raise UserError(
                "--text",
                found=f"{root}, which is not a folder",
                allowed="a folder with text",
                fix="check the path",
            )
    settings = checked_settings(args)
    roots = args.text or text.roots()
    found = text.prepare(args.out / "data", roots, settings.text_bytes, model_config(settings))
    print(
        f"text: {found.training.files:,} files, {found.training.bytes / 1e6:.1f} MB for training;"
        f" {found.held_out.files:,} files, {found.held_out.bytes / 1e6:.2f} MB held out;"
        f" {time.monotonic() - begin:.1f} s",
        flush=True,
    )
    parts: list[Part] = ["training", "fine-tune"] if args.fine_tune else ["training"]
    runs = [
        specs(part, args.variants, args.seeds, settings, device=args.device, parallel=args.parallel)
        for part in parts
    ]
    from megatrain.experiments.quality.child import tokenize

    tokenize(runs[0][0], args.out / "data")
    print(f"tokenized after {time.monotonic() - begin:.1f} s", flush=True)

    def ended(row: QualityRow) -> None:
        after = f"{row.spec.name}, after {time.monotonic() - begin:.0f} s: "
        print(
            after
            + (
                f"failed: {row.failure}"
                if row.failure
                else f"held-out loss {row.held_out[-1][1]:.4f}, step {1e3 * row.step_seconds:.1f}"
                f" ms, {1e3 * row.interval_seconds:.1f} ms with data, {row.seconds:.1f} s"
            ),
            flush=True,
        )

    try:
        for part in runs:
            run_all(args.out, part, min(args.seeds), ended)
    except KeyboardInterrupt as error:
        error.add_note(f"interrupted; repeat the command to continue; runs are in {args.out}")
        raise
    arguments = {
        key: [str(each) for each in value] if key == "text" and value else value
        for key, value in vars(args).items()
    } | {"out": str(args.out)}
    print(show(args.out, arguments, commit() or args.commit))
    first = next((row for row in load_rows(args.out) if not row.failure), None)
    if first is not None:
        print(
            f"tokens: {first.epoch_tokens:,} an epoch, {settings.steps * settings.step_tokens:,}"
            f" seen in each training, {first.held_out_tokens:,} held out"
        )
    print(f"wrote {args.out / _RESULT}, {_TABLE}, {_PICTURE} in {time.monotonic() - begin:.0f} s")
    return 1 if any(row.failure for row in load_rows(args.out)) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison. Returns 0 if all runs are complete, 1 if some failed, 2 for a mistake of
    the user.
    """
    return run_program("quality", lambda: run(parser().parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
