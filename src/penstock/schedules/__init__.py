"""The zoo: who computes what and when, one algorithm a file, and the registry that knows them by name."""
