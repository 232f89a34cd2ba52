"""The data pipeline, from files to micro-batches.

The folders and modules, in the order in which data passes through them:

* `rows`: finds the files of a path, and reads their rows
* `columns`: reads text, a prompt with its completion, or a conversation from a row
* `chat`: renders a conversation as text, and marks the parts that have loss
* `long_text`: tokenizes a text of any length
* `tokens`: stores token ids and targets in a cache file, which is memory-mapped
* `documents`: represents documents as spans of this file
* `corpus`: mixes sources, packs documents into rows, and makes the micro-batches of a step

`opening` combines them according to `options`. `remarks`, `preview`, `summary` and `survey`
describe the result to the user.
"""
