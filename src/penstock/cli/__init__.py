"""The command line.

`main` runs the commands that `app` puts together and turns errors into exit codes. `commands/` has one file per command, and each
imports the library when it is called, so that `penstock --help` stays quick. A command turns its arguments into a `ScheduleSource` or
`TimelineSource`, calls the library and hands the result to `output`; `training/` holds the longer run of `penstock train`.
"""
