"""Files of other programs and of this one, read: one file a format."""
