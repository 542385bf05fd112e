"""The clock: when every action runs, what each rank holds, where it waits and why."""
