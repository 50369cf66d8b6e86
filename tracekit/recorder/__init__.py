"""In-process recording of a training loop: traces, manifest, memory owners. The only room that imports torch.

``from tracekit import record`` is the way in; what else a training loop can call is on the ``Recorder`` that it yields.
"""
