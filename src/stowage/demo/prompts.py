"""What the demo asks: the beginnings of sentences that the model continues after the shared document."""

QUESTIONS = (
    "If the module is not found in the search path,",
    "A package is",
    "A module can be loaded",
)
NEW_TOKENS = 40
TEMPERATURE = 0.8
SEED = 7
"""A model this small repeats itself when it is greedy. The draws are seeded, so identical answers still mean identical
logits (up to rounding far below a token's probability)."""
