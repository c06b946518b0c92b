"""One module per output format: from a flat state dict and its structure record to file plans."""
