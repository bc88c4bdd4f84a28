"""From a name to a model: its checkpoint, its identity, its family, and what each of its layers caches."""
