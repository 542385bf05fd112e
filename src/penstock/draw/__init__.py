"""Schedules, programs and timelines as pictures: on the terminal, as figures, as web pages and as Perfetto traces.

A timeline is first cut into `boxes` (one per action) and `time_slices`, and coloured by `palette`; `summary` and `differences` say in
words and tables what it shows. From there it goes to `terminal/` (lines of text), `figures/` (matplotlib), `html` or `trace`.
`save` picks the form by the suffix of the file.
"""
