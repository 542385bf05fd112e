"""The split backward: weight gradients that are deferred at the operator, without touching user code.

A `Deferrable` knows which parameters of a stage can wait. In its context, `operators` run a forward with stand-ins for those weights
and leave one `DeferredOperator` per call in a `Deferral`; the stage's backward then computes input gradients and hands each of them
the gradient of its output. Running the `Deferral` later adds the weight gradients.
"""
