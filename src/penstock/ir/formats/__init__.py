"""The text form of actions, and the files in which schedules and programs are kept.

`action_text` formats and parses one action. `csv_form` reads and writes PyTorch's CSV and `json_form` our JSON; `files` chooses
between them by the suffix. A CSV has only actions, so the microbatches, placement and graph are inferred from them. `reading` opens
files and checks fields, with errors that name the place.
"""
