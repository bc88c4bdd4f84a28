"""Odd models, odd settings, odd schedules: random cases against a roomy run and against Transformers."""
