"""Where arrays are cut: the mesh, the notation of layouts, the collectives between layouts, and what XLA is told."""
