"""One engine of data parallelism on virtual ranks; DDP, ZeRO stages 1 to 3, FSDP1 and FSDP2 are its settings.

To read in this order: ``strategies`` (what is sharded, how, and when reduced), ``layouts`` (which elements a rank keeps), ``shards``
(gather, free, reduce, update one unit), ``training`` (the order of a step), ``run`` (train, and what comes out). The experiments
``tracekit simulate fsdp`` and ``zero`` choose settings and make tables and checks of what comes out.
"""
