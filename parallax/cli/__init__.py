"""Commands. `parallax/__init__.py` adds this folder to the package's path: `python -m parallax.plan` runs `plan.py`."""
