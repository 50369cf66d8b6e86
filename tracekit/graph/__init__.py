"""The graph of a job's steps over all ranks, its replay with other costs, and what follows from that.

Reading order: ``local`` (one rank's work and the edges on it), ``edges`` (how they are found), ``build`` (all ranks joined), ``replay``.
"""
