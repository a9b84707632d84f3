"""Errors that several rooms share.

[Note: kinds of errors] Three kinds of errors are meant for people:

* ``ValueError``, and `Refused` among them: raised before training starts, or where a request is
  made. Nothing has changed: correct the setting, the file or the request.
* `ExchangeError`: raised in the training thread by the call that would land a fragment, because
  another group went away or was too slow. The model and the records of all fragments are as before
  that landing, and the flight is gone. Training cannot continue; a checkpoint can still be saved.
* `AgreementError`: raised in the same place, because groups no longer agree. No landing has
  committed anything that groups do not agree on. Resume all groups from one checkpoint.

The background hands every exception to the landing of its flight, so that none is lost.
"""


class ExchangeError(RuntimeError):
    """A worker group did not answer, or went away, while a fragment was in flight."""


class AgreementError(RuntimeError):
    """The worker groups no longer agree on outer parameters, on what is due, or on finite values."""


class Refused(ValueError):
    """A request was refused for the reason in its text; asking again does not help."""


class Malformed(Refused):
    """Bytes that were read are damaged, of another version, out of bounds, or malicious."""
