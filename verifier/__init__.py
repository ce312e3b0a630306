"""Judge every hand-over of an RL post-training stack, on the real systems."""

__version__ = "0.1.0"
