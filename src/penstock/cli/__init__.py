"""The command line: one command a file, its body imported when it is called."""
