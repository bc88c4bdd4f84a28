"""The fallback executor: models whose attention cannot be paged, computed by Transformers' own, one sequence at a time.

    what a layer keeps  ->  ``looking``   by the class of the layer in Transformers' own cache
    where it keeps it   ->  ``pooled``    in the device pools, like that of every other model; handed out in one piece
    what computes it    ->  ``runner``    one sequence after the other, with the attention that the model came with
    is that the same?   ->  ``proof``     before the first prompt: to the bit what Transformers' own cache gives

All else (admission, reuse from every tier, preemption, budgets) is the engine's, and knows nothing of it.
"""
