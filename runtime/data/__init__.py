"""The data pipeline, from files to micro-batches.

The modules, in the order in which text passes through them:

* `sources`: a path -> files
* `formats`, `json_rows`, `csv_rows`, `tables`: files -> rows
* `columns`: a row -> text, a prompt with its completion, or a conversation
* `chat`, `chat_template`, `tool_calls`, `tokenize`, `in_batches`, `long_text`: -> token ids and
  targets
* `cache`: -> a file that is mapped into memory
* `documents`: spans of this file
* `mixture`: the documents of several sources, with weights
* `packing`: documents -> rows of one sequence
* `corpus`: rows -> the micro-batches of a step

`reading` and `opening` combine them according to DataOptions. `remarks`, `preview` and `survey`
describe the result to the user. For a model without a tokenizer, `byte_level` replaces the modules
up to `cache`.
"""
