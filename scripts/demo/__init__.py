"""Heddle's demo: runs a real encoder and attention alone, and writes the report that compares their methods.

Run it from the root of the checkout: `python -m scripts.demo --help`.
"""
