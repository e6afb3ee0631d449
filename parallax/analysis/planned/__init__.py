"""Predicted for chips that need not be present: step times, plans, and searches for layouts."""
