"""From a model and a memory limit to the best schedule found, with a bound that says how good it is."""
