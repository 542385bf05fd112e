"""Everything of torch that has no public name, so that a change in torch is met in one place.

A private name that several modules use has its home here, under a plain name: `pytree`, `tensors`, `modules`, `autograd`. One that a
single module uses stays in that module, which looks it up with `find_private`, `check_names` or `check_private`: they refuse a torch
without the name in a sentence with its version. `version` holds the range of versions that work. This room imports none of the others.
`python tests/runtime/torch_internals/private_torch_names.py` lists all names.
"""
