"""The studio: schedules in the browser, from a local server or from one file.

A request comes to `server`, which checks its origin (`security`) and hands it to a `worker` process; there, `handlers` turns the body
into a `document`, within the `limits` of the studio. Plans are read by `plan_request`, with their clusters by `cluster_text`, and made by
`plan_jobs`, one process per plan.
`page` writes documents into the HTML file that `web/` builds.
"""
