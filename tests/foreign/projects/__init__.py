"""One file per project: how its users fit, validate and predict, in the project's own words."""
