"""The command ``sdiloco doctor``: whether the machines of a training can work together; not needed for training."""
