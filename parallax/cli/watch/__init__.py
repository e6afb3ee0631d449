"""A run, looked at while it goes on or when it has ended: `python -m parallax.watch runs/mine`."""
