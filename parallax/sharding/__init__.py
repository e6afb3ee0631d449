"""How arrays are sharded: the mesh, the notation of layouts, collectives between layouts, and compiler options."""
