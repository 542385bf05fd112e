"""Cases of pipeline parallelism that an engine can get wrong, each judged by numbers.

`engines` runs a list of stages by torch's own package, by the drop-in or by `Pipeline`; `outcome` says what a case showed. The cases
are in `gradients`, `steps`, `orders` and `waste`; `benchmarks/peer_cases.py` runs them in processes of their own and prints the table.
"""
