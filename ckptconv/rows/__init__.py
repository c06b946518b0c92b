"""Embedding tables that are saved as whole rows: split into tensors, packed again, checked."""
