"""What a loop is bound by, and whether this machine keeps the order of its streams."""
