"""A training run, on the host: the loop around the step, what it prints, saves and resumes."""
