"""Settings of a run: their sections, defaults and checks, and what follows from them."""
