"""What this package changes in Lightning, or relies on although nobody promises it: patches, refusals and a register.

In: a trainer that is about to run. Out: replacements that are undone when it ends. Nothing here knows the strategy.
"""
