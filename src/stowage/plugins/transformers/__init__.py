"""The face for scripts that call Transformers' ``generate()``: ``PrefixCache``."""
