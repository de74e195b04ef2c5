"""The simulated server: real hooks, real scheduling, a latency surface in place of the GPU."""
