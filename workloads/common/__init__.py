"""What the workloads share: the model, the loop, the launcher, the single-process reference."""
