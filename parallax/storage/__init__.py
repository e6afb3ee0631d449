"""Files: opened, replaced, locked and parsed, and their names in a run's folder."""
