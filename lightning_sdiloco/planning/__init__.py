"""What a link allows: predictions, and the settings that suit. Nothing here is needed for training."""
