"""From work to logits: batches, attention over the paged pool, and what makes a row's bits its own."""
