"""Mutants: small wrong versions of the modules that carry the guarantees, each of which some unit test must refuse."""
