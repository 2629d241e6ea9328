"""What makes the bytes of two engines the same: model files, settings, kernels, request keys."""
