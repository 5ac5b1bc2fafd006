"""What all tests in Python share."""

import os

# Before torch is loaded: its threads would spin for each other at the end of every small product. Where tests run side by side
# the other thread waits for a processor, and that takes ten times as long as the products.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
