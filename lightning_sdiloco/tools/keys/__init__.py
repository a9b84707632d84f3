"""The command ``sdiloco keys``: certificates for a federation."""
