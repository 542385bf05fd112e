"""Starting ranks: a function runs once per rank, on threads of this process or in processes on this machine.

`launch` is what users call. `Workers` starts processes and sends them functions over pipes; each process runs `worker`,
which joins the group of ranks, calls the function and sends back its result or its error.
"""
