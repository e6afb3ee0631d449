"""Settings of a run: sections, defaults, checks and derived values."""
