"""One file per command: the function with its arguments and help, then how its result is written as lines and as JSON."""
