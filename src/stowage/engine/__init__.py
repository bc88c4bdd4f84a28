"""The embedded engine: one model under memory budgets. `engine` is the way in; `docs/architecture.md` names the
rest.
"""
