"""How ``tracekit run`` comes into a program that does not know of it: this folder stands on PYTHONPATH of its command, and only there."""
