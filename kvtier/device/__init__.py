"""GPU memory, streams and kernels, and the same on the CPU. `cuda` is the only module that imports cupy."""
