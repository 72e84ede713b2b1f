"""What batch norm is in PyTorch: its forms as data, its op family as total functions. No graph is walked here."""
