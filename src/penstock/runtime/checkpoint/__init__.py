"""Checkpoints of a training run: saved by any number of ranks, loaded by any other number or into the unpipelined model.

`checkpoints.py` is the entrance, where a failure on one rank becomes a failure on every rank; it also adds the manifest and renames the
folder, so that a checkpoint is complete or absent. `training_state.py` collects what is saved. `storage.py` writes and reads it with
torch.distributed.checkpoint, one set of files per rank, and never runs code found in the files.
"""
