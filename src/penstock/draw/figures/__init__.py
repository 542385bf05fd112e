"""Figures for papers and pages, drawn with matplotlib.

`canvas` holds the style and renders a finished figure; `sheet` lays out panels below each other on one time axis.
`timelines` and `overlay` fill a sheet with `rank_rows`, `memory` and a `legend`; `tradeoff` and `loss_curve` draw single plots.
"""
