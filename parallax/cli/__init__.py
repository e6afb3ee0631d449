"""Commands. `parallax/__init__.py` puts this folder on the package's path: `python -m parallax.plan` runs `plan.py`."""
