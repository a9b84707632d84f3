"""Measurements that the documentation quotes; each module runs by itself."""
