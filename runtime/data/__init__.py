"""Data: from files to micro-batches. In the order in which text goes through them:

sources (a path -> files), formats, json_rows, csv_rows, tables (files -> rows), columns (a row -> text, a prompt with its completion, or a
conversation), chat, tool_calls, tokenize, in_batches, long_text (-> ids and which of them are targets), cache (-> a file mapped into memory), documents (spans of it),
packing (-> rows of one sequence), corpus (-> the batches of a step). `opening` puts them together for DataOptions, `remarks` and `preview` say what
came of it; `byte_level` replaces the first half for a model without a tokenizer.
"""

from megatrain.runtime.data.corpus import Corpus
from megatrain.runtime.data.opening import open_data
from megatrain.runtime.training.data_options import DataOptions

__all__ = ["Corpus", "DataOptions", "open_data"]
