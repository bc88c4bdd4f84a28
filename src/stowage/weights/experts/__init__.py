"""Mixture-of-experts weights: a bounded cache of the experts that routers choose."""
