"""Errors that several rooms share: those that end a run, and what is refused."""


class ExchangeError(RuntimeError):
    """A worker group did not answer, or went away, while a fragment was in flight."""


class AgreementError(RuntimeError):
    """The worker groups no longer agree: on the outer parameters, on what is due, or on finite
    values.
    """


class Refused(ValueError):
    """A request was refused, for the reason given: it is not allowed, or does not fit.

    Asking again does not help.
    """


class Malformed(Refused):
    """What was read is not what it should be: damaged, of another version, out of bounds, or
    malicious.
    """
