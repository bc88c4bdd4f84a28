"""The fallback executor: models whose attention cannot be paged, computed by Transformers' own, one sequence at a time.

    what a layer keeps  ->  ``models.fallback_layout``, by the class of the layer in Transformers' own cache
    where it keeps it   ->  ``cache_layers``   in the device pools, as for every other model; given out in one piece
    what computes it    ->  ``runner``         one sequence after the other, with the model's own attention
    is that the same?   ->  ``trial``          before the first prompt: to the bit what Transformers' own cache gives

All else (admission, reuse from every tier, preemption, budgets) is the engine's, and knows nothing of it.
"""
