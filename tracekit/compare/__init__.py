"""Run against run: what a run measured as figures, two sides aligned, changes beyond their own noise, causes before consequences."""
