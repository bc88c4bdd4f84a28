"""Compares runs with and without offloading (parity, scored tasks), and packs checkpoints and checks their quality."""
