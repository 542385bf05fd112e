"""The proof: one named rule an invariant, the deadlock search, and findings with a picture of the place."""
