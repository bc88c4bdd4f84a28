"""Copies between the device pool and the host arena; the only code that touches the bytes of both."""
