"""Mixtures of experts: the router, the exchange of tokens, and grouped products."""
