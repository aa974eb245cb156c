"""``python -m dsv4_ops bench``: times of the ops on this machine, beside those of others, each checked before it is timed."""
