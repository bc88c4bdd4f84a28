"""What a user states: budgets, tiers, addresses, and where each setting comes from."""
