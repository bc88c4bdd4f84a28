"""The committed demo: a small causal language model, its tokenizer and its texts.

Owns the package data (``model/``, ``heldout.txt``, ``document.txt``, ``calibration.txt``). Importing this package loads
nothing.
"""
