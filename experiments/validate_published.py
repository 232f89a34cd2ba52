"""Recomputes every published figure that the policies can predict, and says how far off they are: `python -m megatrain.experiments.validate_published`.

Published are the paper's figures and tables (arXiv 2604.05091), its authors' repository, and runs measured on H200 machines on 2026-11-21. What had to be
assumed stands once a machine in `published/settings.toml`. Deterministic; some seconds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatrain.experiments.options import OneLineParser
from megatrain.experiments.validation.predict import predict
from megatrain.experiments.validation.report import Result, as_csv, as_text, records, summary
from megatrain.experiments.validation.rows import load_rows, load_settings
from megatrain.simulator.errors import UserError


def validate() -> list[Result]:
    """Every row and its prediction."""
    settings = load_settings()
    return [Result(row=row, predicted=predict(row, settings[row.setting])) for row in load_rows()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m megatrain.experiments.validate_published", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write every row")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, and nothing else")
    try:
        args = parser.parse_args(arguments)
        results = validate()
        if args.csv:
            try:
                args.csv.write_text(as_csv(results))
            except OSError as error:
                raise UserError(str(args.csv), found=(error.strerror or "error").lower(), allowed="a path that can be written", fix="name another") from None
    except UserError as error:
        print(f"validate_published: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"summary": summary(results), "rows": records(results)}) if args.json else as_text(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
