"""The input and the result of a step. Imports `tensors` alone.

`step_input` splits a batch into microbatches (`microbatch`) and weighs them (`loss`); the executor then runs the `StepInput`.
While it does, stages report losses and metrics on the side (`result`), and every rank fills its `ResultShare`.
At the end of the step all ranks exchange their shares, from which each builds the same `StepResult`.
"""
