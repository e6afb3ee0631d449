"""The first run on new chips: a few steps, held to what the plan says, in one file for an issue."""
