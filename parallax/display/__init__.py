"""How quantities, progress, tables and pictures are shown."""
