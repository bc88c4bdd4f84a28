"""The embedded engine: one model under memory budgets. `engine` is the way in; `docs/internals.md` names the rest."""
