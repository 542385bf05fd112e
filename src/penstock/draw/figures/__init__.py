"""Figures for papers and pages, drawn with matplotlib.

`canvas` holds the style and renders a finished figure; `sheet` lays out panels below each other on one time axis,
with a legend at the end. `timelines` fills a sheet with `rank_rows`; `plots` draws single plots.
"""
