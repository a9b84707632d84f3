"""Projects that nobody here wrote, with the one-line change: what they do with DDP they do with worker groups."""
