"""From a schedule to a program: one pass a file, each a small value that prints and parses as `name{option=value}`."""
