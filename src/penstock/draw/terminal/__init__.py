"""Pictures for the terminal: lines of coloured text.

`grid` draws a schedule or program, `timeline` a timeline; both give `Line`s, which are pieces of text with a tone.
`lines` turns those into plain text or into text with the terminal's colour codes.
"""
