"""Values for a model that was built on the meta device: each rank fills only the tensors of its own stages.

`Pipeline(weights=...)` calls `give_weights` of `source.py`, which also states the contract of a source; each source gets the tensors that
the sources before it left without values. The sources there draw new values, per module or layer or as building the whole model would;
`safetensors.py` reads files.
"""
