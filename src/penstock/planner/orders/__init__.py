"""Orders of compute actions as flat arrays: made by list scheduling, timed, and improved by local search."""
