"""Predicts every published figure that the policies can predict, and reports the errors.

    python -m megatrain.experiments.validate_published

The figures are from the paper (arXiv 2604.05091), from its authors' repository and others, and from
runs of this project on H200 machines on 2026-11-21. `published/settings.toml` has the assumptions
about each machine. The result is deterministic and takes some seconds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatrain.experiments.cli.options import OneLineParser
from megatrain.experiments.cli.program import run_program
from megatrain.experiments.validation.predict import implied_batch, predict
from megatrain.experiments.validation.report import (
    ValidationResult,
    as_csv,
    as_text,
    records,
    summary,
)
from megatrain.experiments.validation.rows import load_rows, load_settings
from megatrain.simulator.base.files import write_text
from megatrain.simulator.hardware.shared import library_only


@library_only()
def validate() -> list[ValidationResult]:
    """Returns every published row with its prediction, from the library's own estimates."""
    settings = load_settings()
    return [
        ValidationResult(
            row=row,
            predicted=predict(row, settings[row.setting]),
            implied=implied_batch(row, settings[row.setting]),
        )
        for row in load_rows()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the options, prints the errors, and returns the exit status."""
    parser = OneLineParser(
        prog="python -m megatrain.experiments.validate_published",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write all rows as CSV")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")

    def run() -> int:
        args = parser.parse_args(arguments)
        results = validate()
        if args.csv:
            write_text(args.csv, as_csv(results))
        print(
            json.dumps({"summary": summary(results), "rows": records(results)})
            if args.json
            else as_text(results)
        )
        return 0

    return run_program("validate_published", run)


if __name__ == "__main__":
    sys.exit(main())
