"""What a step sends, stores and computes."""
