"""The outer optimizer, and the learning rate of each of its rounds."""
