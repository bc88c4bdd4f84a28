"""The fallback executor: models whose attention cannot be paged, with Transformers' own, one sequence at a time.

    ``models.fallback_layout``  what each cache layer keeps, by the class of Transformers' own cache layer
    ``cache_layers``            keeps it in the device pools, as for every other model; hands it out contiguously
    ``runner``                  computes one sequence after the other, with the model's own attention
    ``trial``                   before the first prompt: are logits bit-identical to those with Transformers' own cache?

All else (admission, reuse from every tier, preemption, budgets) is the engine's, which treats it like any other model.
"""
