"""Chips as their data sheets have them, and the devices of this machine."""
