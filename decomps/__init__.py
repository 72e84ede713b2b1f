"""What batch norm is in PyTorch: its forms, as data. No graph is walked here."""
