"""A site: an engine that follows the records of a federation, in place of a schedule that all groups share."""
