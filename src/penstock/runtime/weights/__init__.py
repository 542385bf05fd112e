"""Values for a model that was built on the meta device: each rank fills only the tensors of its own stages.

`Pipeline(weights=...)` calls `give_weights` of `source.py`, which also states the contract of a source; each source gets the tensors that
the sources before it left without values. `initial.py` draws new values per module or builds layers one by one, `replayed.py` repeats
what building the whole model would draw, and `safetensors.py` reads files.
"""
