"""What tests share: small models, runs and files, references to compare with, and stand-ins for what lies outside."""
