"""Files of this folder that import what only the environment of `make foreign` has."""

collect_ignore_glob = ["projects/*", "litgpt_loop.py"]
