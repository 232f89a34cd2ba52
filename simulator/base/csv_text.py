"""csv_text: formats rows as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence


def csv_text(rows: Sequence[Mapping[str, object]]) -> str:
    """Returns rows as CSV text with a header line. All rows have the same keys. Raises IndexError
    if there is no row.

    >>> csv_text([{"name": "a", "size": 1}, {"name": "b, c", "size": 2}])
    'name,size\\na,1\\n"b, c",2\\n'
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
