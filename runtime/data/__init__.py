"""The data pipeline, from files to micro-batches.

The folders and modules, in the order in which text passes through them:

* `rows`: a path -> files -> rows
* `columns`: a row -> text, a prompt with its completion, or a conversation
* `chat`: a conversation -> text, and which of it the model should learn
* `long_text`: a text of any length -> token ids
* `tokens`: rows -> token ids and targets, in a file that is mapped into memory
* `documents`: spans of this file
* `corpus`: the documents of several sources -> rows of one sequence -> the micro-batches of a step

`opening` combines them according to DataOptions (`options`). `remarks`, `preview`, `summary` and
`survey` describe the result to the user.
"""
