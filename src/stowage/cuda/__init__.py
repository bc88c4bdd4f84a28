"""What only CUDA devices run: copies between device and host, graphs, a paged attention kernel.

``executor.device`` is the only importer.
"""
