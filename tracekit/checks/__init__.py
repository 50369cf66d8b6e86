"""A gate for CI: what a team keeps as its baseline, what may change and by how much, and the history of what was measured."""
