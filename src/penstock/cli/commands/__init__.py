"""One file per command.

Each has the function with its arguments and help, then how its result is written as lines and as JSON. The function reads its inputs by
`cli.sources`, calls the library, and writes by `cli.output`; `cli.app` lists all commands.
"""
