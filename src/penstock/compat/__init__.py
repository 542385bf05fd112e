"""The peers' own names over our parts: change an import, keep the program."""
