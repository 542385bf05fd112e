"""Torch's orders: for each rank a list of `_Action`s, `None` for an idle slot.

`generation` writes the orders of torch's schedules from ours, `lowering` adds messages, sharding and reductions by our passes, and
`validation` proves an order and plays it through without running it. `actions` and `tables` translate between torch's actions and
lists and the packed integers and tables of `penstock.ir`, on which all of that work is done.
"""
