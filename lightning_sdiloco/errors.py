"""Errors that end a run because the worker groups can no longer go on together."""


class ExchangeError(RuntimeError):
    """A worker group did not answer, or went away, while a fragment was in flight."""


class AgreementError(RuntimeError):
    """The worker groups no longer agree: on the outer parameters, on what is due, or on finite values."""
