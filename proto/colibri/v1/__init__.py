"""colibri.v1: the contracts, and the code that protoc generated from them (see `make proto`)."""
