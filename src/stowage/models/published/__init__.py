"""Safetensors checkpoints that others quantised: FP8, MXFP4, NVFP4, compressed-tensors, GPTQ and AWQ, as they lie."""
