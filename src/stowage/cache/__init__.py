"""The tiered store: what is kept, found, fetched, evicted, and whether loading is worth it.

The state machines here are pure (time is an argument); ``store`` alone drives them with real tiers."""
