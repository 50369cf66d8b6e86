"""Tables of one rank: events, steps, the link from launch to kernel, interval sets, and the clock across ranks."""
