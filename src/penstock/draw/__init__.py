"""Schedules, programs and timelines as pictures."""
