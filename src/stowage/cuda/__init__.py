"""What only CUDA devices run: copies between device and host, graphs, kernels that attend and unpack.

``executor.device`` is the only importer.
"""
