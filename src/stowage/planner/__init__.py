"""Plans how a machine runs a model: sizes from a config, measured speeds, the best placement for given budgets.

No module here imports torch when it is imported. Only measuring a machine's speeds, and building a model from its
config, need it.
"""
