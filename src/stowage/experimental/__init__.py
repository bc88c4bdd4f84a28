"""Code for CUDA devices, which has not run on the hardware that it is for. ``executor.device`` is the only way in."""
