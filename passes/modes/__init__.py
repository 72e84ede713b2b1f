"""Training and eval: switching, freezing, counters, dropouts, recalibration."""
