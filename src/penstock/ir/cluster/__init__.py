"""Unequal devices and links.

`cluster.py` has the devices of a cluster with their speeds and memory, and the links between them; `links.py` has the tables of latency,
bandwidth and shared lanes that costs hold as well. A cluster is assigned to the ranks of a pipeline, and its speeds and links then become
part of the costs.
"""

from penstock.ir.cluster.cluster import Cluster, Device, Speeds, share_rows

__all__ = ["Cluster", "Device", "Speeds", "share_rows"]
