"""The committed demo: a small causal language model, its tokenizer and its texts.

Owns the package data (``model/``, ``heldout.txt``, ``document.txt``) and the corpus
they were made from (``stowage.demo.corpus``). Importing this package loads nothing.
"""
