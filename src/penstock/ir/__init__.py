"""The language of pipelines: actions, placements, schedules, programs, their dependencies and their text forms."""
