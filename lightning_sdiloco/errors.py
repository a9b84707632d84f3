"""Errors that several subpackages share.

[Note: kinds of errors] Three kinds of errors are meant for users:

* ``ValueError``, including `Refused`: raised before training starts, or when a request is made.
  Nothing has changed. Correct the setting, the file or the request.
* `ExchangeError`: raised in the training thread by the call that would land a fragment, because
  another group disconnected or was too slow. The model and the records of all fragments are as they
  were before that landing, and the flight is lost. Training cannot continue, but a checkpoint can
  still be saved.
* `AgreementError`: raised in the same place if groups no longer agree. No landing has committed
  anything on which groups disagree. Resume all groups from one checkpoint.

The background thread passes every exception to the landing of its flight, so none is lost.
"""


class ExchangeError(RuntimeError):
    """A worker group did not respond, or disconnected, while a fragment was in flight."""


class AgreementError(RuntimeError):
    """The worker groups no longer agree on outer parameters or due fragments, or their values are
    not finite.
    """


class Refused(ValueError):
    """A request was refused for the reason in the message; retrying does not help."""


class Malformed(Refused):
    """The bytes that were read are damaged, malicious, out of bounds, or from another version."""
