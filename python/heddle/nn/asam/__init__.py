"""Adaptive sparse attention (ASAM): its layers are public in heddle.nn. docs/asam.md has what they compute."""
