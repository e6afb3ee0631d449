"""Plan a pod before renting it: what a step needs, how long it takes, which layout is best."""
