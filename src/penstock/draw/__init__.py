"""Schedules, programs and timelines as pictures: on the terminal, as figures, as web pages and as Perfetto traces.

A timeline is first cut into `boxes` (one per action) and time slices, and coloured by `palette`; `summary` says in words and
tables what it shows. From there it goes to `terminal` (lines of text), `figures/` (matplotlib) or `html`. `save` picks
the form by the suffix of the file, and writes traces.
"""
