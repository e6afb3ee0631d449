"""When stages run: the executor of schedule tables, what a stage does, and what it keeps."""
