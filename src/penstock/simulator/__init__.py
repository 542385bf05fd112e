"""Times schedules and programs: when every action runs, how much memory each rank holds, where it waits and why.

`simulate` lays a table flat (`event_loops/flat`), runs the event loop on the costs, and returns a `Timeline`. From the timeline follow
the memory curves, the idle gaps with their causes, and the critical path; `comparison/` lays a measured timeline over a predicted one.
"""
