"""A site's connection to a run without a hub: messages as files in a folder, and the keeper that this site may be."""

import logging

from lightning_sdiloco.comm import FolderHubMailbox, is_bucket, shared_files
from lightning_sdiloco.hub.keeper import Keeper, Rhythm
from lightning_sdiloco.hub.quorums import Quorums
from lightning_sdiloco.hub.remote import MailboxConnection
from lightning_sdiloco.hub.shards import MailboxShards, Wanted, all_payloads

log = logging.getLogger(__name__)

_MARGIN = 2.0  # seconds after its lease for which the name of a site that died may still be in use


class FolderConnection(MailboxConnection):
    """A site's connection to a run in a folder or bucket; see `Connection` and [Note: the keeper].

    Args:
        url: The folder, or a URL such as ``s3://bucket/run``.
        run: The name of the run.
        site: The name of the site.
        sites: How many sites found the run.
        lease: Seconds without a sign of life after which a keeper is followed by another.
        quorum: The class path of a quorum of the user's own.
        patience: Seconds that `agree` waits for somebody who keeps the run.
        wanted: Returns which payloads of a contribution this rank needs.

    Raises:
        ValueError: If the folder cannot be used, or is that of another run.
    """

    def __init__(
        self,
        url: str,
        run: str,
        site: str,
        sites: int,
        lease: float = 10.0,
        quorum: str | None = None,
        patience: float = 60.0,
        wanted: Wanted = all_payloads,
    ) -> None:
        log.warning("Site %s meets others in %s: whoever can write there can be any of them.", site, url)
        files, rhythm = shared_files(url), Rhythm.of(lease, is_bucket(url))
        self.keeper = Keeper(files, run, site, sites, rhythm, Quorums(quorum))
        mailbox = FolderHubMailbox(files, run, site, silence=rhythm.silence, beat=rhythm.beat, poll=rhythm.poll)
        super().__init__(mailbox, run, site, patience + lease, wanted, lease + _MARGIN)
        self.keeper.start()

    def close(self, timeout: float = 5.0) -> None:
        """See `Connection`. What this site kept, another one may keep then."""
        super().close(timeout)
        self.keeper.close(timeout)


def folder_shards(
    url: str, run: str, site: str, life: str, lease: float, wanted: Wanted, patience: float
) -> MailboxShards:
    """Returns what moves the payloads of another rank of a site to and from a folder."""
    rhythm = Rhythm.of(lease, is_bucket(url))
    mailbox = FolderHubMailbox(
        shared_files(url), run, site, life=life, silence=rhythm.silence, beat=rhythm.beat, poll=rhythm.poll
    )
    return MailboxShards(mailbox, site, wanted, patience)
