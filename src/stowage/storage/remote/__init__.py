"""What the tiers of stores that many machines share have in common; each store's own part is in a file beside this."""
