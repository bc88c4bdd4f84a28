"""What a machine can do with a model before it is tried: sizes from a config, speeds of the machine, the best placement
for given budgets, and what a trace of prompts would find in the tiers.

Nothing here imports torch at its top, and planning works without it: only measuring a machine's speeds needs it.
"""
