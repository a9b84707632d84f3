"""Errors that several subpackages raise.

[Note: kinds of errors] Three kinds of errors are intended for users:

* ``ValueError``, including `Refused`: raised before training starts, or when a request is made,
  without changing any state. Correct the setting, the file or the request.
* `ExchangeError`: raised in the training thread by the call that would land a fragment, because
  another group has disconnected or is too slow. The flight is lost, but the model and the records
  of all fragments are unchanged. Training cannot continue, but a checkpoint can still be saved.
* `AgreementError`: raised by the same call if groups no longer agree. No landing has committed
  values that differ between groups. Resume all groups from one checkpoint.

The background thread passes every exception to the landing of its flight, so no exception is lost.
"""


class ExchangeError(RuntimeError):
    """Raised when a worker group disconnects or does not respond while a fragment is in flight."""


class AgreementError(RuntimeError):
    """Raised when worker groups disagree on outer parameters or on due fragments, or have
    non-finite values.
    """


class Refused(ValueError):
    """Raised when a request is refused for the reason in the message. Retrying does not help."""


class Malformed(Refused):
    """Raised for bytes that are damaged, malicious, out of bounds, or from a different version."""
