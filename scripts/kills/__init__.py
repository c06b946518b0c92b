"""Savers that are killed while they save: a module for each library.

In: nothing. Out: `NEEDED`, the packages that it needs; `prepare`, which imports all that takes long before the first
fork; and `SAVERS`, how it saves and loads, by name (`Saver` in test_kills.py).
"""
