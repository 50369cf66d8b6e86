"""Reference workloads: one small but real training job for every strategy of distributed training, made to be recorded and read.

Reading order: ``common/transformer`` (the model), ``common/loop`` (what a workload is and how it runs), ``ddp``, ``fsdp2``, then any other.
"""
