"""What a run did: the records of its ranks, a timeline of them, and a report."""
