"""`penstock train` around the training loop of `penstock.runtime.train`.

`options` checks what was asked for before anything starts. `session` then measures, plans, proves, trains and compares, while
`report` prints what happens, and writes all of it as a web page.
"""
