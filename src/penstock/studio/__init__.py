"""The studio: schedules in the browser, from a local server or from one file."""
