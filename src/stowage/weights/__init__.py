"""Weights under a budget: which memory each parameter lives in, and how a module gets its own when its forward begins.

May import core and errors. Never decides what is computed: a parameter that is delivered has the bytes that
Transformers' own loading left in it, in the form in which it left them.
"""
