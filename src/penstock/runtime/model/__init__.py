"""A model as stages, and what each stage is on its rank.

`partition` (or `hugging_face`) cuts a model into one module per stage, which `random_streams` and `transforms` (compiled and recomputed
stages) change; a `Stage` then runs its module for the executor. `tied_parameters` and `running_statistics` keep parameters and statistics
that several ranks hold equal from step to step, and `module_state` captures and restores everything that a forward may change.
"""
