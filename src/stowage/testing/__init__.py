"""Parts for tests of Stowage and of what is built on it: faults on demand, tiny models. Imports nothing by itself."""
