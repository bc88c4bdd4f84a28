"""What only CUDA devices run: written for hardware that it has never run on, and tested with stand-ins.

``executor.device`` is the only importer.
"""
