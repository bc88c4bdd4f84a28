"""Replays a trace of prompts against tiers, policies and numbers of nodes, on the store's own state machine."""
