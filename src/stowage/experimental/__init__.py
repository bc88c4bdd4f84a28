"""What only CUDA devices run, and what has not met most of the hardware that it is for. ``executor.device`` is the only
importer; tests stand in for the device.
"""
