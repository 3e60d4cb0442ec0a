"""`diptych bench`: measures a running service as its clients see it, and an engine alone."""
