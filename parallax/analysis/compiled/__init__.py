"""Read from compiled programs and profiles: collectives, FLOPs, bytes and the order of events on a device."""
