"""Checkpoints of a training run: saved by any number of ranks, loaded by any other number or into the unpipelined model.

`checkpoints.py` is the entrance; `training_state.py` collects what is saved, from `model_state.py` (parameters under the names of the
unpipelined model) and `optimizer_state.py` (optimizers in torch's flattened form). On a save, `writing.py` writes one set of files per
rank with torch.distributed.checkpoint, and `files.py` adds the manifest and renames the folder, so that a checkpoint is complete or
absent. On a load, `reading.py` compares the saved names and shapes with the model and fills this rank's tensors; `safe_pickle.py` keeps
it from running code found in the files, and `collective_steps.py` makes a failure on one rank a failure on every rank.
"""
