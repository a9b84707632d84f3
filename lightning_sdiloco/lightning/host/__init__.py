"""Everything that this package changes in Lightning, or relies on without a promise: patches, refusals, and a register.

In: a trainer that is about to run. Out: replacements that are undone when it ends. Nothing here knows the strategy.
"""
